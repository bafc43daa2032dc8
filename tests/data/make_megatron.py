"""Writes ``megatron/golden.bin`` and ``.idx`` with megatron-core (0.16.1 when they were made)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

LENGTHS = [3, 4, 2, 0, 6]
ENDS_DOCUMENTS = {1: 2, 4: 1}  # after sequence 1 two end, of which the second is empty

if __name__ == "__main__":
    path = Path(__file__).parent / "megatron" / "golden"
    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
    start = 0
    for number, length in enumerate(LENGTHS):
        builder.add_item(torch.arange(start, start + length))
        start += length
        for _ in range(ENDS_DOCUMENTS.get(number, 0)):
            builder.end_document()
    builder.finalize(f"{path}.idx")
