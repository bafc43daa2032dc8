"""Whole remote shards, copied to this machine by whoever needs one first.

A copy is known by the URL, size and stamp (ETag or time) of the file when its dataset was made, so
it needs no request to be used again, and is never used for another version. It is made in blocks,
each of them retried by itself; after the last one the file is compared with its size and stamp.
Files of which the store tells neither ETag nor time are not copied, for a copy could be of another
version. Checksums are those of what was received: what an ETag is made of differs from store to
store.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from zephon_torch.io.cache.shard_cache import Held, ShardCache
from zephon_torch.io.storage.files import FileInfo, Kind, Storage, StoredFile
from zephon_torch.io.storage.local import LocalStorage
from zephon_torch.io.storage.reader import Reader, Samples

# Held while something is counted, and during a fork, so that no child inherits it locked.
_counting = threading.Lock()
os.register_at_fork(
    before=_counting.acquire,
    after_in_parent=_counting.release,
    after_in_child=_counting.release,
)


@dataclass(slots=True)
class CacheStats:
    """Counts of the cache for this process and its worker processes.

    The counts of a worker process come with its batches: those of batches that were not handed over
    are missing.

    Attributes:
        hits: shards that were there when a reader came.
        downloads: shards that were copied, by readers and ahead of them.
        downloaded_bytes: bytes of these.
        wait_seconds: seconds that readers, not the threads that work ahead, waited for a shard.
        bypassed: calls that read records straight from the store because there was no room.
    """

    hits: int = 0
    downloads: int = 0
    downloaded_bytes: int = 0
    wait_seconds: float = 0.0
    bypassed: int = 0

    def counts(self) -> tuple[float, ...]:
        """Return all counts, in the order of the attributes."""
        with _counting:
            return astuple(self)

    def add(self, counts: Sequence[float]) -> None:
        """Add counts as `counts` returns them."""
        with _counting:
            for field, count in zip(fields(self), counts, strict=True):
                setattr(self, field.name, getattr(self, field.name) + count)


class ShardCopies:
    """The cache of a loader, and what it did.

    Args:
        cache: where copies are kept.
        stats: what is counted in.
    """

    def __init__(self, cache: ShardCache, stats: CacheStats | None = None) -> None:
        self.cache, self.stats = cache, CacheStats() if stats is None else stats

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardCopies, (self.cache, self.stats)

    def open(
        self,
        file: StoredFile,
        open_file: Callable[[StoredFile], Reader],
        make_way: Callable[[], bool],
    ) -> Reader:
        """Open a remote file through its copy, or itself where there is no room for one.

        Args:
            file: the file.
            open_file: opens any file of its format.
            make_way: closes another reader that can be spared; False where there is none.
        """
        begun = time.perf_counter()
        while (held := self.hold(file)) is None and make_way():
            pass
        with _counting:
            self.stats.hits += held is not None and not held.is_new
            self.stats.wait_seconds += time.perf_counter() - begun
        if held is None:
            return _Bypassing(open_file(file), self._count_bypassed)
        try:
            storage = _CopiedStorage(file.storage, file, held.path)
            return CopyReader(open_file(replace(file, storage=storage)), held)
        except BaseException:
            held.close()
            raise

    def hold(self, file: StoredFile, is_wanted: Callable[[], bool] = lambda: True) -> Held | None:
        """Hold the copy of a remote file, made if there is none.

        Args:
            file: the file.
            is_wanted: asked between blocks; once it is False, the copy is given up.

        Returns:
            None where there is no room, or the copy was given up.
        """
        if file.stamp == 0:
            return None
        try:
            held = self.cache.hold(
                _key(file), file.num_bytes, lambda stream: _copy(file, stream, is_wanted), file.url
            )
        except _GivenUpError:
            return None
        if held is not None and held.is_new:
            with _counting:
                self.stats.downloads += 1
                self.stats.downloaded_bytes += file.num_bytes
        return held

    def _count_bypassed(self) -> None:
        with _counting:
            self.stats.bypassed += 1


class CopyReader:
    """A reader of a copy, which it holds until it is closed.

    Attributes:
        reader: of the copy as a file.
    """

    def __init__(self, reader: Reader, held: Held) -> None:
        self.read = reader.read  # called for every batch: without a step in between
        self.reader, self._held = reader, held

    def close(self) -> None:
        """Close the reader, then let the copy go."""
        self.reader.close()
        self._held.close()


class _Bypassing:
    """A reader that counts its calls."""

    def __init__(self, reader: Reader, count: Callable[[], None]) -> None:
        self._reader, self._count = reader, count
        self.close = reader.close

    def read(self, samples: npt.NDArray[np.int64]) -> Samples:
        self._count()
        return self._reader.read(samples)


def _key(file: StoredFile) -> str:
    identity = file.storage.identity(file.path)
    return f"zephon_torch/copy/1\n{file.num_bytes}\n{file.stamp}\n{identity}"


class _GivenUpError(Exception):
    """Nobody wants the copy any more."""


def _copy(file: StoredFile, stream: BinaryIO, is_wanted: Callable[[], bool]) -> None:
    for block in file.blocks():
        stream.write(block)
        if not is_wanted():
            raise _GivenUpError
    file.check_unchanged()


@dataclass(frozen=True, slots=True)
class _CopiedStorage(Storage):
    """A storage of which one file is read from a copy, and is known to be unchanged."""

    origin: Storage
    file: StoredFile
    copy: str

    def kind(self) -> Kind | None:
        return self.origin.kind()

    def split(self) -> tuple[Storage, str]:
        return self.origin.split()

    def split_glob(self) -> tuple[Storage, str] | None:
        return self.origin.split_glob()

    def list_files(self) -> list[FileInfo]:
        return self.origin.list_files()

    def glob(self, pattern: str) -> list[FileInfo]:
        return self.origin.glob(pattern)

    def info(self, path: str) -> FileInfo:
        if path != self.file.path:
            return self.origin.info(path)
        return FileInfo(path, self.file.num_bytes, self.file.stamp)

    def read(self, path: str, start: int, stop: int) -> bytes:
        return self._place(path).read(self._path(path), start, stop)

    def read_ranges(
        self, path: str, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]
    ) -> list[bytes]:
        return self._place(path).read_ranges(self._path(path), starts, stops)

    def write(self, path: str, parts: Sequence[Any]) -> None:
        self.origin.write(path, parts)

    def url(self, path: str = "") -> str:
        return self.origin.url(path)

    def identity(self, path: str) -> str:
        return self.origin.identity(path)

    def local_path(self, path: str) -> str | None:
        return self.copy if path == self.file.path else self.origin.local_path(path)

    def own_path(self, path: str) -> str | None:
        return self.origin.own_path(path)

    def _place(self, path: str) -> Storage:
        return LocalStorage(self.copy) if path == self.file.path else self.origin

    def _path(self, path: str) -> str:
        return "" if path == self.file.path else path
