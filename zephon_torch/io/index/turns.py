"""One process of a machine at a time, for work that the others then find done.

The lock is one of the kernel on the very file that is worked on: it leaves nothing behind and ends
with its process, however that dies. It is best effort: where a file system knows no such locks, or
the holder takes longer than anything should, the work is done twice, which must be right too.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from zephon_torch.io.storage.local import open_regular
from zephon_torch.support import waits

_POLL_SECONDS = 0.05
_PATIENCE_SECONDS = 60.0
_SLOW_BYTES_PER_SECOND = 20e6


@contextmanager
def turn(path: str | None) -> Iterator[bool]:
    """Wait for the turn at a local file (None: at once); yields whether others were before."""
    try:
        descriptor = None if path is None else open_regular(path)
    except OSError:
        descriptor = None
    if descriptor is None:
        yield False
        return
    try:
        yield _wait(descriptor)
    finally:
        os.close(descriptor)


def _wait(descriptor: int) -> bool:
    num_bytes = os.fstat(descriptor).st_size
    limit = time.monotonic() + _PATIENCE_SECONDS + num_bytes / _SLOW_BYTES_PER_SECOND
    has_waited = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            has_waited = True
        except OSError:  # no locks here
            return has_waited
        else:
            return has_waited
        if time.monotonic() > limit:
            return True
        waits.pause(_POLL_SECONDS)
