"""A file object over the ranges of a stored file, for libraries that ask for one."""

from __future__ import annotations

import os

from zephon_torch.io.ranges import StoredRanges, View, view


class RangesFile:
    """Reads the file; its end, where a footer is, may be held.

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

    def hold(self, start: int) -> None:
        """Request the end of the file, which will be read in parts."""
        self._held = (start, self._request(start, self.num_bytes))

    def read(self, num_bytes: int = -1) -> View:
        """Bytes from the position on, fewer at the end."""
        start = min(self._position, self.num_bytes)
        stop = self.num_bytes if num_bytes < 0 else min(start + num_bytes, self.num_bytes)
        self._position = stop
        first, held = self._held
        if held and first <= start:
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
