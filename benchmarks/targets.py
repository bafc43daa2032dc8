"""The targets of targets.toml, checked against results."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import Row, find

FILE = Path(__file__).with_name("targets.toml")


@dataclass(frozen=True)
class Outcome:
    """A target and what was measured; `value` is None if it was not."""

    name: str
    bound: str
    value: float | None
    is_met: bool | None
    numbers: str


def check(rows: list[Row], file: Path = FILE) -> list[Outcome]:
    """Return the outcome of each target of a file."""
    return [_check(target, rows) for target in tomllib.loads(file.read_text())["target"]]


def _check(target: Mapping[str, Any], rows: list[Row]) -> Outcome:
    wants_more = "at_least" in target
    bound = target["at_least"] if wants_more else target["at_most"]
    best, worst = (max, min) if wants_more else (min, max)
    said = f"{'≥' if wants_more else '≤'} {bound:g}"
    measured, metric = _find(target["measured"], rows)
    if not measured:
        errors = {row.error for row in rows if row.error and row.fits(_wanted(target["measured"]))}
        return Outcome(target["name"], said, None, None, "; ".join(sorted(errors)) or "not run")
    if "against" not in target:
        pick = best if target.get("of") == "best" else worst
        ours = pick(measured, key=lambda row: row.median(metric))
        value, numbers = ours.median(metric), _said(ours, metric)
    else:
        others, of = _find(target["against"], rows)
        if not others:
            return Outcome(target["name"], said, None, None, "nothing to compare with")
        other = best(others, key=lambda row: row.median(of))
        pick = best if target.get("of") == "best" else worst
        ours = pick(measured, key=lambda row: row.ratio(other, metric, of))
        value = ours.ratio(other, metric, of)
        numbers = f"{_said(ours, metric)} / {_said(other, of)}"
    return Outcome(
        target["name"], said, value, value >= bound if wants_more else value <= bound, numbers
    )


def _wanted(selector: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in selector.items() if key != "metric"}


def _find(selector: Mapping[str, Any], rows: list[Row]) -> tuple[list[Row], str]:
    metric = selector["metric"]
    return find(rows, metric, **_wanted(selector)), metric


def _said(row: Row, metric: str) -> str:
    settings = ", ".join(str(value) for value in row.settings.values())
    return f"{row.median(metric):,.4g} ({row.system}: {settings})"
