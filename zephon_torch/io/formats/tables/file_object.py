"""File objects over the ranges of a stored file, for libraries that ask for one."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable

from zephon_torch.io.storage.ranges import StoredRanges, View, view

HEADER_BYTES = 8 << 10  # requested at once: a header is rarely longer


class RangesFile:
    """Reads the file; a range of it may be held.

    Attributes:
        num_bytes: size of the file.
        failure: what reading from storage raised last: the library may turn it into something else.
    """

    closed = False

    def __init__(self, ranges: StoredRanges, num_bytes: int) -> None:
        self._ranges = ranges
        self.num_bytes = num_bytes
        self._position = 0
        self._held: tuple[int, View] = (0, b"")
        self.failure: BaseException | None = None

    def hold(self, start: int, stop: int) -> None:
        """Request a range of the file, which will be read in parts."""
        self._held = (start, memoryview(self._request(start, stop)))

    def read(self, num_bytes: int = -1) -> View:
        """Bytes from the position on, fewer at the end."""
        start = min(self._position, self.num_bytes)
        stop = self.num_bytes if num_bytes < 0 else min(start + num_bytes, self.num_bytes)
        self._position = stop
        first, held = self._held
        if first <= start and stop <= first + len(held):
            return held[start - first : stop - first]
        return self._request(start, stop)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.num_bytes}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """The position."""
        return self._position

    def close(self) -> None:
        """Let go of what is held."""
        self._held = (0, b"")

    def _request(self, start: int, stop: int) -> View:
        try:
            return view(self._ranges, start, stop)
        except BaseException as error:
            self.failure = error
            raise


class HeadersFile:
    """Reads the headers of messages; all else reads as zeros, which nobody requests.

    Args:
        read: bytes [start, stop) of the file.
        find_stop: how long the header is that some bytes begin with.
        num_bytes: size of the file.
    """

    closed = False

    def __init__(
        self,
        read: Callable[[int, int], View],
        find_stop: Callable[[View], int],
        num_bytes: int,
    ) -> None:
        self._read, self._find_stop, self._num_bytes = read, find_stop, num_bytes
        self._position = self._start = 0
        self._header: View = b""

    def begin(self, start: int) -> None:
        """Request the header that begins at a position."""
        start = min(start, self._num_bytes)
        head = self._read(start, min(start + HEADER_BYTES, self._num_bytes))
        length = min(self._find_stop(head), self._num_bytes - start)
        self._start = start
        self._header = head[:length] if length <= len(head) else self._read(start, start + length)

    def read(self, num_bytes: int = -1) -> View | mmap.mmap:
        """Bytes from the position on, fewer at the end."""
        start, left = self._position, self._num_bytes - self._position
        length = left if num_bytes < 0 else min(num_bytes, left)
        if length <= 0:
            return b""
        self._position += length
        at = start - self._start
        if 0 <= at < len(self._header):
            return self._header[at : at + length]
        return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """The position."""
        return self._position

    def close(self) -> None:
        """Let go of the header."""
        self._header = b""
