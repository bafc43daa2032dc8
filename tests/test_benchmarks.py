"""The benchmarks' report and adapters; nothing is measured here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cases, report, systems, targets
from benchmarks.results import rows_of

MACHINE = {"cpu": "a processor", "cores": 2, "memory_gb": 8, "python": "3.11", "date": "2026-01-01"}


def run(system: str, turn: int, rate: float, **settings: Any) -> dict[str, Any]:
    variant = {"system": system, "seconds": 1.0} | settings
    metrics = {"samples_per_s": rate, "tokens_per_s": rate * 10, "own_mb": 100.0}
    return {"case": "tokens", "variant": variant, "turn": turn, "metrics": metrics}


def results(runs: list[dict[str, Any]]) -> dict[str, Any]:
    names = dict.fromkeys(run["variant"]["system"] for run in runs)
    environments: dict[str, Any] = {name: {"versions": {}, "error": None} for name in names}
    environments["mds"] = {"versions": {}, "error": "ERROR: no such version"}
    return {
        "machine": MACHINE,
        "turns": 3,
        "environments": environments,
        "runs": runs,
    }


RUNS = [
    one
    for turn, (ours, limit) in enumerate([(80, 100), (50, 50), (300, 400)])
    for one in (
        run("zephon_torch", turn, ours * 1e3, shards=24, engine="inline"),
        run("zephon_torch", turn, ours * 1e2, shards=1, engine="inline"),
        run("limits", turn, limit * 1e3, shards=24, engine="inline"),
        run("grain", turn, ours * 1e2, shards=24, engine="inline"),
    )
]


def check(tmp_path: Path, target: str, runs: list[dict[str, Any]] = RUNS) -> targets.Outcome:
    file = tmp_path / "targets.toml"
    file.write_text(f'[[target]]\nname = "it"\n{target}')
    (outcome,) = targets.check(rows_of({"runs": runs}), file)
    return outcome


INLINE = (
    'measured = {case = "tokens", system = "zephon_torch", shards = 24, metric = "samples_per_s"}'
)
LIMIT = 'against = {case = "tokens", system = "limits", metric = "samples_per_s"}'


def test_a_ratio_is_the_median_over_turns_not_the_ratio_of_medians(tmp_path: Path) -> None:
    outcome = check(tmp_path, f"{INLINE}\n{LIMIT}\nat_least = 0.8")
    assert (outcome.value, outcome.is_met) == (0.8, True)  # of 0.8, 1 and 0.75; 80 / 100 by medians
    assert check(tmp_path, f"{INLINE}\n{LIMIT}\nat_least = 0.81").is_met is False


def test_of_several_variants_the_worst_counts_unless_the_best_is_asked_for(tmp_path: Path) -> None:
    both = INLINE.replace("shards = 24", "shards = [1, 24]")
    assert check(tmp_path, f"{both}\n{LIMIT}\nat_least = 0.5").value == pytest.approx(0.08)
    assert check(tmp_path, f'{both}\n{LIMIT}\nof = "best"\nat_least = 0.5').value == 0.8
    assert check(tmp_path, f"{both}\nat_most = 1e5").value == 80e3


def test_peers_are_all_but_the_limits_and_ourselves(tmp_path: Path) -> None:
    peers = LIMIT.replace("limits", "peers")
    assert check(tmp_path, f"{INLINE}\n{peers}\nat_least = 1").value == 10


def test_a_target_whose_job_failed_tells_the_error(tmp_path: Path) -> None:
    failed = {"case": "tokens", "turn": 0, "error": "ValueError: no"}
    failed["variant"] = {"system": "zephon_torch", "shards": 24}
    outcome = check(tmp_path, f"{INLINE}\n{LIMIT}\nat_least = 1", [failed])
    assert (outcome.value, outcome.is_met, outcome.numbers) == (None, None, "ValueError: no")


def test_every_target_selects_a_variant_that_is_measured() -> None:
    variants = [
        {"case": name, "variant": variant, "turn": 0, "metrics": {"any": 1.0}}
        for name, case in cases.load().items()
        for variant in case.variants(is_short=False)
    ]
    rows = rows_of({"runs": variants})
    for target in targets.tomllib.loads(targets.FILE.read_text())["target"]:
        for selector in (target["measured"], target.get("against", target["measured"])):
            wanted = {key: value for key, value in selector.items() if key != "metric"}
            assert any(row.fits(wanted) for row in rows), (target["name"], wanted)


def test_the_report_fills_the_readme_between_its_markers_and_writes_page_and_plot(
    tmp_path: Path,
) -> None:
    (tmp_path / "docs").mkdir()
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{report.BEGIN}old\n{report.END}after\n")
    report.write(results(RUNS), tmp_path)
    text = readme.read_text()
    assert text.startswith(f"before\n{report.BEGIN}|") and text.endswith(f"{report.END}after\n")
    assert "old" not in text
    lines = re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE)
    assert lines == ["---", "**zephon_torch**, jsonl"], "of the README's three, the one measured"
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "ERROR: no such version" in page
    assert "| grain | 24 | inline | 8,000 | 80,000 | 100 |" in page
    for picture in re.findall(r"\((.*\.svg)\)", text):
        assert "<svg" in (tmp_path / picture).read_text()


def test_the_readme_has_three_lines_of_the_committed_results_and_the_page_has_all() -> None:
    committed = json.loads((report.ROOT / "docs" / "benchmarks" / "results.json").read_text())
    short = report.short(committed)
    assert len(re.findall(r"^\| [*\w]", short, re.MULTILINE)) == 3
    assert report.BEGIN + short in (report.ROOT / "README.md").read_text()
    page = (report.ROOT / "docs" / "benchmarks.md").read_text()
    assert page.startswith(report.MADE_BY) and report.summary(committed) in page


@pytest.mark.parametrize("name", systems.NAMES)
def test_adapters_are_imported_without_their_packages_and_say_what_they_are(name: str) -> None:
    system = systems.load(name)
    assert system.label and system.packages and system.modules
    json.dumps([system.requirement, system.note, system.formats])
