"""Locks on files, for processes and threads of one machine that share a folder.

They are those of ``flock(2)``: each opened file has its own, so two threads exclude each other as
two processes do, and the kernel lets go of them when a process dies, however it dies. A forked
child would share its parent's locks, and keep them alive after the parent's death: it lets go of
its copies as soon as it begins.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import weakref
from contextlib import suppress

from zephon_torch.errors import ConfigurationError
from zephon_torch.support import waits

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds


class FileLock:
    """An open file that can be locked. Closed, and so unlocked, when it is dropped.

    Args:
        path: the file.
        create: make it where it is missing.

    Raises:
        FileNotFoundError: it is missing.
        ConfigurationError: a folder, a link or the like is in its place.
    """

    def __init__(self, path: str, *, create: bool = False) -> None:
        self.descriptor = -1
        self.descriptor = open_own(path, os.O_RDWR | (os.O_CREAT if create else 0))
        _live.add(self)

    def try_exclusive(self) -> bool:
        """Lock out everybody; False, and no lock, where somebody else has one."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def exclusive(self) -> None:
        """Wait until nobody else has a lock.

        Raises:
            StorageError: Nobody wants to wait any longer.
        """
        self._wait_for(fcntl.LOCK_EX)

    def shared(self) -> None:
        """Take a shared lock, waiting for an exclusive one; makes one of one's own exclusive lock.

        Raises:
            StorageError: Nobody wants to wait any longer.
        """
        self._wait_for(fcntl.LOCK_SH)

    def _wait_for(self, kind: int) -> None:
        """Ask again and again: the holder may hang, while this process has to end."""
        pause = _SHORTEST_PAUSE
        while True:
            try:
                return fcntl.flock(self.descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                waits.pause(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    def is_at(self, path: str) -> bool:
        """Whether a path still leads to the open file: it may be removed or renamed any time."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.lstat(path))
        except FileNotFoundError:
            return False

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return os.fstat(self.descriptor).st_size

    def close(self) -> None:
        """Unlock; a second call has no effect."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                # not by closing alone: a child that is just being forked may have a copy
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def leave_to_parent(self) -> None:
        """In a forked child: close without unlocking, since parent and child share one lock."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def open_own(path: str, flags: int) -> int:
    """Open a file that nobody but this package should have put there; a new one is private.

    A link is never followed, nor is a file used that has a second name: what is written would go
    to a file of somebody's choice.

    Returns:
        Its descriptor.

    Raises:
        ConfigurationError: Something else is in its place.
        OSError: It is missing, or cannot be opened.
    """
    try:
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a named pipe is not waited for
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise _stranger(path) from None
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(descriptor)
        raise _stranger(path)
    return descriptor


def _stranger(path: str) -> ConfigurationError:
    return ConfigurationError(
        f"{path!r} is a folder, a link or something else that the cache did not put there: remove "
        "it, or name another folder"
    )


_live: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _leave_all_to_parent() -> None:
    for lock in list(_live):
        lock.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
