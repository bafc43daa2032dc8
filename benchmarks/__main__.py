"""Measure: ``python -m benchmarks`` in short, ``--all`` for every system and every case.

Prints the summary and the targets. ``--all`` also writes README.md's part, docs/benchmarks.md and
its plots, which ``--report results.json`` makes from results again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from benchmarks import report, runner, systems
from benchmarks.results import rows_of


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every system, every case")
    parser.add_argument("--cases", help="names, with commas between")
    parser.add_argument("--systems", help="names, with commas between")
    parser.add_argument("--turns", type=int, help="5 with --all, else 2")
    parser.add_argument("--work-dir", type=Path, help="where data and environments are kept")
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    parser.add_argument("--report", type=Path, metavar="RESULTS", help="measure nothing")
    arguments = parser.parse_args()
    if arguments.report is None:
        default = None if arguments.all else list(systems.SHORT)
        runner.run(
            arguments.cases.split(",") if arguments.cases else None,
            arguments.systems.split(",") if arguments.systems else default,
            is_short=not arguments.all,
            turns=arguments.turns or (5 if arguments.all else 2),
            work_dir=arguments.work_dir or Path(tempfile.gettempdir(), "zephon_torch_benchmarks"),
            out=arguments.out,
        )
    results = json.loads((arguments.report or arguments.out).read_text())
    print(report.summary(results))
    print(report.targets_table(rows_of(results)))
    is_whole = arguments.all and not (arguments.cases or arguments.systems)
    if arguments.report is not None or is_whole:
        report.write(results)


if __name__ == "__main__":
    main()
