"""Megatron's indexed dataset (.bin and .idx) in torch's loader."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import Data
from benchmarks.systems.base import System
from benchmarks.systems.torch import Torch, mixed


class Megatron(System):
    label = "Megatron IndexedDataset"
    requirement = "megatron-core"
    packages = ("megatron-core",)
    modules = ("torch", "megatron.core.datasets.indexed_dataset")
    note = "One pair of files; global shuffle by RandomSampler."
    formats = ()
    text_engines = mixture_engines = ()

    def prepare(self, data: Data, folder: Path) -> None:
        import torch
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        builder = IndexedDatasetBuilder(str(folder / "rows.bin"), dtype=np.uint16)
        for row in data.all_rows():
            builder.add_item(torch.from_numpy(row.astype(np.int32)))
            builder.end_document()
        builder.finalize(str(folder / "rows.idx"))

    def tokens(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterable[Any]:
        dataset, sampler = mixed({"rows": Rows(folder / "rows")}, {"rows": 1.0})
        return Torch().make(dataset, sampler, variant)


class Rows:
    """Sequences of an indexed dataset as int64 tensors."""

    def __init__(self, prefix: Path) -> None:
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        self._sequences = IndexedDataset(str(prefix))

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.from_numpy(self._sequences[index].astype(np.int64))


ADAPTER = Megatron()
