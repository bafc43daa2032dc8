"""Waiting that ends: when its time is up, when nobody wants the result any more, and at exit.

Whatever may last here (answers of stores, pauses between tries, locks of other processes) waits in
`result_of` or `pause`. They look around ten times a second. Who runs code on behalf of somebody
says so with `wanted_until`, for its own thread.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from importlib import import_module
from types import TracebackType
from typing import TypeVar

from zephon_torch.errors import StorageError

_POLL_SECONDS = 0.1

_T = TypeVar("_T")

_exiting = threading.Event()
# At exit, pools join their threads in a hook of the same kind, before atexit runs. The hooks are
# called in reverse order, so theirs has to be registered before this one: whoever imports first.
import_module("concurrent.futures.thread")
getattr(threading, "_register_atexit", atexit.register)(_exiting.set)
_process_is_over = threading.Event()
_thread = threading.local()


def is_exiting() -> bool:
    """Whether the interpreter exits."""
    return _exiting.is_set() or not threading.main_thread().is_alive()


def end_all() -> None:
    """Give up all that this process waits for, now and later: nobody wants its results."""
    _process_is_over.set()


class wanted_until:
    """Give up what this thread waits for inside, once a function returns True."""

    __slots__ = ("_before", "_is_over")

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self._is_over = is_over

    def __enter__(self) -> None:
        self._before = getattr(_thread, "is_over", None)
        _thread.is_over = self._is_over

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _thread.is_over = self._before


def check() -> None:
    """Raise if nobody wants what this thread does.

    Raises:
        StorageError: The loader was closed, or the interpreter exits.
    """
    is_over: Callable[[], bool] | None = getattr(_thread, "is_over", None)
    # what the main thread does at exit, somebody asked for
    is_left = is_exiting() and threading.current_thread() is not threading.main_thread()
    if is_left or _process_is_over.is_set() or (is_over is not None and is_over()):
        raise StorageError("reading was given up: its loader was closed or the process ends")


def pause(seconds: float) -> None:
    """Sleep.

    Raises:
        StorageError: Nobody wants to wait any longer.
    """
    end = time.monotonic() + seconds
    check()
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, _POLL_SECONDS))
        check()


def result_of(future: Future[_T], until: float) -> _T:
    """Wait for a result; a future that is given up is cancelled.

    Args:
        future: What makes it.
        until: The latest time, as `time.monotonic` has it.

    Raises:
        TimeoutError: It did not come in time.
        StorageError: Nobody wants to wait any longer.
    """
    try:
        while not wait([future], min(_POLL_SECONDS, max(0.0, until - time.monotonic()))).done:
            check()
            if time.monotonic() >= until:
                raise TimeoutError("no answer in time")
    except BaseException:
        future.cancel()
        raise
    return future.result()


def in_thread(function: Callable[[], _T]) -> Future[_T]:
    """Call in a thread of its own, which nobody joins: one that hangs holds nobody up."""
    future: Future[_T] = Future()

    def run() -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    threading.Thread(target=run, name="zephon-request", daemon=True).start()
    return future
