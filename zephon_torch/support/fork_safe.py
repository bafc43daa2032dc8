"""Locks that a forked child finds open.

A thread may hold a lock while another one forks: the child then has the lock, locked, but not the
thread that would open it. What such locks guard here are caches of pure functions, which are in
order at any moment.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any


class Lock:
    """A lock for ``with`` statements, open again after a fork; copies and pickles are new ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _all.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return Lock, ()


_all: weakref.WeakSet[Lock] = weakref.WeakSet()


def _open_all() -> None:
    for lock in _all:
        lock._lock = threading.Lock()


os.register_at_fork(after_in_child=_open_all)
