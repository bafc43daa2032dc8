"""Processes that tests start: their environment, and whether they live."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
# states as proc(5) has them
STOPPED = ("T", "Z", "X", "")
GONE = ("Z", "X", "")


def environment() -> dict[str, str]:
    """For a process that imports what this one can, and leaves cores to others."""
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def state(process: int) -> str:
    """The letter of its state; empty where there is none."""
    return (_status(process) or [""])[0]


def is_running(process: int) -> bool:
    return state(process) not in GONE


def children(parent: int) -> list[int]:
    """Processes that a process has started, and not yet reaped."""
    processes = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [process for process in processes if _status(process)[1:2] == [str(parent)]]


def wait_until(reached: Callable[[], bool], seconds: float = 10) -> None:
    """Poll; what must come within some time."""
    deadline = time.monotonic() + seconds
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert reached()


def _status(process: int) -> list[str]:
    """What the kernel says of a process, from its state on; nothing where there is none."""
    try:
        # behind the name of the program, which is in brackets
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
