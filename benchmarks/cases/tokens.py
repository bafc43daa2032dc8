"""Token rows a second, in random order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.data import ROW_LENGTH, ROW_SHARDS, Data
from benchmarks.systems import NAMES, load
from benchmarks.throughput import measure_loader, seconds

NAME = "tokens"


def variants(is_short: bool) -> list[dict[str, Any]]:
    found = [
        {"system": name, "shards": 24, "engine": engine}
        for name in NAMES
        for engine in load(name).token_engines
        if engine != "1 worker" or not is_short
    ]
    found += [
        {"system": "zephon_torch", "shards": shards, "engine": engine}
        for shards in ROW_SHARDS
        for engine in ("inline", "thread")
        if shards != 24 and (not is_short or (shards, engine) == (100, "inline"))
    ]
    return [variant | {"seconds": seconds(is_short)} for variant in found]


def measure(variant: dict[str, Any], work_dir: Path) -> dict[str, float]:
    system, folder = load(variant["system"]), work_dir / "systems" / variant["system"]
    data = Data(work_dir / "data")
    metrics = measure_loader(lambda: system.tokens(variant, data, folder), variant["seconds"])
    return metrics | {"tokens_per_s": metrics["samples_per_s"] * ROW_LENGTH}
