"""Two corpora that come with Python: its documentation and some of its code, as rows of bytes."""

from __future__ import annotations

import argparse
import pydoc_data.topics
from pathlib import Path

import torch

from zephon_torch import StaticMixtureWorkSource
from zephon_torch.io import Dataset

Row = dict[str, torch.Tensor]
LENGTH = 64
NUM_HELD_OUT = 101


def rows(text: bytes) -> list[Row]:
    """Rows of ``LENGTH`` bytes, as a causal language model takes them."""
    table = torch.frombuffer(bytearray(text[: len(text) // LENGTH * LENGTH]), dtype=torch.uint8)
    return [{"input_ids": row, "labels": row} for row in table.long().view(-1, LENGTH)]


def prose() -> list[Row]:
    """Python's documentation of itself."""
    return rows("\n".join(pydoc_data.topics.topics.values()).encode())


def make_source() -> StaticMixtureWorkSource:
    """7 of 10 rows are prose, 3 are code; the first rows of the prose are left out."""
    code = rows(Path(argparse.__file__).read_bytes())
    return StaticMixtureWorkSource(
        [Dataset.from_samples("prose", prose()[NUM_HELD_OUT:]), Dataset.from_samples("code", code)],
        {"prose": 0.7, "code": 0.3},
        seed=7,
        shuffle_block_size="global",
    )


def held_out() -> list[Row]:
    """Rows that no training run sees."""
    return prose()[:NUM_HELD_OUT]
