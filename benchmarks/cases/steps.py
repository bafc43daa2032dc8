"""What one rank's pointers cost, by lanes and world: the next 512 steps, and one step anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.plans import datasets_of, slab_ms, source_of, splitter_of, step_ms

NAME = "steps"
TURNS = 1
SIZES = (1, 8, 64, 512)
PLACE = 10**9


def variants(is_short: bool) -> list[dict[str, Any]]:
    return [
        {"system": "zephon_torch", "datasets": num_datasets, "level": "global", "lanes": lanes}
        for num_datasets in (1, 20)
        for lanes in SIZES
        if not is_short or lanes in (1, 64)
    ]


def measure(variant: dict[str, Any], work_dir: Path) -> dict[str, float]:
    datasets = datasets_of(variant["datasets"], 10**10, 1000)
    source = source_of(datasets, variant["level"])
    source.chunk(0)
    slabs, steps = {}, {}
    for world in SIZES:
        splitter = splitter_of(source, variant["lanes"], world)
        slabs[f"slab_of_world_{world}_ms"] = slab_ms(splitter, PLACE, 5)
        steps[f"step_of_world_{world}_ms"] = step_ms(splitter, PLACE, 15)
    return {"slab_ms": max(slabs.values()), "step_ms": max(steps.values())} | slabs | steps
