"""From a loaded state to the first batch, beside a fresh start; what a state weighs and costs.

Each time is that of a new process which has only imported its packages and built its loader.
"""

from __future__ import annotations

import io
import itertools
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.apart import apart
from benchmarks.data import Data
from benchmarks.systems import NAMES, load
from benchmarks.systems.base import num_workers, same
from benchmarks.throughput import BATCH_SIZE

NAME = "resume"
TURNS = 2
PLACES = (10, 50, 90)  # percent of an epoch
SYSTEMS = ("zephon_torch", "stateful", "nodes", "hf", "litdata", "grain", "mds")


def variants(is_short: bool) -> list[dict[str, Any]]:
    return [
        {"system": name, "datasets": 1, "format": load(name).formats[0], "engine": engine}
        for name in SYSTEMS
        if name in NAMES
        for engine in ("inline", "thread", "2 workers")
        if engine == "inline"
        or name == "zephon_torch"
        or (name, engine) == ("stateful", "2 workers")
    ]


def measure(variant: dict[str, Any], work_dir: Path) -> dict[str, float]:
    def opened() -> Resumable:
        return SPECIAL.get(variant["system"], Resumable)(variant, work_dir)

    def fresh() -> float:
        seconds, _ = opened().first_batch()
        return seconds

    metrics = {"fresh_s": apart(fresh)}
    documents = sum(len(shard) - 1 for shard in Data(work_dir / "data").offsets("web"))
    num_exact = 0
    saved: tuple[bytes, float, list[int]] = b"", 0.0, []
    for percent in PLACES:
        batches = documents * percent // 100 // BATCH_SIZE
        saved = apart(lambda count=batches: opened().run(count))  # type: ignore[misc]

        def resumed(state: bytes = saved[0]) -> tuple[float, list[int]]:
            return opened().first_batch(state)

        metrics[f"at_{percent}_s"], ids = apart(resumed)
        num_exact += ids == saved[2]
    return metrics | {
        "slowest_s": max(metrics[f"at_{percent}_s"] for percent in PLACES),
        "state_bytes": len(saved[0]),
        "state_us": saved[1],
        "exact_share": num_exact / len(PLACES),
    }


class Resumable:
    """A loader of a system, as most of them save and load: by the methods of torchdata."""

    def __init__(self, variant: dict[str, Any], work_dir: Path) -> None:
        system, folder = load(variant["system"]), work_dir / "systems" / variant["system"]
        self.loader = self.of(system.text(variant, Data(work_dir / "data"), folder), variant)

    def of(self, loader: Any, variant: dict[str, Any]) -> Any:
        return loader

    def save(self, count: int) -> Any:
        """Return the state after so many batches."""
        return self.loader.state_dict()

    def load(self, state: Any) -> None:
        self.loader.load_state_dict(state)

    def first_batch(self, state: bytes | None = None) -> tuple[float, list[int]]:
        """Return the time to the first batch, and its ids."""
        import torch

        start = time.perf_counter()
        if state is not None:
            self.load(torch.load(io.BytesIO(state), weights_only=False))
        batch = next(iter(self.loader))
        return time.perf_counter() - start, ids_of(batch)

    def run(self, count: int) -> tuple[bytes, float, list[int]]:
        """Return the state after `count` batches, microseconds to make it, ids of the next one."""
        import torch

        batches: Iterator[Any] = iter(self.loader)
        for _ in itertools.islice(batches, count):
            pass
        times = []
        for _ in range(20):
            start = time.perf_counter()
            state = self.save(count)
            times.append(time.perf_counter() - start)
        file = io.BytesIO()
        torch.save(state, file)
        return file.getvalue(), statistics.median(times) * 1e6, ids_of(next(batches))


class Mapped(Resumable):
    """HF's dataset in torchdata's StatefulDataLoader, which its documentation recommends."""

    def of(self, loader: Any, variant: dict[str, Any]) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(
            loader.dataset,
            BATCH_SIZE,
            sampler=loader.sampler,
            num_workers=num_workers(variant),
            collate_fn=same,
        )


class Grains(Resumable):
    """Grain's iterator."""

    def save(self, count: int) -> Any:
        return self.loader.get_state()

    def load(self, state: Any) -> None:
        self.loader.set_state(state)


class Streaming(Resumable):
    """MosaicML's dataset, which is told how many samples its loader has handed over."""

    def save(self, count: int) -> Any:
        return self.loader.dataset.state_dict(count * BATCH_SIZE, from_beginning=True)

    def load(self, state: Any) -> None:
        self.loader.dataset.load_state_dict(state)


SPECIAL: dict[str, type[Resumable]] = {"hf": Mapped, "grain": Grains, "mds": Streaming}


def ids_of(batch: list[dict[str, Any]]) -> list[int]:
    return [int(sample["id"]) for sample in batch]
