"""What the loader costs beside torch's own over map-style datasets in memory, an epoch each."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.throughput import BATCH_SIZE

NAME = "overhead"
TURNS = 2
DATASETS = {"tensors": 40_000, "10 us a sample": 20_000, "100 us a sample": 4_000}
EPOCHS = 5


def variants(is_short: bool) -> list[dict[str, Any]]:
    return [
        {"system": "zephon_torch", "dataset": name, "engine": engine}
        for name in DATASETS
        for engine in ("inline", "2 workers")
        if not is_short or engine == "inline"
    ]


def measure(variant: dict[str, Any], work_dir: Path) -> dict[str, float]:
    """Return microseconds a sample of both loaders, taking turns in one process; the fastest."""
    import torch.utils.data

    import zephon_torch

    size = DATASETS[variant["dataset"]]
    dataset = _dataset(variant["dataset"], size)
    workers = 2 if variant["engine"] == "2 workers" else 0
    options: dict[str, Any] = {
        "batch_size": BATCH_SIZE,
        "shuffle": True,
        "num_workers": workers,
        "persistent_workers": workers > 0,
    }
    theirs = torch.utils.data.DataLoader(dataset, **options)
    with zephon_torch.DataLoader(dataset, **options) as ours:
        epochs = [(_seconds(theirs), _seconds(ours)) for _ in range(EPOCHS + 1)][1:]
    torch_us, ours_us = (min(times) / size * 1e6 for times in zip(*epochs, strict=True))
    return {"torch_us": torch_us, "ours_us": ours_us, "ratio": ours_us / torch_us}


def _dataset(name: str, size: int) -> Any:
    import torch
    from torch.utils.data import TensorDataset

    if name == "tensors":
        return TensorDataset(torch.randn(size, 64), torch.arange(size))
    return Busy(size, float(name.split()[0]) * 1e-6)


class Busy:
    """Samples that take a given time to compute."""

    def __init__(self, size: int, seconds: float) -> None:
        import torch

        self._row, self._size, self._seconds = torch.arange(64), size, seconds

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        end = time.perf_counter() + self._seconds
        while time.perf_counter() < end:
            pass
        return self._row


def _seconds(loop: Iterable[Any]) -> float:
    start = time.perf_counter()
    for _ in loop:
        pass
    return time.perf_counter() - start
