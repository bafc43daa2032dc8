"""What the plan costs: chunks, random access, construction, resume, state.

Run with ``python benchmarks/plan.py``. Prints one line per measurement, medians of several turns.
Trust ratios within one run more than milliseconds: machines are noisy.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from zephon_torch import ChunkSplitter, DataLoader, StaticMixtureWorkSource
from zephon_torch.io import Dataset

CHUNK = 16384
FAR = 10**13 // CHUNK
LEVELS = {
    "none": {"shuffle_shards": False},
    "shards": {},
    "within": {"shuffle_within_shard": True},
    "block": {"shuffle_block_size": "auto"},
    "global": {"shuffle_block_size": "global"},
}


def milliseconds(function: Callable[[], object], turns: int = 9) -> float:
    function()
    times = []
    for _ in range(turns):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def source(
    num_datasets: int, num_shards: int, samples: int = 10**10, **options: object
) -> StaticMixtureWorkSource:
    weights = 10 ** np.random.default_rng(0).uniform(-4, 0, num_datasets)
    mixture = {f"d{i:05d}": float(w) for i, w in enumerate(weights)}
    per_shard = np.full(num_shards, samples // num_shards)
    numbers = range(int(per_shard.sum()))
    datasets = [Dataset.from_samples(name, numbers, shard_sizes=per_shard) for name in mixture]
    options = {"exhausted_policy": "repeat"} | options
    return StaticMixtureWorkSource(datasets, mixture, **options)


def chunks() -> None:
    print("chunk of 16,384 pointers, ms at position 0 | at 1e13 (one turn = 4 chunks in a row)")
    for num_datasets, num_shards in ((1, 1), (1, 24), (1, 10**6), (2, 24), (20, 24), (10_000, 10)):
        for name, options in LEVELS.items():
            work = source(num_datasets, num_shards, **options)
            turns = 3 if num_datasets > 100 else 9
            ms = [
                milliseconds(lambda f=first, w=work: [w.chunk(f + i) for i in range(4)], turns) / 4
                for first in (0, FAR)
            ]
            what = f"D={num_datasets:<6} shards={num_shards:<8} {name:<7}"
            print(f"  {what} {ms[0]:6.2f} | {ms[1]:6.2f}")


def construction() -> None:
    print("construction with 1e6 shards")
    tracemalloc.start()
    start = time.perf_counter()
    work = source(1, 10**6)
    work.chunk(0)
    seconds, (_, peak) = time.perf_counter() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    plain = milliseconds(lambda: source(1, 10**6), 5)
    print(f"  {plain:.0f} ms; with the first chunk, traced: {seconds * 1e3:.0f} ms")
    print(f"  peak of construction and first chunk {peak / 1e6:.0f} MB")
    tracemalloc.start()
    source(1, 1, samples=10**12, shuffle_block_size="global").chunk(10**6)
    print(
        f"  global shuffle of 1e12 samples: peak {tracemalloc.get_traced_memory()[1] / 1e6:.1f} MB"
    )
    tracemalloc.stop()


def resume() -> None:
    print("load_state_dict to the first pointers, ms (fresh loader each turn, construction apart)")
    for num_shards, lanes in ((1, 1), (10_000, 1), (10**6, 1), (10_000, 64)):
        work = source(2, num_shards)
        for place in (0, 10**6, 10**12):
            state = DataLoader(work, 32, lanes=lanes).state_dict() | {"delivered": place}
            ms = statistics.median(_cold_resume(num_shards, lanes, state) for _ in range(5))
            print(f"  shards={num_shards:<8} lanes={lanes:<3} delivered={place:<14} {ms:6.1f}")


def _cold_resume(num_shards: int, lanes: int, state: dict[str, object]) -> float:
    loader = DataLoader(source(2, num_shards), 32, lanes=lanes)
    start = time.perf_counter()
    loader.load_state_dict(state)
    epoch, delivered = loader._cursor.begin()
    next(loader.batch_sampler.items(epoch, delivered))
    return (time.perf_counter() - start) * 1e3


def steps() -> None:
    print("pointers of 512 steps of 32 for one rank, ms (lanes, world)")
    for num_datasets in (1, 20):
        for lanes, world in ((1, 1), (1, 8), (8, 8), (64, 1), (64, 64), (512, 1), (512, 512)):
            work = source(num_datasets, 24, shuffle_block_size="global")
            splitter = ChunkSplitter(
                work, batch_size=32, rank=world // 2, num_replicas=world, lanes=lanes
            )
            starts = [10**9 + i * splitter.global_batch_size for i in range(512)]
            ms = milliseconds(lambda s=splitter, at=starts: s.slab(0, at, s.lanes), 5)
            one = milliseconds(lambda s=splitter: s.pointers(10**6))
            what = f"D={num_datasets:<3} lanes={lanes:<4} world={world:<4}"
            print(f"  {what} {ms:6.1f}; one step {one:.2f}")


def states() -> None:
    loader = DataLoader(source(20, 100), 32)
    us = milliseconds(lambda: [loader.state_dict() for _ in range(1000)])
    state = loader.state_dict()
    size = sum(len(str(v)) + len(k) for k, v in state.items() if k != "description")
    print(f"state_dict(): {us:.1f} us, {size} bytes besides its description")


if __name__ == "__main__":
    for part in (chunks, construction, resume, steps, states):
        part()
