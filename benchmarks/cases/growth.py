"""How each cost of the plan grows along one axis, all others staying where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.plans import (
    chunk_ms,
    datasets_of,
    peak_mb,
    resume_ms,
    slab_ms,
    source_of,
    splitter_of,
    step_ms,
)

NAME = "growth"
TURNS = 1
BASE = {"datasets": 2, "samples": 10**9, "shards": 1000, "ranks": 8, "position": 10**6}
AXES: dict[str, tuple[int, ...]] = {
    "samples": (10**6, 10**8, 10**10, 10**12),
    "shards": (10, 10**3, 10**4, 10**5, 10**6),
    "datasets": (1, 10, 100, 1000, 10_000),
    "ranks": (1, 8, 64, 512),
    "position": (0, 10**3, 10**6, 10**9, 10**12),
}


def variants(is_short: bool) -> list[dict[str, Any]]:
    return [
        {"system": "zephon_torch", "level": level, "axis": axis} | BASE | {axis: value}
        for level in ("shards", "global")
        for axis, values in AXES.items()
        for value in values
        if not is_short
    ]


def measure(variant: dict[str, Any], work_dir: Path) -> dict[str, float]:
    samples, position = variant["samples"], variant["position"]
    shards = max(variant["shards"], variant["datasets"])
    datasets = datasets_of(variant["datasets"], samples, shards)
    seconds, peak = peak_mb(lambda: source_of(datasets, variant["level"]))
    source = source_of(datasets, variant["level"])
    splitter = splitter_of(source, 1, variant["ranks"])
    return {
        "start_s": seconds,
        "start_peak_mb": peak,
        "resume_ms": resume_ms(source_of(datasets, variant["level"]), 1, position),
        "chunk_ms": chunk_ms(source, position, samples, 9),
        "slab_ms": slab_ms(splitter, position, 3),
        "step_ms": step_ms(splitter, position, 9),
    }
