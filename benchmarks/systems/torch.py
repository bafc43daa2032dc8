"""torch's own DataLoader over map-style datasets."""

from __future__ import annotations

import json
import mmap
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import Data
from benchmarks.systems.base import WORKERS, System, num_workers, same
from benchmarks.throughput import BATCH_SIZE

MANY = 10_000_000  # samples of one iteration, so that no epoch ends while we look


class Lines:
    """Map-style dataset of JSON lines: maps and offsets, as one would write it by hand."""

    def __init__(self, data: Data, corpus: str) -> None:
        self._paths, self._offsets = data.shards(corpus), data.offsets(corpus)
        self._firsts = np.cumsum([0, *(len(shard) - 1 for shard in self._offsets)]).tolist()
        self._maps: list[mmap.mmap] = []

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> Any:
        if not self._maps:  # in the process that reads
            for path in self._paths:
                with open(path, "rb") as file:
                    self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        shard = bisect_right(self._firsts, index) - 1
        start, stop = self._offsets[shard][index - self._firsts[shard] :][:2].tolist()
        return json.loads(self._maps[shard][start:stop])


class Rows:
    """Map-style dataset of token rows in .npy files."""

    def __init__(self, paths: list[Path]) -> None:
        self._shards = [np.load(path, mmap_mode="r") for path in paths]
        self._firsts = np.cumsum([0, *map(len, self._shards)]).tolist()

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def __getitem__(self, index: int) -> Any:
        import torch

        shard = bisect_right(self._firsts, index) - 1
        row = self._shards[shard][index - self._firsts[shard]]
        return torch.from_numpy(row.astype(np.int64))


class Torch(System):
    label = "torch DataLoader"
    packages = modules = ("torch",)
    token_engines = WORKERS
    note = "Global shuffle by RandomSampler; mixtures by WeightedRandomSampler over ConcatDataset."

    def text(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterable[Any]:
        mixture = data.mixture(variant["datasets"])
        dataset, sampler = mixed({name: Lines(data, name) for name in mixture}, mixture)
        return self.make(dataset, sampler, variant, collate_fn=same)

    def tokens(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterable[Any]:
        dataset, sampler = mixed({"rows": Rows(data.rows(variant["shards"]))}, {"rows": 1.0})
        return self.make(dataset, sampler, variant)

    def make(self, dataset: Any, sampler: Any, variant: dict[str, Any], **options: Any) -> Any:
        from torch.utils.data import DataLoader

        return DataLoader(
            dataset, BATCH_SIZE, sampler=sampler, num_workers=num_workers(variant), **options
        )


def mixed(datasets: dict[str, Any], mixture: dict[str, float]) -> tuple[Any, Any]:
    """Return a dataset and a sampler without end."""
    import torch
    from torch.utils.data import ConcatDataset, RandomSampler, WeightedRandomSampler

    generator = torch.Generator().manual_seed(1)
    if len(datasets) == 1:
        (dataset,) = datasets.values()
        return dataset, RandomSampler(dataset, num_samples=MANY, generator=generator)
    weights = [
        torch.full((len(dataset),), mixture[name] / len(dataset), dtype=torch.float64)
        for name, dataset in datasets.items()
    ]
    sampler = WeightedRandomSampler(torch.cat(weights), 1_000_000, generator=generator)
    return ConcatDataset(datasets.values()), sampler


ADAPTER = Torch()
