"""Runs a function in a forked process: each measurement begins where imports have just ended."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def apart(function: Callable[[], T]) -> T:
    """Return what a function gives in a fork of this process, which must have no threads yet.

    Raises:
        RuntimeError: the function raised; the message is its error's.
    """
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(readable)
        with os.fdopen(writable, "wb") as file:
            file.write(_pickled(function))
        os._exit(0)  # some systems never join their threads
    os.close(writable)
    with os.fdopen(readable, "rb") as file:
        content = file.read()
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
