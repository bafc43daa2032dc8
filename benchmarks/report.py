"""Tables in Markdown of results: three lines for the README, every case for docs/benchmarks.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import systems, targets
from benchmarks.results import LIMITS, OURS, Row, find, rows_of

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- benchmarks -->\n", "<!-- /benchmarks -->\n"
ENGINES = ("inline", "thread", "1 worker", "2 workers")
NONE = "\N{EN DASH}"
IN_README = (OURS, "torch", "hf")  # a line each, in the first format
HEAD = [
    "",
    "text, k samples/s",
    "mixture of 2, k samples/s",
    "token rows, M tokens/s",
    "first batch, s",
    "MB",
]
LIMIT = (
    "`limit` reads and decodes the same records without a loader, or gathers rows from one array. "
)
MADE_BY = """# Benchmarks

Made by `python -m benchmarks --all`, and from its results by
`python -m benchmarks --report results.json`.

Run `pip install -e '.[benchmarks]'` in a clone first. With `--all`, the command installs the other
systems in environments of their own and measures all of them, in about 40 minutes on two idle
cores. Without `--all`, it measures zephon_torch, the limits and torch's loader, in three minutes.

"""


def write(results: Mapping[str, Any], root: Path = ROOT) -> None:
    """Write the README's part, docs/benchmarks.md and the plots."""
    from benchmarks import plots

    page, readme = root / "docs" / "benchmarks.md", root / "README.md"
    names = plots.write(rows_of(results), root / "docs" / "benchmarks")
    page.write_text(full(results, names))
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    pictures = "".join(f"\n![{name}](docs/benchmarks/{name}.svg)\n" for name in names[:1])
    readme.write_text(f"{before}{BEGIN}{short(results)}{pictures}{END}{after}")


def summary(results: Mapping[str, Any]) -> str:
    """Return the table of all systems, with what it was measured on."""
    lines = [line for name in systems.NAMES for line in _lines(results, name)]
    return _table(HEAD, lines) + "\n" + _about(results, LIMIT)


def short(results: Mapping[str, Any]) -> str:
    """Return the same with one line for each of :data:`IN_README` that was measured."""
    lines = [line for name in IN_README for line in _lines(results, name)[:1]]
    return _table(HEAD, lines) + "\n" + _about(results)


def _lines(results: Mapping[str, Any], name: str) -> list[list[str]]:
    """Return a line for each format of a system; none if it was not asked for."""
    if name not in results["environments"]:
        return []
    system = systems.load(name)
    error = results["environments"][name]["error"]
    if error is not None:
        return [[system.label, f"not measured: {error}"] + [""] * 4]
    rows = rows_of(results)
    return [_line(rows, name, system, kind) for kind in system.formats or (None,)]


def _line(rows: list[Row], name: str, system: Any, kind: str | None) -> list[str]:
    label = f"**{system.label}**" if name == OURS else system.label
    has_one = len(system.formats) == 1 and name != OURS
    label += "" if kind is None or has_one else f", {kind}"
    text = {"case": "text", "system": name, "format": kind}
    two = {"case": "mixture", "datasets": 2, "system": name, "format": kind}
    rows_24 = {"case": "tokens", "system": name, "shards": 24}
    is_first = kind in (None, system.formats[0] if system.formats else None)
    return [
        label,
        _engines(rows, "samples_per_s", 1e3, **text),
        _engines(rows, "samples_per_s", 1e3, **two),
        _engines(rows, "tokens_per_s", 1e6, **rows_24) if is_first else "",
        _first(rows, "first_batch_s", **text) if name != LIMITS else "",
        _engines(rows, "own_mb", 1, **text) if name != LIMITS else "",
    ]


def full(results: Mapping[str, Any], pictures: Iterable[str] = ()) -> str:
    """Return the page of all cases."""
    rows = rows_of(results)
    parts = [
        MADE_BY,
        summary(results),
        *(f"\n![{name}](benchmarks/{name}.svg)\n" for name in pictures),
        "\n## Targets\n\n",
        targets_table(rows),
        "\n## Systems\n\n",
        _systems(results),
    ]
    for case in dict.fromkeys(row.case for row in rows):
        parts.append(f"\n## Case {case}\n\n")
        parts.append(_case([row for row in rows if row.case == case]))
    return "".join(parts)


def targets_table(rows: list[Row]) -> str:
    """Return what was promised and what was measured."""
    outcomes = targets.check(rows)
    words = {True: "met", False: "**missed**", None: "not measured"}
    return _table(
        ["target", "bound", "measured", "", "numbers"],
        [
            [
                outcome.name,
                outcome.bound,
                NONE if outcome.value is None else f"{outcome.value:.3g}",
                words[outcome.is_met],
                outcome.numbers,
            ]
            for outcome in outcomes
        ],
    )


def _case(rows: list[Row]) -> str:
    """Return one line for each variant of a case."""
    settings = list(dict.fromkeys(key for row in rows for key in row.settings))
    metrics = list(dict.fromkeys(key for row in rows for key in row.metrics))
    lines = []
    for row in rows:
        cells = [row.system, *(str(row.settings.get(key, "")) for key in settings)]
        if row.error is not None and not row.metrics:
            lines.append([*cells, row.error.replace("|", "/")] + [""] * (len(metrics) - 1))
            continue
        found = [_number(row.median(key)) if key in row.metrics else NONE for key in metrics]
        lines.append(cells + found)
    return _table(["system", *settings, *(metrics or ["error"])], lines)


def _systems(results: Mapping[str, Any]) -> str:
    lines = []
    for name, environment in results["environments"].items():
        system = systems.load(name)
        versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items())
        lines.append([system.label, versions, environment["error"] or system.note])
    return _table(["system", "versions", ""], lines)


def _about(results: Mapping[str, Any], limit: str = "") -> str:
    machine = results["machine"]
    turns = max(run["turn"] for run in results["runs"]) + 1
    others = [run["others_cores"] for run in results["runs"] if "others_cores" in run]
    busy = f": other processes kept {statistics.median(others):.1f} cores busy" if others else ""
    return (
        f"{machine['date']}, {machine['cores']} cores of {machine['cpu']}, Python "
        f"{machine['python']}, page cache warm, batches of 32 in random order, medians of {turns} "
        "turns. Cells: inline / one thread / 1 worker process / 2. MB: memory of all processes "
        f"that is no mapped file. {limit}Trust ratios more than numbers{busy}.\n"
    )


def _engines(rows: list[Row], metric: str, unit: float, **wanted: Any) -> str:
    cells = []
    for engine in ENGINES:
        found = find(rows, metric, engine=engine, **wanted)
        cells.append(_number(found[0].median(metric) / unit) if found else NONE)
    return "" if set(cells) == {NONE} else " / ".join(cells)


def _first(rows: list[Row], metric: str, **wanted: Any) -> str:
    for engine in ("thread", "inline"):
        for row in find(rows, metric, engine=engine, **wanted):
            return f"{row.median(metric):.2f}"
    return ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _table(head: list[str], lines: list[list[str]]) -> str:
    rule = ["---"] * len(head)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *lines))
