"""What the plan costs: its start, chunks at three places, one step, a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.plans import (
    LEVELS,
    chunk_ms,
    datasets_of,
    peak_mb,
    resume_ms,
    slab_ms,
    source_of,
    splitter_of,
    step_ms,
)

NAME = "plan"
TURNS = 1
SAMPLES = 10**10
SHARDS = {1: 1000, 2: 1000, 20: 1000, 10_000: 10**6}


def variants(is_short: bool) -> list[dict[str, Any]]:
    return [
        {
            "system": "zephon_torch",
            "datasets": num_datasets,
            "samples": SAMPLES,
            "shards": shards,
            "level": level,
        }
        for num_datasets, shards in SHARDS.items()
        for level in LEVELS
        if not is_short or (num_datasets in (1, 20) and level in ("shards", "global"))
    ]


def measure(variant: dict[str, Any], work_dir: Path) -> dict[str, float]:
    num_datasets, samples = variant["datasets"], variant["samples"]
    turns = 31 if num_datasets <= 100 else 5
    datasets = datasets_of(num_datasets, samples, variant["shards"])

    def start() -> Any:
        source = source_of(datasets, variant["level"])
        source.chunk(0)
        return source

    seconds, peak = peak_mb(start)
    source = start()
    splitter = splitter_of(source, 1, 1)
    return {
        "start_s": seconds,
        "start_peak_mb": peak,
        "chunk_at_start_ms": chunk_ms(source, 0, samples, turns),
        "chunk_at_middle_ms": chunk_ms(source, samples // 2, samples, turns),
        "chunk_at_end_ms": chunk_ms(source, samples, samples, turns),
        "slab_ms": slab_ms(splitter, samples // 2, 5),
        "step_ms": step_ms(splitter, samples // 2, turns),
        "resume_ms": resume_ms(source_of(datasets, variant["level"]), 1, samples // 2),
    }
