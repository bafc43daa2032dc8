"""Byte ranges of one file for as long as a reader is open: a memory map, or ranged requests.

Locally a map is the fastest way: `os.pread` gives up the interpreter lock at every record, and a
background thread then waits for it.
"""

from __future__ import annotations

import mmap
import os
import time
from contextlib import suppress
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import DatasetError
from zephon_torch.io.storage.files import StoredFile
from zephon_torch.io.storage.local import open_regular

View: TypeAlias = bytes | memoryview
# A remote file that is replaced while a reader is open is noticed within this time. Asking at each
# read would double the requests.
_TRUSTED_SECONDS = 60.0
_MAP_TRUSTED_SECONDS = 1.0
# The sizes of maps that are read together are compared this often, or less often where that would
# take more than a hundredth of the time.
_SIZES_TRUSTED_SECONDS = 0.02


class Ranges(Protocol):
    """Random access to the bytes of one file. Belongs to the process that opened it."""

    def read(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> list[bytes]:
        """Bytes [starts[i], stops[i]) for every i, in that order."""
        ...

    def close(self) -> None:
        """Let go of the file; reading afterwards raises."""
        ...


class StoredRanges(Ranges, Protocol):
    """Ranges of a file as it is stored."""

    def views(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> list[View]:
        """As `read`, without a copy where the file is mapped: a view keeps the map alive."""
        ...

    def check(self) -> None:
        """Raise if the reader is closed, or views must not be touched: the file was cut short."""
        ...


def open_ranges(file: StoredFile) -> StoredRanges:
    """Open a file that must be as it was when its dataset was made.

    Raises:
        DatasetError: It is gone, or its size or stamp differ.
    """
    file.check_unchanged()
    path = file.local_path
    return RequestedFile(file) if path is None else MappedFile(file, path)


class MappedFile:
    """A local file, mapped.

    Attributes:
        map: the map; None when closed, and of an empty file, which cannot be mapped.
    """

    def __init__(self, file: StoredFile, path: str) -> None:
        self._file = file
        self.map = FileMap(file, path) if file.num_bytes else None

    def read(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> list[bytes]:
        """Slices of the map, touched in the order of the file."""
        content = self._checked()
        first, behind = starts.tolist(), stops.tolist()
        parts = [b""] * len(first)
        for i in starts.argsort(kind="stable").tolist():
            parts[i] = content[first[i] : behind[i]]
        return parts

    def views(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> list[View]:
        """Views of the map."""
        content = memoryview(self._checked())
        return [content[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]

    def check(self) -> None:
        """Compare the size."""
        self._checked()

    def close(self) -> None:
        """Unmap the file."""
        if self.map is not None:
            self.map.close()
            self.map = None

    def _checked(self) -> mmap.mmap:
        if self.map is None:
            raise DatasetError(f"the reader of {self._file.url!r} is closed or the file is empty")
        return self.map.content()


class RequestedFile:
    """A remote file: one request for ranges that lie close together, nothing kept open."""

    def __init__(self, file: StoredFile) -> None:
        self._file: StoredFile = file
        self._is_closed = False
        self._checked = time.monotonic()

    def read(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> list[bytes]:
        """Request the ranges."""
        self.check()
        parts = self._file.storage.read_ranges(self._file.path, starts, stops)
        for part, start, stop in zip(parts, starts.tolist(), stops.tolist(), strict=True):
            if len(part) != stop - start:
                check_size(self._file, start + len(part))
        if time.monotonic() > self._checked + _TRUSTED_SECONDS:
            self._file.check_unchanged()  # behind the reads: what is returned was read before it
            self._checked = time.monotonic()
        return parts

    def views(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> list[View]:
        """Request the ranges."""
        return [*self.read(starts, stops)]

    def check(self) -> None:
        """Refuse when closed; what was read is safe whatever becomes of the file."""
        if self._is_closed:
            raise DatasetError(f"the reader of {self._file.url!r} is closed")

    def close(self) -> None:
        """Refuse further reads."""
        self._is_closed = True


def view(ranges: StoredRanges, start: int, stop: int) -> View:
    """One range, as `StoredRanges.views` gives it."""
    return ranges.views(np.array([start]), np.array([stop]))[0]


class FileMap:
    """A memory map of a local file that is not empty, as far as it reached when it was listed.

    Files that are deleted or replaced do no harm, for a map keeps what it was made of. One that is
    cut short kills the process at the next touch, so its size is compared each time (of maps that
    are read together every 20 ms: see `WatchedMaps`); one that is written over gives other bytes,
    so its modification time is compared once in a while.

    Raises:
        DatasetError: It was cut short.
    """

    def __init__(self, file: StoredFile, path: str) -> None:
        self._file, self._path = file, path
        self._is_own = file.stamp > 0 and path == file.storage.own_path(file.path)  # no copy
        descriptor = open_regular(path)
        try:
            self._origin = os.fstat(descriptor)
            check_size(file, self._origin.st_size)
            self._map = mmap.mmap(descriptor, file.num_bytes, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        self._trusted_until = time.monotonic() + _MAP_TRUSTED_SECONDS

    def content(self) -> mmap.mmap:
        """The map, to be touched at once.

        Raises:
            DatasetError: The file was cut short or written over.
        """
        check_size(self._file, self._map.size())
        if self._is_own and (now := time.monotonic()) > self._trusted_until:
            self._check_not_written()
            self._trusted_until = now + _MAP_TRUSTED_SECONDS  # last: whoever asks again is told
        return self._map

    def close(self) -> None:
        """Unmap it."""
        with suppress(BufferError):  # the last view that is still held unmaps it
            self._map.close()

    def _check_not_written(self) -> None:
        try:
            now = os.stat(self._path)
        except OSError:
            return
        if os.path.samestat(now, self._origin) and now.st_mtime_ns != self._origin.st_mtime_ns:
            raise DatasetError(
                f"{self._file.url!r} was written to while it was open; make the dataset anew, and "
                "write new files beside old ones while a run is under way"
            )


class WatchedMaps:
    """Maps that are touched again and again, too often to compare their sizes each time."""

    def __init__(self) -> None:
        self._maps: dict[int, FileMap] = {}
        self._trusted_until = 0.0

    def add(self, number: int, content: FileMap) -> None:
        """Watch one more, which was checked just now."""
        self._maps[number] = content

    def remove(self, number: int) -> None:
        """Watch it no longer."""
        del self._maps[number]

    def check(self) -> None:
        """Compare all sizes, once in a while.

        Raises:
            DatasetError: A file was cut short or written over.
        """
        begun = time.monotonic()
        if begun > self._trusted_until:
            for content in self._maps.values():
                content.content()
            now = time.monotonic()
            self._trusted_until = now + max(_SIZES_TRUSTED_SECONDS, 100 * (now - begun))


def check_size(file: StoredFile, num_bytes: int) -> None:
    """Refuse a file that has fewer bytes now than when its dataset was made.

    Raises:
        DatasetError: Naming the file and both sizes.
    """
    if num_bytes < file.num_bytes:
        raise DatasetError(
            f"{file.url!r} was cut short: {file.num_bytes:,} bytes when the dataset was made, "
            f"{num_bytes:,} now; restore it or make the dataset anew"
        )
