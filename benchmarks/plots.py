"""Plots of results as SVG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import systems
from benchmarks.results import LIMITS, OURS, Row, find

ENGINES = {"inline": "#4269d0", "thread": "#efb118", "1 worker": "#a9c0ee", "2 workers": "#9498a0"}
PANELS = {
    "text, thousand samples/s": ("samples_per_s", 1e3, {"case": "text"}),
    "mixture of 2, thousand samples/s": ("samples_per_s", 1e3, {"case": "mixture", "datasets": 2}),
    "token rows, million tokens/s": ("tokens_per_s", 1e6, {"case": "tokens", "shards": 24}),
}


def write(rows: list[Row], folder: Path) -> list[str]:
    """Write what the rows allow and return the names, without extension."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "benchmarks", "font.size": 8}
    )
    folder.mkdir(parents=True, exist_ok=True)
    made = {"throughput": throughput(rows)}
    for name, figure in made.items():
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
    return list(made)


def throughput(rows: list[Row]) -> Any:
    """Return bars of samples a second: one group a system, one bar an engine, lines for limits."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 12), layout="constrained")
    axes = figure.subplots(len(PANELS), 1)
    for axis, (title, (metric, unit, wanted)) in zip(axes, PANELS.items(), strict=True):
        _bars(axis, rows, metric, unit, wanted)
        axis.set_title(title, loc="left")
    axes[-1].set_xscale("log")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    return figure


def _bars(axis: Any, rows: list[Row], metric: str, unit: float, wanted: dict[str, Any]) -> None:
    groups = {}
    for row in find(rows, metric, **wanted):
        if row.system != LIMITS:
            groups.setdefault((row.system, row.settings.get("format")), []).append(row)
    order = sorted(groups, key=lambda key: max(row.median(metric) for row in groups[key]))
    for place, key in enumerate(order):
        found = sorted(groups[key], key=lambda row: list(ENGINES).index(row.settings["engine"]))
        height = 0.8 / len(found)
        for i, row in enumerate(reversed(found)):
            engine = row.settings["engine"]
            y = place - 0.4 + (i + 0.5) * height
            axis.barh(y, row.median(metric) / unit, height, color=ENGINES[engine])
    labels = []
    for name, kind in order:
        system = systems.load(name)
        many = kind is not None and len(system.formats) > 1
        labels.append(system.label + (f", {kind}" if many else ""))
    axis.set_yticks(range(len(order)), labels)
    for label, (name, _) in zip(axis.get_yticklabels(), order, strict=True):
        label.set_fontweight("bold" if name == OURS else "normal")
    for engine, colour in ENGINES.items():
        axis.barh([0], [0], color=colour, label=engine)
    for row in find(rows, metric, system=LIMITS, **wanted):
        value = row.median(metric) / unit
        axis.axvline(value, color="#d62728", linewidth=1, linestyle="--")
        name = row.settings.get("format", "gather")
        axis.annotate(
            f"limit, {name}",
            (value, 1),
            xycoords=("data", "axes fraction"),
            xytext=(2, 2),
            textcoords="offset points",
            color="#d62728",
        )
    axis.spines[["top", "right"]].set_visible(False)
