"""How many samples a second a loader hands over, and at what cost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from benchmarks.processes import cpu_seconds, main_rss_mb, memory_mb

BATCH_SIZE = 32


def seconds(is_short: bool) -> float:
    """Return for how long a loader is measured."""
    return 0.7 if is_short else 1.0


class Endless:
    """A loader's batches, epoch after epoch; `pause` is the time that new epochs took to start."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self.pause = 0.0

    def __iter__(self) -> Iterator[Any]:
        is_first = True
        while True:
            start = time.perf_counter()
            batches = iter(self._loader)
            batch = next(batches)
            if not is_first:
                self.pause += time.perf_counter() - start
            is_first = False
            yield batch
            yield from batches


def measure_loader(make: Callable[[], Iterable[Any]], duration: float) -> dict[str, float]:
    """Return the metrics of a loader in steady state; the consumer only counts samples."""
    pid = os.getpid()
    start = time.perf_counter()
    endless = Endless(make())
    batches = iter(endless)
    next(batches)
    metrics = {"first_batch_s": time.perf_counter() - start}
    _count(batches, duration / 4)
    cpu, pause = cpu_seconds(pid), endless.pause
    samples, elapsed = _count(batches, duration)
    elapsed -= endless.pause - pause
    metrics["samples_per_s"] = samples / elapsed
    metrics["cpu_s_per_million"] = (cpu_seconds(pid) - cpu) / samples * 1e6
    seen = []
    for _ in range(3):
        _count(batches, duration / 20)
        seen.append(memory_mb(pid) | {"main_rss_mb": main_rss_mb(pid)})
    return metrics | {key: max(one[key] for one in seen) for key in seen[0]}


def _count(batches: Iterator[Any], duration: float) -> tuple[int, float]:
    """Take batches for some seconds; return how many samples came in which time."""
    samples, start = 0, time.perf_counter()
    end = start + duration
    while (now := time.perf_counter()) < end:
        samples += len(next(batches))
    return samples, now - start
