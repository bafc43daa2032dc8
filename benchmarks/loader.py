"""What the loader costs beside torch's own, and how fast it saves and resumes.

Run with ``python benchmarks/loader.py``. Each pair takes turns in one run, an epoch each; the ratio
is that of the fastest turns. Trust ratios more than milliseconds: machines are noisy.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.utils.data
from torch.utils.data import TensorDataset

import zephon_torch
from zephon_torch.io import Dataset
from zephon_torch.work import StaticMixtureWorkSource

BATCH_SIZE = 32


class Busy(torch.utils.data.Dataset[torch.Tensor]):
    """Samples that take a given time to compute."""

    def __init__(self, size: int, seconds: float) -> None:
        self._row, self._size, self._seconds = torch.arange(64), size, seconds

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> torch.Tensor:
        end = time.perf_counter() + self._seconds
        while time.perf_counter() < end:
            pass
        return self._row


def tensors(size: int) -> TensorDataset:
    return TensorDataset(torch.randn(size, 64), torch.arange(size))


DATASETS: dict[str, Callable[[], Any]] = {
    "TensorDataset, 40,000 samples": lambda: tensors(40_000),
    "10 us a sample, 20,000 samples": lambda: Busy(20_000, 10e-6),
    "100 us a sample, 4,000 samples": lambda: Busy(4_000, 100e-6),
}


def seconds_of(loop: Iterable[Any]) -> float:
    start = time.perf_counter()
    for _ in loop:
        pass
    return time.perf_counter() - start


def overhead(turns: int) -> None:
    print("a whole epoch beside torch.utils.data.DataLoader, fastest turn of each")
    for name, make in DATASETS.items():
        dataset = make()
        for num_workers in (0, 2):
            for shuffle in (False, True):
                options: dict[str, Any] = {
                    "batch_size": BATCH_SIZE,
                    "shuffle": shuffle,
                    "num_workers": num_workers,
                    "persistent_workers": num_workers > 0,
                }
                theirs = torch.utils.data.DataLoader(dataset, **options)
                with zephon_torch.DataLoader(dataset, **options) as ours:
                    times = [(seconds_of(theirs), seconds_of(ours)) for _ in range(turns + 1)][1:]
                a, b = (min(turn) for turn in zip(*times, strict=True))
                how = f"{num_workers} workers{', shuffled' if shuffle else ''}"
                print(
                    f"  {name:<32} {how:<20} torch {a * 1e3:7.1f} ms, ours {b * 1e3:7.1f} ms, "
                    f"ratio {b / a:.3f}",
                    flush=True,
                )


def write(root: Path, num_shards: int, records: int) -> Path:
    root.mkdir()
    for shard in range(num_shards):
        lines = (json.dumps({"id": shard * records + i, "text": "x" * 200}) for i in range(records))
        (root / f"{shard:04d}.jsonl").write_text("\n".join(lines) + "\n")
    return root


def mixture(root: Path) -> StaticMixtureWorkSource:
    datasets = [Dataset.from_path(name, root / name) for name in ("web", "code")]
    return StaticMixtureWorkSource(
        datasets, {"web": 0.7, "code": 0.3}, seed=1, shuffle_block_size="global"
    )


def state(root: Path) -> None:
    loader = zephon_torch.DataLoader(mixture(root), batch_size=BATCH_SIZE)
    model = torch.nn.Linear(1, 1)
    zephon_torch.bind(model, loader)
    next(iter(loader))
    print("state, microseconds (1 % of a step of 10 ms is 100)")
    for name, function in (
        ("loader.state_dict()", loader.state_dict),
        ("extra state of a bound model", model.data_progress.get_extra_state),
    ):
        best = min(seconds_of(function() for _ in range(1000)) for _ in range(9))
        print(f"  {name:<32} {best * 1e3:.1f}")


def resume(root: Path) -> None:
    print("load_state_dict to the first batch at 90 % of an epoch, ms, files not yet open")
    for engine in ({}, {"num_threads": 0}, {"num_workers": 2}):
        times = []
        for _ in range(5):
            loader = zephon_torch.DataLoader(mixture(root), batch_size=BATCH_SIZE, **engine)
            total = loader.source.total_samples
            saved = loader.state_dict() | {"delivered": int(total * 0.9) // BATCH_SIZE * BATCH_SIZE}
            start = time.perf_counter()
            loader.load_state_dict(saved)
            next(iter(loader))
            times.append(time.perf_counter() - start)
            loader.close()
        print(f"  {engine or 'default'!s:<32} {min(times) * 1e3:.1f} ... {max(times) * 1e3:.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    overhead(arguments.turns)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write(root / "web", 50, 2000)
        write(root / "code", 50, 1000)
        state(root)
        resume(root)


if __name__ == "__main__":
    main()
