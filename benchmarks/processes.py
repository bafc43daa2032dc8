"""CPU time and memory of a process and all that it started, as Linux tells them in /proc."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """Return a process and its descendants."""
    return [pid, *(below for child in _children(pid) for below in tree(child))]


def _children(pid: int) -> Iterator[int]:
    for thread in _listed(Path(f"/proc/{pid}/task")):
        try:
            yield from map(int, (thread / "children").read_text().split())
        except OSError:  # it has ended
            continue


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def cpu_seconds(pid: int) -> float:
    """Return user and system time of the tree, with that of children that have ended."""
    ticks = 0
    for one in tree(pid):
        try:
            text = Path(f"/proc/{one}/stat").read_text()
        except OSError:
            continue
        ticks += sum(map(int, text.rpartition(")")[2].split()[11:15]))
    return ticks / TICKS


def memory_mb(pid: int) -> dict[str, float]:
    """Return megabytes of the tree: `pss_mb` with mapped files, `own_mb` (anonymous) without.

    A page that several processes share counts once.
    """
    totals = {"Pss": 0, "Pss_Anon": 0, "Pss_Shmem": 0}
    for one in tree(pid):
        try:
            lines = Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            key, value = line.split(":")
            if key in totals:
                totals[key] += int(value.split()[0])
    return {
        "pss_mb": totals["Pss"] / 1024,
        "own_mb": (totals["Pss_Anon"] + totals["Pss_Shmem"]) / 1024,
    }


def main_rss_mb(pid: int) -> float:
    """Return the resident megabytes of one process, mapped files included."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


class Others:
    """Watches how many cores all other processes of the machine keep busy."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._before = _busy_seconds() - _children_seconds()

    def cores(self) -> float:
        """Return their mean since this was made; children that were waited for are not others."""
        elapsed = time.perf_counter() - self._start
        return max(0.0, (_busy_seconds() - _children_seconds() - self._before) / elapsed)


def _busy_seconds() -> float:
    user, nice, system, *_ = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system) / TICKS


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
