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
TURNS = 3
LATENCY = 0.005
SCHEME = "slow"


def variants(is_short: bool) -> list[dict[str, Any]]:
    return [
        {"system": "zephon_torch", "reads": reads, "threads": threads, "seconds": seconds(is_short)}
        for reads in ("dataset", "store")
        for threads in (1, 8, 16, 32)
        if not is_short or (reads, threads) in (("dataset", 32), ("store", 8))
    ]


def measure(variant: dict[str, Any], work_dir: Path) -> dict[str, float]:
    """Read a dataset whose call for a batch takes 5 ms, or rows of files in a store as slow.

    ``reached_share`` compares with one call a batch in each thread, one after the other; a store is
    asked for several batches at once.
    """
    from zephon_torch import DataLoader
    from zephon_torch.io import Dataset

    requests: list[None] = []
    if variant["reads"] == "dataset":
        rows = Dataset.from_torch("rows", SlowDataset(requests))
    else:
        register(requests)
        rows = Dataset.from_path("rows", f"{SCHEME}://{Data(work_dir / 'data').rows(1)[0]}")
    threads, duration = variant["threads"], variant["seconds"]
    with DataLoader(rows, BATCH_SIZE, shuffle=True, num_threads=threads) as loader:
        count(loader, duration / 4)
        before, cpu = len(requests), time.process_time()
        samples, elapsed = count(loader, duration)
        asked, cpu = len(requests) - before, time.process_time() - cpu
    batches = samples / BATCH_SIZE
    return {
        "samples_per_s": samples / elapsed,
        "requests_per_batch": asked / batches,
        "cpu_ms_per_batch": cpu / batches * 1e3,
        "reached_share": batches / elapsed / (threads / LATENCY),
    }


class SlowDataset:
    """Numbers that take 5 ms a call, however many are asked for."""

    def __init__(self, requests: list[None]) -> None:
        self._requests = requests

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, number: int) -> int:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[int]:
        wait(self._requests)
        return numbers


def register(requests: list[None]) -> None:
    """Make local files slow under ``slow://``; the list grows with each request.

    Several ranges are one request of 5 ms: stores that are worth it are asked for all at once.
    """
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

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
