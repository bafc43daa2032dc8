"""Prepares a system's files and checks, outside of timing, that what it yields is right."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks import systems
from benchmarks.data import ROW_LENGTH, Data
from benchmarks.systems.base import System
from benchmarks.throughput import BATCH_SIZE

NUM_BATCHES = 3


def prepare_and_check(name: str, work_dir: Path) -> None:
    """Write the system's files, unless they are there; then look at its first batches."""
    system, data = systems.load(name), Data(work_dir / "data")
    folder = work_dir / "systems" / name
    note = folder / "prepared.txt"
    if not note.exists() or note.read_text() != data.checksum():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        system.prepare(data, folder)
        check(system, data, folder)
        note.write_text(data.checksum())


def check(system: System, data: Data, folder: Path) -> None:
    """Raise unless each case of a system yields batches of the right samples."""
    engine = {"engine": "inline"}
    if system.text_engines:
        one = {"datasets": 1, "format": system.formats[0]} | engine
        _check_text(system.text(one, data, folder), data)
    if system.mixture_engines:
        two = {"datasets": 2, "format": system.formats[0]} | engine
        _check_text(system.text(two, data, folder), data)
    if system.token_engines:
        _check_tokens(system.tokens({"shards": 24} | engine, data, folder), data)


def _check_text(batches: Iterable[Any], data: Data) -> None:
    for batch in itertools.islice(batches, NUM_BATCHES):
        assert isinstance(batch, list) and len(batch) == BATCH_SIZE, "no list of 32 samples"
        for sample in batch[:4]:
            wanted = data.document(int(sample["id"]))
            assert {"id": int(sample["id"]), "text": sample["text"]} == wanted, "not the document"


def _check_tokens(batches: Iterable[Any], data: Data) -> None:
    rows = data.all_rows()
    for batch in itertools.islice(batches, NUM_BATCHES):
        assert isinstance(batch, torch.Tensor) and batch.dtype == torch.int64, "no int64 tensor"
        assert batch.shape == (BATCH_SIZE, ROW_LENGTH), f"shape {tuple(batch.shape)}"
        for row in batch:
            number = int(row[0]) * 50_000 + int(row[1])
            assert (row.numpy() == rows[number]).all(), "not the row"
