"""Sources that pyarrow reads an Arrow file from: its map, or requested ranges."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import numpy as np

from zephon_torch.io.formats.tables.arrow_places import MAGIC, Headers, find_in_stream, header_stop
from zephon_torch.io.formats.tables.file_object import HEADER_BYTES, HeadersFile, RangesFile
from zephon_torch.io.formats.tables.libarrow import pa
from zephon_torch.io.index import index
from zephon_torch.io.storage.files import StoredFile
from zephon_torch.io.storage.ranges import FileMap, MappedFile, View, open_ranges

_FOOTER_BYTES = 64 << 10  # requested at once
TAIL = struct.Struct("<i6s")  # of a file: length of its footer, magic


class Input:
    """The bytes of one open file.

    Attributes:
        num_bytes: size of the file.
        map: of a local file.
        ranges_file: of one that is requested, what pyarrow reads it by.
    """

    def __init__(self, file: StoredFile) -> None:
        self._file, self.num_bytes = file, file.num_bytes
        self._ranges = open_ranges(file)
        self.map: FileMap | None = None
        self.ranges_file: RangesFile | None = None
        self._buffer: Any = None
        if isinstance(self._ranges, MappedFile) and self._ranges.map is not None:
            self.map = self._ranges.map
            self._buffer = pa.py_buffer(self.map.content())
        else:
            self.ranges_file = RangesFile(self._ranges, file.num_bytes)

    def open(self) -> Any:
        """A ``pyarrow.NativeFile``."""
        if self.ranges_file is not None:
            return pa.PythonFile(self.ranges_file, "r")
        return pa.BufferReader(self._buffer)

    def read(self, start: int, stop: int) -> View:
        """One range."""
        return self.read_all([(start, stop)])[0]

    def read_all(self, ranges: Sequence[tuple[int, int]]) -> list[View]:
        """Several ranges, together."""
        starts, stops = np.array(ranges, np.int64).T
        try:
            return self._ranges.views(starts, stops)
        except BaseException as error:
            if self.ranges_file is not None:
                self.ranges_file.failure = error
            raise

    def hold(self, start: int, stop: int) -> int:
        """Request what will be read next; return its size, 0 where the file is mapped."""
        if self.ranges_file is None:
            return 0
        self.ranges_file.hold(start, stop)
        return stop - start

    def release(self) -> None:
        """Hold nothing any more."""
        if self.ranges_file is not None:
            self.ranges_file.close()

    def read_footer(self) -> View:
        """The footer of a file, held as far as pyarrow will read it.

        Raises:
            ValueError: There is none.
        """
        self.hold(max(0, self.num_bytes - _FOOTER_BYTES), self.num_bytes)
        behind = self.num_bytes - TAIL.size
        length, magic = TAIL.unpack(self.read(max(0, behind), self.num_bytes)[-TAIL.size :])
        if magic != MAGIC or not 0 < length <= behind - len(MAGIC):
            raise ValueError("no footer stands at its end")
        return self.read(behind - length, behind)

    def count_outside(self, column: Any) -> int:
        """Bytes of an array that do not lie in the map."""
        buffers = [buffer for buffer in column.buffers() if buffer is not None]
        if self._buffer is not None:
            there = range(self._buffer.address, self._buffer.address + self.num_bytes)
            buffers = [buffer for buffer in buffers if buffer.address not in there]
        return sum(buffer.size for buffer in buffers)

    def headers(self, name: str, starts: Sequence[int] = ()) -> Headers:
        """The headers of messages; those at `starts` are requested together, if not mapped."""
        if self.ranges_file is None:
            return Headers(self.open(), _read_nothing, self.num_bytes, name)
        known = [(start, min(start + HEADER_BYTES, self.num_bytes)) for start in starts]
        held = dict(zip(known, self.read_all(known), strict=True)) if known else {}

        def read(start: int, stop: int) -> View:
            return held[start, stop] if (start, stop) in held else self.read(start, stop)

        file = HeadersFile(read, header_stop, self.num_bytes)
        return Headers(pa.PythonFile(file, "r"), file.begin, self.num_bytes, name)

    def headers_of_stream(self, name: str) -> Headers:
        """The same of a stream: an index says where they are, and saves a request for each.

        What it says is not relied on.
        """
        if self.ranges_file is None:
            return self.headers(name)
        known = index.stored_count(self._file, _INDEXER)
        if known is None:
            offsets = index.build(self._file, _INDEXER, lambda _: None)
        else:
            offsets = index.load(self._file, _INDEXER, known)
        return self.headers(name, offsets[:-1].tolist())

    def check(self) -> None:
        """Raise unless arrays in the map may be touched: see `StoredRanges.check`."""
        self._ranges.check()

    def close(self) -> None:
        """Let go of the file."""
        self.release()
        self._buffer = None
        self._ranges.close()


def _read_nothing(_: int) -> None:
    """Of a mapped file no header has to be requested."""


def _find_messages(file: StoredFile, _: index.Advance) -> index.Offsets:
    """Where each message of a stream starts, then the size of the file."""
    with closing(Input(file)) as source:
        places = find_in_stream(source.headers(repr(file.url)))
    starts = [0, *places.starts.tolist(), *(found.start for found in places.dictionaries)]
    return np.array([*sorted(starts), file.num_bytes], dtype=np.int64)


_INDEXER = index.Indexer("arrow", 1, _find_messages)
