"""Lines of JSON in mapped files: of one file, or of many in one call.

A line is a view of a map between two offsets of its index, which were checked to ascend; nothing
is copied before it is parsed. Each begins with the newline before it: a wrong index would
otherwise give wrong data without a word.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from zephon_torch.io.formats.json.values import parse_lines
from zephon_torch.io.storage.ranges import FileMap, WatchedMaps

Int64Array = npt.NDArray[np.int64]


class MappedLines(NamedTuple):
    """Lines of one file, while it is open.

    Attributes:
        content: all of the file.
        offsets: int64[num_lines + 1]: where each begins, then the size of the file.
    """

    content: memoryview
    offsets: memoryview

    @classmethod
    def of(cls, content: FileMap, offsets: Int64Array) -> MappedLines:
        """Views of a map, and of offsets as an index has them."""
        return cls(memoryview(content.content()), offsets.astype(np.int64, copy=False).data)


def read_lines(files: Iterable[MappedLines], samples: Int64Array) -> list[Any]:
    """Values of one line of each file.

    Args:
        files: n of them; their maps were checked.
        samples: int64[n], numbers of lines.

    Raises:
        IndexError: A file has no such line.
        ValueError, RecursionError: As for `parse_lines`.
    """
    numbers: list[int] = samples.tolist()
    if min(numbers) < 0:
        raise IndexError("a negative number")
    # What is before the first line was checked when the file was opened.
    return parse_lines(
        [
            content[offsets[number] - 1 : offsets[number + 1]]
            if number
            else b"\n" + content[offsets[0] : offsets[1]]
            for (content, offsets), number in zip(files, numbers, strict=True)
        ]
    )


@dataclass(frozen=True, slots=True)
class LineGroupKind:
    """Lines of JSON in maps; see `GroupKind`."""

    def make(self, num_shards: int) -> LineGroup:
        """A new group."""
        return LineGroup()


class LinesReader(Protocol):
    """A reader that a group can take in."""

    @property
    def mapped(self) -> tuple[FileMap, MappedLines]:
        """A map, and its lines."""
        ...


class LineGroup:
    """Lines of JSON in maps; see `ShardGroup`."""

    def __init__(self) -> None:
        self._files: dict[int, MappedLines] = {}
        self._watched = WatchedMaps()

    def add(self, number: int, reader: LinesReader) -> None:
        """Take in a reader."""
        content, self._files[number] = reader.mapped
        self._watched.add(number, content)

    def remove(self, number: int) -> None:
        """Forget a reader that is about to be closed."""
        self._watched.remove(number)
        del self._files[number]

    def read(self, numbers: Int64Array, samples: Int64Array) -> list[Any]:
        """Values of lines."""
        self._watched.check()
        return read_lines(map(self._files.__getitem__, numbers.tolist()), samples)
