"""Files of this machine, kept in a folder with a hard limit in bytes.

::

    <sha256 of the key>.shard   an entry, whole; a shared lock on it is a pin
    <...>.shard.sum             its checksum, a line of text (``checksums.py``)
    <sha256 of the key>.part    one that is being made, as large as it will be; locked by its maker
    zephon-cache.lock           locked while room is made, and while a part becomes an entry

An entry is made once, however many processes and threads ask for it; the others wait. It appears
whole, by a rename. Room is made before the first byte is written: by removing entries that nobody
holds, those first that were held longest ago. The sum of the sizes of all entries and parts is
never above the limit. Nothing but these files is ever touched, no link is followed, and a folder
that is made is for this user alone.

Before an entry is used by a process for the first time it is compared with its checksum. A damaged
one is removed and made anew, and a `DamagedCopyWarning` names it.

A maker that was killed leaves a part that is not locked, which the next who needs room removes: a
folder that a killed run left is as good as any. The folder must be on a disk of this machine, where
locks are reliable (not on NFS), and belongs to one user. A forked child holds nothing of what its
parent holds; the space of a removed entry is free once no process maps it any more.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, Self, cast

from zephon_torch.errors import ConfigurationError, DatasetError, StorageError
from zephon_torch.io.cache import checksums
from zephon_torch.io.storage.local import make_own_folder
from zephon_torch.support import checks
from zephon_torch.support.locks import FileLock

_OURS = re.compile(r"[0-9a-f]{64}\.(shard|part)")

Make = Callable[[BinaryIO], None]


class Held:
    """An entry that stays until `close`, or until this is dropped.

    Attributes:
        path: where its bytes are; not to be written to.
        is_new: whether it was made for this call.
    """

    def __init__(self, path: str, lock: FileLock, *, is_new: bool) -> None:
        self.path, self.is_new = path, is_new
        self._lock = lock

    def close(self) -> None:
        """Let it go; a second call has no effect."""
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ShardCache:
    """A folder of entries, shared by all processes of this machine that name it. Picklable.

    Args:
        folder: made if it is missing. Other files in it are left alone.
        limit_bytes: what all entries together may take.

    Raises:
        ConfigurationError: the folder cannot be used, or a limit below 1.
    """

    def __init__(self, folder: str | os.PathLike[str], limit_bytes: int) -> None:
        self.folder = os.path.abspath(os.path.expanduser(os.fspath(folder)))
        self.limit_bytes = checks.integer("limit of the cache", limit_bytes, minimum=1)
        try:
            make_own_folder(self.folder)
            with self._locked():
                self._make_room(0)
        except OSError as error:
            raise ConfigurationError(
                f"cache folder {self.folder!r} cannot be used ({error.strerror}): name a folder on "
                "a disk of this machine that this user can write"
            ) from error

    def hold(self, key: str, num_bytes: int, make: Make, name: str = "") -> Held | None:
        """Find or make an entry and hold it.

        Args:
            key: tells the content: another content must have another key.
            num_bytes: size of the entry. One of another size is not used.
            make: writes exactly so many bytes; called where there is no entry, in this thread.
                What it raises passes through, and nothing is left behind.
            name: of what it is a copy, for warnings.

        Returns:
            The entry, None where there is no room for it because all else is held.

        Raises:
            ConfigurationError: it is larger than the limit, or something else has its name.
            DatasetError: `make` wrote more or less.
            StorageError: the folder cannot be written, because the disk is full, say.
        """
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
        del key  # may hold the query of a URL; crash reports show local variables
        if num_bytes > self.limit_bytes:
            raise ConfigurationError(
                f"{num_bytes:,} bytes cannot be kept in cache folder {self.folder!r}, whose limit "
                f"is {self.limit_bytes:,} bytes: raise the limit"
            )
        stem = os.path.join(self.folder, digest)
        entry, part = stem + ".shard", stem + ".part"
        try:
            while True:
                if (found := self._find(entry, num_bytes, name)) is not None:
                    return Held(entry, found, is_new=False)
                if (made := self._make(entry, part, num_bytes, make)) is not None:
                    return Held(entry, made, is_new=True)
        except _NoRoomError:
            return None

    def _find(self, entry: str, num_bytes: int, name: str) -> FileLock | None:
        """Pin an entry; a damaged one goes."""
        try:
            lock = FileLock(entry)
        except FileNotFoundError:
            return None
        fault, is_kept = "", False
        try:
            lock.shared()
            if lock.is_at(entry):
                if not (fault := checksums.find_fault(entry, lock.descriptor, num_bytes)):
                    now = time.time_ns()
                    os.utime(lock.descriptor, ns=(now, now))  # its turn to go depends on it
                    is_kept = True
                    return lock
                self._drop(lock, entry)
        finally:
            if not is_kept:
                lock.close()
        if fault:
            checksums.warn_damaged(entry, name, fault)
        return None

    def _drop(self, lock: FileLock, entry: str) -> None:
        """Remove an entry, if it is still the locked one; who has it open keeps it until then."""
        with self._locked():
            if lock.is_at(entry):
                checksums.remove_entry(entry)

    def _make(self, entry: str, part: str, num_bytes: int, make: Make) -> FileLock | None:
        """Make an entry, pinned; None where somebody else was at it: look again."""
        with _writing(self.folder):
            make_own_folder(self.folder)  # somebody may have deleted it all
            lock, is_kept = FileLock(part, create=True), False
        try:
            if not lock.try_exclusive():
                lock.shared()  # until its maker is done, has given up, or is dead
            elif lock.is_at(part):
                try:
                    if not _has_size(entry, num_bytes):  # it may have come since
                        crc32 = self._fill(lock, part, num_bytes, make)
                        # whoever makes room sees it under one name
                        with _writing(self.folder), self._locked():
                            checksums.write(entry, num_bytes, crc32)
                            os.replace(part, entry)
                finally:
                    if lock.is_at(part):
                        os.unlink(part)
                lock.shared()
                is_kept = lock.is_at(entry)
            return lock if is_kept else None
        finally:
            if not is_kept:  # at once: others wait for it
                lock.close()

    def _fill(self, lock: FileLock, part: str, num_bytes: int, make: Make) -> int:
        """Make room, write the bytes of an entry, and return their checksum."""
        with _writing(self.folder), self._locked():
            if not self._make_room(num_bytes, besides=part):
                raise _NoRoomError
            os.truncate(lock.descriptor, 0)  # a killed maker may have begun it
            os.truncate(lock.descriptor, num_bytes)
        stream = _Stream(lock.descriptor, num_bytes, self.folder)
        make(cast(BinaryIO, stream))
        stream.finish()
        return stream.crc32

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = FileLock(os.path.join(self.folder, "zephon-cache.lock"), create=True)
        try:
            lock.exclusive()
            yield
        finally:
            lock.close()

    def _make_room(self, num_bytes: int, besides: str | None = None) -> bool:
        """Remove what must go so that `num_bytes` more fit; nothing where they cannot."""
        total, entries = num_bytes, []
        for file in os.scandir(self.folder):
            if not _OURS.fullmatch(file.name) or file.path == besides:
                continue
            is_part = file.name.endswith(".part")
            try:
                if is_part and _remove_dead(file.path):
                    continue
                status = file.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            total += status.st_size
            if not is_part:
                entries.append((status.st_mtime_ns, file.path, status.st_size))
        going: list[tuple[FileLock, str]] = []
        for _, path, size in sorted(entries):
            if total <= self.limit_bytes:
                break
            if (lock := _locked_out(path)) is not None:
                going.append((lock, path))
                total -= size
        for lock, path in going:
            if total <= self.limit_bytes:
                checksums.remove_entry(path)
            lock.close()
        return total <= self.limit_bytes


class _NoRoomError(Exception):
    """All else is held."""


@contextmanager
def _writing(folder: str) -> Iterator[None]:
    """Say which folder cannot be written. Nothing is wrong with the data: it can be tried again."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write to cache folder {folder!r} ({error.strerror}): free space on its disk "
            "or lower the limit"
        ) from error


class _Stream(io.RawIOBase):
    """Takes an exact number of bytes.

    Attributes:
        crc32: of what was written.
    """

    def __init__(self, descriptor: int, num_bytes: int, folder: str) -> None:
        self._descriptor, self._folder = descriptor, folder
        self._num_bytes, self._num_written = num_bytes, 0
        self.crc32 = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        num_bytes = len(left)
        if self._num_written + num_bytes > self._num_bytes:
            raise DatasetError(f"more than the {self._num_bytes:,} bytes of a cache entry")
        self.crc32 = zlib.crc32(left, self.crc32)
        with _writing(self._folder):
            while left:
                left = left[os.write(self._descriptor, left) :]
        self._num_written += num_bytes
        return num_bytes

    def finish(self) -> None:
        """Check that all was written, and see it on the disk: a name must never lead to less."""
        if self._num_written != self._num_bytes:
            raise DatasetError(
                f"{self._num_written:,} bytes, {self._num_bytes:,} expected of a cache entry"
            )
        with _writing(self._folder):
            os.fdatasync(self._descriptor)


def _has_size(path: str, num_bytes: int) -> bool:
    try:
        return os.lstat(path).st_size == num_bytes
    except FileNotFoundError:
        return False


def _locked_out(path: str) -> FileLock | None:
    """An exclusive lock on a file that is there and that nobody else has locked."""
    try:
        lock = FileLock(path)
    except FileNotFoundError:
        return None
    if lock.try_exclusive() and lock.is_at(path):
        return lock
    lock.close()
    return None


def _remove_dead(part: str) -> bool:
    """Remove a part that has no maker any more."""
    lock = _locked_out(part)
    if lock is None:
        return False
    os.unlink(part)
    lock.close()
    return True
