"""Several ranks: what one of them costs, and whether all together get the same global batches."""

from __future__ import annotations

import hashlib
import itertools
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.apart import apart
from benchmarks.data import Data
from benchmarks.plans import BATCH_SIZE, datasets_of, slab_ms, source_of, splitter_of

NAME = "world"
TURNS = 1
GLOBAL_BATCH_SIZE = 128
STEPS, COMPARED = 100, 20


def variants(is_short: bool) -> list[dict[str, Any]]:
    if is_short:
        return []
    return [
        {"system": "zephon_torch", "world": world, "lanes": lanes}
        for lanes in (1, 8)
        for world in (1, 2, 4)
    ]


def measure(variant: dict[str, Any], work_dir: Path) -> dict[str, float]:
    """Let each rank run in a process of its own, one after another: they share the machine."""
    world, lanes = variant["world"], variant["lanes"]
    data = Data(work_dir / "data")
    alone = apart(lambda: run_rank(data, 0, 1, lanes))[1]
    ranks = [apart(partial(run_rank, data, rank, world, lanes)) for rank in range(world)]
    steps = zip(*(digests for _, digests in ranks), strict=True)
    together = [list(itertools.chain.from_iterable(parts)) for parts in steps]
    num_same = sum(a == b for a, b in zip(alone, together, strict=True))
    source = source_of(datasets_of(2, 10**9, 1000), "global")
    slab = slab_ms(splitter_of(source, lanes, world), 10**6, 5)
    return {
        "samples_per_s_of_slowest_rank": min(speed for speed, _ in ranks),
        "pointers_per_s": 512 * BATCH_SIZE / slab * 1e3,
        "same_batches_share": num_same / COMPARED,
    }


def run_rank(data: Data, rank: int, world: int, lanes: int) -> tuple[float, list[list[str]]]:
    """Return samples a second of token rows on one rank, and which ones each step gave."""
    from zephon_torch import DataLoader
    from zephon_torch.io import Dataset

    rows = Dataset.from_path("rows", data.rows(24)[0].parent)
    loader = DataLoader(
        rows,
        shuffle=True,
        seed=1,
        global_batch_size=GLOBAL_BATCH_SIZE,
        lanes=lanes,
        num_threads=0,
        rank=rank,
        num_replicas=world,
    )
    batches = iter(loader)
    digests = [[_digest(row) for row in batch] for batch in itertools.islice(batches, COMPARED)]
    begun = time.perf_counter()
    samples = sum(len(batch) for batch in itertools.islice(batches, STEPS))
    return samples / (time.perf_counter() - begun), digests


def _digest(row: Any) -> str:
    return hashlib.blake2b(row.numpy().tobytes(), digest_size=8).hexdigest()
