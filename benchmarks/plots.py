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
COSTS = {
    "text, CPU seconds for a million samples": ("cpu_s_per_million", 1, {"case": "text"}),
    "text, MB of all processes that is no mapped file": ("own_mb", 1, {"case": "text"}),
}


def write(rows: list[Row], folder: Path) -> list[str]:
    """Write what the rows allow and return the names, without extension."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "benchmarks", "font.size": 8}
    )
    folder.mkdir(parents=True, exist_ok=True)
    made = {"throughput": throughput(rows), "costs": costs(rows), "growth": growth(rows)}
    names = [name for name, figure in made.items() if figure is not None]
    for name in names:
        path = folder / f"{name}.svg"
        made[name].savefig(path, metadata={"Date": None}, bbox_inches="tight")
    return names


def throughput(rows: list[Row]) -> Any:
    """Return bars of samples a second: one group a system, one bar an engine, lines for limits."""

    return _panels(rows, PANELS, 12)


def costs(rows: list[Row]) -> Any:
    """Return bars of CPU time and memory of text."""
    return _panels(rows, COSTS, 9)


def growth(rows: list[Row]) -> Any:
    """Return lines: how each cost grows along one axis, all others staying where they are."""
    from matplotlib.figure import Figure

    found = [row for row in rows if row.case == "growth" and row.metrics]
    if not found:
        return None
    axes_names = list(dict.fromkeys(row.settings["axis"] for row in found))
    metrics = [key for key in found[0].metrics if key.endswith("_ms")]
    figure = Figure(figsize=(9, 3 * ((len(axes_names) + 1) // 2)), layout="constrained")
    axes = figure.subplots((len(axes_names) + 1) // 2, 2).flat
    for axis in axes[len(axes_names) :]:
        axis.set_visible(False)
    for axis, name in zip(axes, axes_names, strict=False):
        for level, style in (("shards", "--"), ("global", "-")):
            line = [row for row in found if row.fits({"axis": name, "level": level})]
            for metric, colour in zip(metrics, ENGINES.values(), strict=False):
                axis.plot(
                    [max(row.settings[name], 1) for row in line],
                    [row.median(metric) for row in line],
                    style,
                    marker=".",
                    color=colour,
                    label=f"{metric.removesuffix('_ms')}, shuffle {level}",
                )
        axis.set(xscale="log", yscale="log", xlabel=name, ylabel="ms")
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    return figure


def _panels(rows: list[Row], panels: dict[str, tuple[str, float, Any]], height: float) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots(len(panels), 1)
    for axis, (title, (metric, unit, wanted)) in zip(axes, panels.items(), strict=True):
        _bars(axis, rows, metric, unit, wanted)
        axis.set_title(title, loc="left", pad=16)
        if metric in ("tokens_per_s", "cpu_s_per_million") and find(rows, metric, **wanted):
            axis.set_xscale("log")
            axis.set_xlim(left=1)
            axis.xaxis.set_major_formatter("{x:,g}")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    return figure


def _bars(axis: Any, rows: list[Row], metric: str, unit: float, wanted: dict[str, Any]) -> None:
    groups: dict[tuple[str, str | None], list[Row]] = {}
    for row in find(rows, metric, **wanted):
        if row.system != LIMITS:
            groups.setdefault((row.system, row.settings.get("format")), []).append(row)
    order = sorted(groups, key=lambda key: max(row.median(metric) for row in groups[key]))
    if not metric.endswith("_per_s"):  # the best on top
        order.reverse()
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
    limits = find(rows, metric, system=LIMITS, **wanted) if metric != "own_mb" else []
    for row in sorted(limits, key=lambda row: row.median(metric)):
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
