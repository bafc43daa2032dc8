"""Samples a second of mixtures of 2 and 20 corpora of text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cases import text
from benchmarks.systems import NAMES, load
from benchmarks.throughput import seconds

NAME = "mixture"
TWENTY = (
    ("zephon_torch", "jsonl", "inline"),
    ("zephon_torch", "jsonl", "thread"),
    ("limits", "json", "inline"),
    ("torch", "jsonl", "inline"),
)


def variants(is_short: bool) -> list[dict[str, Any]]:
    found = [
        {"system": name, "datasets": 2, "format": kind, "engine": engine}
        for name in NAMES
        for kind in load(name).formats
        for engine in load(name).mixture_engines
        if "worker" not in engine or (kind == load(name).formats[0] and not is_short)
        if kind == load(name).formats[0] or not is_short
    ]
    if not is_short:
        found += [
            {"system": name, "datasets": 20, "format": kind, "engine": engine}
            for name, kind, engine in TWENTY
        ]
    return [variant | {"seconds": seconds(is_short)} for variant in found]


def measure(variant: dict[str, Any], work_dir: Path) -> dict[str, float]:
    return text.measure(variant, work_dir)
