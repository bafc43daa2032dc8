"""What a work source costs before its first chunk: 100 million samples, shuffled globally."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.plans import datasets_of, peak_mb, source_of
from benchmarks.systems import NAMES

NAME = "startup"
TURNS = 1
SHARDS = 1000


def variants(is_short: bool) -> list[dict[str, Any]]:
    sizes = (10**7,) if is_short else (10**7, 10**8)
    return [
        {"system": system, "samples": samples, "level": "global"}
        for samples in sizes
        for system in ("zephon_torch", "zephon")
        if system in NAMES
    ]


def measure(variant: dict[str, Any], work_dir: Path) -> dict[str, float]:
    start = _zephon if variant["system"] == "zephon" else _zephon_torch
    seconds, peak = peak_mb(start(variant["samples"]))
    return {"first_chunk_s": seconds, "peak_mb": peak}


def _zephon_torch(samples: int) -> Any:
    datasets = datasets_of(1, samples, SHARDS)

    def start() -> Any:
        source = source_of(datasets, "global")
        source.chunk(0)
        return source

    return start


def _zephon(samples: int) -> Any:
    from zephon import Dataset, InMemoryShard, MixtureSpec, StaticMixtureWorkSource

    rows: Any = range(samples // SHARDS)
    dataset = Dataset.from_dict("a", {i: InMemoryShard(rows) for i in range(SHARDS)})

    def start() -> Any:
        source = StaticMixtureWorkSource(
            [dataset], MixtureSpec({"a": 1.0}), seed=1, shuffle_block_size="global"
        )
        lane = source.clone_for_lane(0, 1)  # as its pipeline does for each replica
        lane.next_chunk()
        return source, lane

    return start
