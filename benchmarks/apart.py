"""Runs a function in a forked process: each measurement begins where imports have just ended."""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from benchmarks.processes import tree

T = TypeVar("T")


def apart(function: Callable[[], T]) -> T:
    """Return what a function gives in a fork of this process, which must have no threads yet.

    The fork and all that it started are killed then: some systems never end by themselves.

    Raises:
        RuntimeError: the function raised; the message is its error's.
    """
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        content = _pickled(function)
        with os.fdopen(writable, "wb") as file:
            file.write(len(content).to_bytes(8, "little") + content)
        signal.pause()
    os.close(writable)
    try:
        with os.fdopen(readable, "rb") as file:
            # the end of the file may never come: worker processes have the pipe open, too
            content = file.read(int.from_bytes(file.read(8), "little"))
    finally:
        for one in reversed(tree(pid)):
            try:
                os.kill(one, signal.SIGKILL)
            except ProcessLookupError:
                pass
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if not content:
        raise RuntimeError(f"the process ended with {status} and said nothing")
    result, error = pickle.loads(content)
    if error is not None:
        raise RuntimeError(error)
    return result  # type: ignore[no-any-return]


def _pickled(function: Callable[[], Any]) -> bytes:
    try:
        return pickle.dumps((function(), None))
    except Exception as error:
        traceback.print_exc()
        return pickle.dumps((None, f"{type(error).__name__}: {error}"))
