"""Samples a second of text: one dataset, in random order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.data import Data
from benchmarks.systems import NAMES, load
from benchmarks.systems.base import System
from benchmarks.throughput import measure_loader, seconds

NAME = "text"


def variants(is_short: bool) -> list[dict[str, Any]]:
    return [
        {
            "system": name,
            "datasets": 1,
            "format": kind,
            "engine": engine,
            "seconds": seconds(is_short),
        }
        for name in NAMES
        for kind in load(name).formats
        for engine in load(name).text_engines
        if _is_worth_it(load(name), kind, engine, is_short)
    ]


def _is_worth_it(system: System, kind: str, engine: str, is_short: bool) -> bool:
    """Tell what is measured: of further formats, and in the short form, not every engine."""
    if kind == system.formats[0]:
        return not is_short or engine != "1 worker"
    return engine == "inline" if is_short else engine != "1 worker"


def measure(variant: dict[str, Any], work_dir: Path) -> dict[str, float]:
    system, folder = load(variant["system"]), work_dir / "systems" / variant["system"]
    data = Data(work_dir / "data")
    return measure_loader(lambda: system.text(variant, data, folder), variant["seconds"])
