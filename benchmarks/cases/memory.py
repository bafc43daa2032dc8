"""Memory at the start and over ten epochs of text, beside torch's DataLoader on the same files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.data import Data
from benchmarks.processes import main_rss_mb, memory_mb
from benchmarks.systems.base import same
from benchmarks.throughput import BATCH_SIZE

NAME = "memory"
TURNS = 1


def variants(is_short: bool) -> list[dict[str, Any]]:
    return [
        {"system": system, "workers": workers, "epochs": 3 if is_short else 10}
        for workers in ((0,) if is_short else (0, 2))
        for system in ("zephon_torch", "torch")
    ]


def measure(variant: dict[str, Any], work_dir: Path) -> dict[str, float]:
    """Look at the middle of each epoch, while worker processes are there.

    ``pss_mb`` counts mapped pages of files, which the kernel takes back when it needs them;
    ``own_mb`` does not.
    """
    pid = os.getpid()
    metrics = {"imported_own_mb": memory_mb(pid)["own_mb"]}
    make = _torch if variant["system"] == "torch" else _zephon_torch
    loader = make(Data(work_dir / "data"), variant["workers"])
    middle, seen = len(loader) // 2, []
    for _ in range(variant["epochs"]):
        for step, _ in enumerate(loader):
            if step == middle:
                seen.append(memory_mb(pid) | {"main_rss_mb": main_rss_mb(pid)})
    for key in ("pss_mb", "own_mb", "main_rss_mb"):
        metrics |= {f"first_{key}": seen[0][key], f"last_{key}": seen[-1][key]}
    # the first epoch fills caches and arenas of the allocator
    grown = seen[-1]["own_mb"] - seen[1]["own_mb"]
    return metrics | {"grown_mb_per_epoch": grown / (len(seen) - 2)}


def _zephon_torch(data: Data, workers: int) -> Any:
    from zephon_torch import DataLoader
    from zephon_torch.io import Dataset

    web = Dataset.from_path("web", data.folder / "web")
    return DataLoader(web, BATCH_SIZE, shuffle=True, num_workers=workers, collate_fn=same)


def _torch(data: Data, workers: int) -> Any:
    from torch.utils.data import DataLoader

    from benchmarks.systems.torch import Lines

    return DataLoader(
        Lines(data, "web"),  # type: ignore[arg-type]
        BATCH_SIZE,
        shuffle=True,
        num_workers=workers,
        collate_fn=same,
    )
