"""Plans without data, and what their parts cost: for the cases that measure no reading.

All is computed by one thread that never waits, so its processor time is what is told: the same as
elapsed time on an idle machine, and little moved by other work on a busy one.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

CHUNK = 16_384
BATCH_SIZE = 32
SLAB_STEPS = 512
LEVELS: dict[str, dict[str, Any]] = {
    "none": {"shuffle_shards": False},
    "shards": {},
    "within": {"shuffle_within_shard": True},
    "block": {"shuffle_block_size": "auto"},
    "global": {"shuffle_block_size": "global"},
}


def datasets_of(num_datasets: int, samples: int, shards: int) -> list[Any]:
    """Return datasets of integers whose uneven shards and samples number so many together."""
    from zephon_torch.io import Dataset

    sizes = np.random.default_rng(0).uniform(0.5, 1.5, max(1, shards // num_datasets))
    sizes = np.maximum(1, sizes / sizes.sum() * (samples / num_datasets)).astype(np.int64)
    numbers = range(int(sizes.sum()))
    names = [f"d{i:05d}" for i in range(num_datasets)]
    return [Dataset.from_samples(name, numbers, shard_sizes=sizes) for name in names]


def source_of(datasets: list[Any], level: str) -> Any:
    """Return an endless source of datasets whose weights are spread over four decades."""
    from zephon_torch import StaticMixtureWorkSource

    weights = 10 ** np.random.default_rng(1).uniform(-4, 0, len(datasets))
    mixture = {d.name: float(w) for d, w in zip(datasets, weights, strict=True)}
    return StaticMixtureWorkSource(
        datasets, mixture, seed=1, exhausted_policy="repeat", **LEVELS[level]
    )


def splitter_of(source: Any, lanes: int, world: int) -> Any:
    """Return the splitter of the rank in the middle."""
    from zephon_torch import ChunkSplitter

    return ChunkSplitter(
        source, batch_size=BATCH_SIZE, rank=world // 2, num_replicas=world, lanes=lanes
    )


def chunk_ms(source: Any, position: int, samples: int, turns: int) -> float:
    """Return the median cost of chunks at random places within a tenth of the plan of `position`.

    One chunk comes before them, so that the tables of the pass are there, as they are in a run.
    """
    first, span = position // CHUNK, max(40, samples // 10 // CHUNK)
    numbers = first + np.random.default_rng(2).integers(0, span, turns + 1)
    return median_ms(source.chunk, numbers.tolist())


def step_ms(splitter: Any, position: int, turns: int) -> float:
    """Return the median cost of one rank's pointers of one step at a random place."""
    first = position // splitter.global_batch_size
    steps = first + np.random.default_rng(3).integers(0, 10**6, turns + 1)
    return median_ms(splitter.pointers, steps.tolist())


def slab_ms(splitter: Any, position: int, turns: int) -> float:
    """Return the median cost of one rank's pointers of the next 512 steps.

    Another place each time; what the short first slab of a run costs is left out.
    """
    size = splitter.global_batch_size
    steps = position // size + np.random.default_rng(4).integers(0, 10**6, turns)
    times = []
    for step in steps.tolist():
        items = splitter.items(0, step * size)
        _take(items, 8)
        start = time.thread_time()
        _take(items, SLAB_STEPS)
        times.append(time.thread_time() - start)
    return statistics.median(times) * 1e3


def resume_ms(source: Any, lanes: int, position: int) -> float:
    """Return the time from ``load_state_dict`` to a first batch that takes no time to read."""
    from zephon_torch import DataLoader

    loader = DataLoader(source, BATCH_SIZE, lanes=lanes, num_threads=0)
    state = loader.state_dict() | {"delivered": position // BATCH_SIZE * BATCH_SIZE}
    start = time.thread_time()
    loader.load_state_dict(state)
    next(iter(loader))
    return (time.thread_time() - start) * 1e3


def median_ms(function: Callable[[int], object], arguments: Iterable[int]) -> float:
    """Return the median time of calls with each argument but the first."""
    first, *others = arguments
    function(first)
    times = []
    for argument in others:
        start = time.thread_time()
        function(argument)
        times.append(time.thread_time() - start)
    return statistics.median(times) * 1e3


def peak_mb(function: Callable[[], object]) -> tuple[float, float]:
    """Return seconds of a call, and by how many megabytes the process grew at most during it."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew: proc(5)
    before, start = _resident("VmRSS"), time.thread_time()
    kept = function()
    seconds = time.thread_time() - start
    peak = _resident("VmHWM") - before
    del kept
    return seconds, peak


def _resident(key: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise LookupError(key)


def _take(items: Iterable[Any], count: int) -> None:
    """Take work items and their pointers, which are computed when they are asked for."""
    for item in itertools.islice(items, count):
        assert len(item.pointers)
