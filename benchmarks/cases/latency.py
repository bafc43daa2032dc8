"""Storage of which each request takes 5 ms: how much of what so many threads allow is reached."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.data import Data
from benchmarks.throughput import BATCH_SIZE, seconds

NAME = "latency"
LATENCY = 0.005
SCHEME = "slow"


def variants(is_short: bool) -> list[dict[str, Any]]:
    return [
        {"system": "zephon_torch", "threads": threads, "seconds": seconds(is_short)}
        for threads in (1, 8, 32)
    ]


def measure(variant: dict[str, Any], work_dir: Path) -> dict[str, float]:
    """Read rows of one file, so that each batch is one request for many ranges."""
    from zephon_torch import DataLoader
    from zephon_torch.io import Dataset

    requests = register()
    path = Data(work_dir / "data").rows(1)[0]
    rows = Dataset.from_path("rows", f"{SCHEME}://{path}")
    threads, duration = variant["threads"], variant["seconds"]
    with DataLoader(rows, BATCH_SIZE, shuffle=True, num_threads=threads) as loader:
        count(loader, duration / 4)
        before, cpu = len(requests), time.process_time()
        samples, elapsed = count(loader, duration)
        asked, cpu = len(requests) - before, time.process_time() - cpu
    return {
        "samples_per_s": samples / elapsed,
        "requests_per_s": asked / elapsed,
        "requests_per_batch": asked / (samples / BATCH_SIZE),
        "cpu_ms_per_request": cpu / asked * 1e3,
        "reached_share": asked / elapsed / (threads / LATENCY),
    }


def register() -> list[None]:
    """Make local files slow under ``slow://``; return a list that grows with each request.

    Several ranges are one request of 5 ms: stores that are worth it are asked for all at once.
    """
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    requests: list[None] = []

    class Slow(LocalFileSystem):  # type: ignore[misc]
        protocol = SCHEME

        def cat_file(self, *arguments: Any, **options: Any) -> Any:
            wait(requests)
            return super().cat_file(*arguments, **options)

        def cat_ranges(
            self, paths: Any, starts: Any, ends: Any, *_: Any, **options: Any
        ) -> list[bytes]:
            wait(requests)
            file = opened(paths[0])
            return [os.pread(file, b - a, a) for a, b in zip(starts, ends, strict=True)]

    fsspec.register_implementation(SCHEME, Slow, clobber=True)
    return requests


def wait(requests: list[None]) -> None:
    requests.append(None)
    time.sleep(LATENCY)


@functools.cache
def opened(path: str) -> int:
    return os.open(path, os.O_RDONLY)


def count(loader: Any, duration: float) -> tuple[int, float]:
    """Take batches, epoch after epoch, for some seconds; return samples and the time it took."""
    samples, start = 0, time.perf_counter()
    while True:
        for batch in loader:
            samples += len(batch)
            if (elapsed := time.perf_counter() - start) > duration:
                return samples, elapsed
