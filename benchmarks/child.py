"""Runs one job in a process of its own and prints one line of JSON.

A job measures a variant of a case, or prepares a system's files and checks what it yields.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Return the metrics of a job, or nothing for one that prepares."""
    from benchmarks import systems

    work_dir = Path(job["work_dir"])
    system = systems.load(job["prepare"] if "prepare" in job else job["variant"]["system"])
    system.before_import()
    if "prepare" in job:
        from benchmarks import checks  # imports torch, which is timed below

        checks.prepare_and_check(job["prepare"], work_dir)
        return {}
    variant = job["variant"]
    start = time.perf_counter()
    for module in system.modules:
        importlib.import_module(module)
    seconds = time.perf_counter() - start
    case = importlib.import_module(f"benchmarks.cases.{job['module']}")
    return {"import_s": seconds} | case.measure(variant, work_dir)


def main() -> None:
    answer = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        result: dict[str, Any] = {"metrics": run(json.loads(sys.argv[1]))}
    except BaseException as error:
        traceback.print_exc()
        result = {"error": _one_line(error)}
    os.write(answer, json.dumps(result).encode() + b"\n")
    sys.stderr.flush()
    os._exit(0)  # some systems never join their threads


def _one_line(error: BaseException) -> str:
    lines = traceback.format_exception_only(error)[-1].strip().splitlines()
    return lines[-1] if lines[-1].strip() else type(error).__name__


if __name__ == "__main__":
    main()
