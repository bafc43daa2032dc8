"""Makes jobs of cases and systems, runs each in a fresh process, collects the results."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import cases, data, environments, systems
from benchmarks.processes import Others

ROOT = Path(__file__).resolve().parent.parent
JOB_SECONDS, PREPARE_SECONDS = 120, 600
SHORT_FACTOR = 0.25


def run(
    case_names: list[str] | None,
    system_names: list[str] | None,
    *,
    is_short: bool,
    turns: int,
    work_dir: Path,
    out: Path,
) -> dict[str, Any]:
    """Run all jobs turn by turn and return the results, also written to `out` after each turn.

    Args:
        case_names, system_names: which ones; None for all.
        is_short: fewer variants over less data.
        turns: how often each job runs; results are medians.
        work_dir: folder of data and environments, used again by the next run.
        out: JSON file of the results.
    """
    _check_names(case_names, list(cases.load()))
    _check_names(system_names, list(systems.NAMES))
    start = time.time()
    folder = work_dir / ("short" if is_short else "full")
    made = data.prepare(folder / "data", SHORT_FACTOR if is_short else 1.0)
    jobs = list(_jobs(case_names, system_names, is_short))
    names = sorted({job["variant"]["system"] for job in jobs}, key=systems.NAMES.index)
    found = {name: _prepare(name, work_dir, folder) for name in names}
    results: dict[str, Any] = {
        "machine": _machine(),
        "is_short": is_short,
        "turns": turns,
        "data": {"sha256": made.checksum(), "factor": made.factor},
        "environments": {
            name: {"versions": environment.versions, "error": environment.error}
            for name, environment in found.items()
        },
        "runs": [],
    }
    for turn in range(turns):
        data.touch(folder)
        for job in jobs:
            if turn < job["turns"]:
                results["runs"].append(_run_one(job, found, folder, turn))
        results["seconds"] = round(time.time() - start)
        out.write_text(json.dumps(results, indent=1) + "\n")
    return results


def _check_names(names: list[str] | None, known: list[str]) -> None:
    unknown = sorted(set(names or ()) - set(known))
    if unknown:
        raise SystemExit(f"unknown: {', '.join(unknown)}; there are: {', '.join(known)}")


def _jobs(
    case_names: list[str] | None, system_names: list[str] | None, is_short: bool
) -> Iterator[dict[str, Any]]:
    for name, case in cases.load().items():
        if case_names is not None and name not in case_names:
            continue
        for variant in case.variants(is_short):
            if system_names is None or variant["system"] in system_names:
                module = case.__name__.rpartition(".")[2]
                turns = getattr(case, "TURNS", sys.maxsize)
                if is_short and hasattr(case, "TURNS"):
                    turns = 1
                yield {"case": name, "module": module, "variant": variant, "turns": turns}


def _prepare(name: str, work_dir: Path, folder: Path) -> environments.Environment:
    """Install a system and write its files; what fails is said in `error`."""
    _say(f"prepare {name}")
    environment = environments.make(systems.load(name), work_dir / "environments" / name)
    if environment.error is None:
        job = {"prepare": name, "work_dir": str(folder)}
        answer = _child(environment.python, job, PREPARE_SECONDS)
        if "error" in answer:
            error = f"preparing: {answer['error']}"
            environment = environments.Environment("", environment.versions, error)
    if environment.error is not None:
        _say(f"  {environment.error}")
    return environment


def _run_one(
    job: dict[str, Any], found: dict[str, environments.Environment], folder: Path, turn: int
) -> dict[str, Any]:
    variant = job["variant"]
    environment = found[variant["system"]]
    others = Others()
    if environment.error is not None:
        answer: dict[str, Any] = {"error": environment.error}
    else:
        answer = _child(environment.python, job | {"work_dir": str(folder)}, JOB_SECONDS)
    settings = ", ".join(f"{k}={v}" for k, v in variant.items() if k not in ("system", "seconds"))
    told = answer.get("error") or ", ".join(f"{k} {v:,.4g}" for k, v in answer["metrics"].items())
    _say(f"{turn + 1} {job['case']:<8} {variant['system']:<12} {settings}: {told}")
    about = {"case": job["case"], "variant": variant, "turn": turn}
    return about | {"others_cores": round(others.cores(), 2)} | answer


def _child(python: str, job: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Run a job; return its metrics or its error's last line."""
    with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as complaints:
        # files, not pipes: worker processes that outlive their parent would keep a pipe open
        process = subprocess.Popen(
            [python, "-m", "benchmarks.child", json.dumps(job)],
            cwd=ROOT,
            env=os.environ | SETTINGS | {"PYTHONPATH": str(ROOT)},
            stdout=printed,
            stderr=complaints,
            start_new_session=True,
        )
        try:
            process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"error": f"took longer than {seconds} s"}
        finally:
            _end_group(process)
        printed.seek(0)
        complaints.seek(0)
        try:
            answer: dict[str, Any] = json.loads(printed.read())
        except ValueError:
            last = (complaints.read().strip().splitlines() or [""])[-1]
            return {"error": f"exit code {process.returncode}: {last}"}
    return answer


SETTINGS = {
    "OMP_NUM_THREADS": "1",  # one thread computes, everywhere
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what a job left behind; its process group is its own."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return {
        "cpu": " / ".join(sorted(names)) or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
