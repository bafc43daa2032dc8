"""A file object over the ranges of a stored file, for libraries that ask for one."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from zephon_torch.io.ranges import Ranges, View


class RangesFile:
    """Reads from ranges that were requested together, else from the file.

    Attributes:
        num_bytes: size of the file.
        failure: what reading from storage raised last: the library may turn it into something else.
    """

    closed = False

    def __init__(self, ranges: Ranges, num_bytes: int) -> None:
        self._ranges = ranges
        self.num_bytes = num_bytes
        self._position = 0
        self._held: list[tuple[int, View]] = []
        self.failure: BaseException | None = None

    def hold(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> None:
        """Request ranges that will be read, in place of those held before."""
        views = self._ranges.views(starts, stops) if len(starts) else []
        self._held = list(zip(starts.tolist(), views, strict=True))

    def read(self, num_bytes: int = -1) -> View:
        """Bytes from the position on, fewer at the end."""
        start = min(self._position, self.num_bytes)
        stop = self.num_bytes if num_bytes < 0 else min(start + num_bytes, self.num_bytes)
        self._position = stop
        for first, view in self._held:
            if first <= start and stop <= first + len(view):
                return view[start - first : stop - first]
        self.failure = None
        try:
            return self._ranges.views(np.array([start]), np.array([stop]))[0]
        except BaseException as error:
            self.failure = error
            raise

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
        self._held = []
