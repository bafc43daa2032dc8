"""Results of a run: one row for each variant, with all turns."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

NOT_SETTINGS = ("system", "seconds")  # of a variant
OURS, LIMITS = "zephon_torch", "limits"


@dataclass
class Row:
    """What was measured of one variant: for each metric its value by turn."""

    case: str
    system: str
    settings: dict[str, Any]
    metrics: dict[str, dict[int, float]] = field(default_factory=dict)
    error: str | None = None

    def median(self, metric: str) -> float:
        """Return the median over the turns."""
        return statistics.median(self.metrics[metric].values())

    def spread(self, metric: str) -> float:
        """Return (largest - smallest) / median over the turns."""
        values = self.metrics[metric].values()
        return (max(values) - min(values)) / self.median(metric)

    def ratio(self, other: Row, metric: str, of: str) -> float:
        """Return the median over the turns of this row's metric over another's metric `of`."""
        ours, theirs = self.metrics[metric], other.metrics[of]
        both = ours.keys() & theirs.keys()
        return statistics.median(ours[turn] / theirs[turn] for turn in both)

    def fits(self, wanted: Mapping[str, Any]) -> bool:
        """Tell whether case, system and settings are as wanted; a list means any of its values."""
        for key, value in wanted.items():
            if key == "system" and value == "peers":
                if self.system in (OURS, LIMITS):
                    return False
                continue
            own = {"case": self.case, "system": self.system}.get(key, self.settings.get(key))
            if own not in (value if isinstance(value, list) else [value]):
                return False
        return True


def rows_of(results: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a run, in the order in which they were first measured."""
    rows: dict[str, Row] = {}
    for run in results["runs"]:
        variant = run["variant"]
        settings = {k: v for k, v in variant.items() if k not in NOT_SETTINGS}
        row = rows.setdefault(
            f"{run['case']} {variant['system']} {sorted(settings.items())}",
            Row(run["case"], variant["system"], settings),
        )
        if "error" in run:
            row.error = run["error"]
        for metric, value in run.get("metrics", {}).items():
            row.metrics.setdefault(metric, {})[run["turn"]] = value
    return list(rows.values())


def find(rows: Iterable[Row], metric: str, **wanted: Any) -> list[Row]:
    """Return the rows that fit and have the metric."""
    return [row for row in rows if metric in row.metrics and row.fits(wanted)]
