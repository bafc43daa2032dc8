"""What the machine allows: reads and decoding of known records, without a loader."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import ROW_LENGTH, Data
from benchmarks.systems.base import System
from benchmarks.systems.zephon_torch import source_of_text
from benchmarks.throughput import BATCH_SIZE

NUM_RECORDS = 400_000  # addresses that are known beforehand


class Limits(System):
    label = "limit"
    packages = ("numpy", "orjson")
    modules = ("numpy", "torch")
    note = "The same records in the same order as zephon_torch, where they lie known beforehand."
    formats = ("json", "orjson")
    text_engines = mixture_engines = token_engines = ("inline",)

    def text(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterator[Any]:
        if variant["format"] == "orjson":
            from orjson import loads
        else:
            from json import loads
        return _text(data, variant["datasets"], loads)

    def tokens(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterator[Any]:
        import torch

        rows = np.load(data.rows(1)[0])
        ids = np.random.default_rng(0).permutation(len(rows))
        batches = ids[: len(ids) // BATCH_SIZE * BATCH_SIZE].reshape(-1, BATCH_SIZE)
        buffer = np.zeros((BATCH_SIZE, ROW_LENGTH), np.uint16)
        for batch in itertools.cycle(batches):
            np.take(rows, batch, 0, out=buffer, mode="clip")
            yield torch.from_numpy(buffer).long()


def _text(data: Data, num_datasets: int, loads: Callable[[bytes], Any]) -> Iterator[Any]:
    source = source_of_text(data, num_datasets, "jsonl")
    pointers = source.plan.pointers(np.arange(NUM_RECORDS))
    maps, addresses = [], []
    for dataset in source.datasets:
        offsets = data.offsets(dataset.name)
        sizes = [len(shard) - 1 for shard in offsets]
        first = np.cumsum([0, *sizes])
        starts = np.concatenate([shard[:-1] for shard in offsets])
        stops = np.concatenate([shard[1:] for shard in offsets])
        addresses.append((first, starts, stops, len(maps)))
        for path in data.shards(dataset.name):
            with open(path, "rb") as file:
                maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    file_of, start_of, stop_of = (np.empty(NUM_RECORDS, np.int64) for _ in range(3))
    for number, (first, starts, stops, before) in enumerate(addresses):
        here = np.flatnonzero(pointers.dataset == number)
        record = first[pointers.shard[here]] + pointers.sample[here]
        file_of[here] = before + pointers.shard[here]
        start_of[here], stop_of[here] = starts[record], stops[record]
    where = list(zip(file_of.tolist(), start_of.tolist(), stop_of.tolist(), strict=True))
    for i in itertools.cycle(range(0, len(where) // BATCH_SIZE * BATCH_SIZE, BATCH_SIZE)):
        yield [loads(maps[f][a:b]) for f, a, b in where[i : i + BATCH_SIZE]]


ADAPTER = Limits()
