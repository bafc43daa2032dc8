"""Processes that tests start: their environment, and whether they live."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

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


def children_of_this() -> set[int]:
    """Processes that this one has started, in whatever thread, and not yet reaped."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found.update(map(int, (task / "children").read_text().split()))
    return found


services: set[int] = set()
"""Processes that tests start for all that follow; they end with this one."""


def is_service(process: int) -> bool:
    """Whether it is one of `services`, or of multiprocessing's or torch.compile's own."""
    own = (resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
    if process in services or process in own:
        return True
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return b"compile_worker" in Path(f"/proc/{process}/cmdline").read_bytes()
    return False


@contextlib.contextmanager
def forked(function: Callable[[], object]) -> Iterator[int]:
    """The pid of a child that calls a function and ends with 0 if it raised nothing.

    What is left of it at the end of the block is killed and reaped; inside, `exit_code` may be
    called for it, once.
    """
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    try:
        yield pid
    finally:
        with contextlib.suppress(ChildProcessError):  # reaped: the number may be another's by now
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def exit_code(pid: int) -> int:
    """Wait for the end of a child."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextlib.contextmanager
def started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A program in a process group of its own, of which nothing is left at the end of the block."""
    process = subprocess.Popen(
        command, text=True, start_new_session=True, **({"env": environment()} | options)
    )
    try:
        yield process
    finally:
        ranks = descendants(process.pid) if process.poll() is None else []  # of other groups
        for kill, pid in [(os.killpg, process.pid), *((os.kill, rank) for rank in ranks)]:
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        if process.stdout is None or not process.stdout.closed:
            process.communicate()


@contextlib.contextmanager
def running(processes: Sequence[Any]) -> Iterator[None]:
    """Processes of multiprocessing, started, of which none is left at the end of the block."""
    begun = []
    try:
        for process in processes:
            process.start()
            begun.append(process)
        yield
    finally:
        for process in begun:
            process.kill()
            process.join()


def descendants(process: int) -> list[int]:
    """Processes that it and those have started, and not yet reaped."""
    found = children(process)
    return found + [pid for child in found for pid in descendants(child)]


def wait_until(reached: Callable[[], bool], seconds: float = 60) -> None:
    """Poll; what must come, however busy the machine is."""
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
