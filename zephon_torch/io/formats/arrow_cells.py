"""Cells of plain Arrow columns, taken from maps of their files without pyarrow.

Of each batch it is known where the buffers of the chosen columns begin; a cell is then two offsets
and a slice, or one number. This takes columns of text, bytes, whole numbers, floats and booleans,
in files without compression and dictionaries. Values are those of ``to_pylist``.

Where buffers begin and end is checked when a file is opened, offsets within them for every cell;
what does not fit raises, and pyarrow then says what is wrong. Source: "Serialization and
Interprocess Communication" of the Arrow columnar format (``RecordBatch`` of ``Message.fbs``).
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from zephon_torch.io.formats.arrow_messages import Message
from zephon_torch.io.formats.arrow_types import count_buffers, stored_as
from zephon_torch.io.formats.libarrow import pa
from zephon_torch.io.ranges import FileMap, WatchedMaps

Int64Array = npt.NDArray[np.int64]


class Layout(NamedTuple):
    """How the cells of a column are stored.

    Attributes:
        code: of what the first buffer behind the bitmap of nulls holds, as `memoryview.cast` has
            it: the values, or offsets of text and bytes; "?" for bits.
        item: what a value is made with, given its bytes; None where the buffer holds the values.
    """

    code: str
    item: type[str] | type[bytes] | None = None

    @property
    def num_bits(self) -> int:
        """Of one value or offset."""
        return 1 if self.code == "?" else 8 * struct.calcsize(self.code)


_LAYOUTS = {
    pa.string(): Layout("i", str),
    pa.large_string(): Layout("q", str),
    pa.binary(): Layout("i", bytes),
    pa.large_binary(): Layout("q", bytes),
    pa.bool_(): Layout("?"),
    pa.int8(): Layout("b"),
    pa.int16(): Layout("h"),
    pa.int32(): Layout("i"),
    pa.int64(): Layout("q"),
    pa.uint8(): Layout("B"),
    pa.uint16(): Layout("H"),
    pa.uint32(): Layout("I"),
    pa.uint64(): Layout("Q"),
    pa.float32(): Layout("f"),
    pa.float64(): Layout("d"),
}

_Views = tuple[memoryview, memoryview]  # of bytes, and of values or offsets

# What is known of a column in a batch, as int64: where in the file its values or offsets begin, in
# units of one of them; where its bytes begin and how many they are; the bit where its bitmap of
# nulls begins, or -1 where it has no nulls.
_FIRST, _START, _LENGTH, _NULLS = range(4)


class Cells(NamedTuple):
    """The chosen columns of one file, while it is open.

    Attributes:
        kind: names and layouts of the columns.
        map: of the file.
        views: all of the file, by the codes of the layouts, and "B".
        edges: int64[num_batches + 1], the number of the first row of each, then of all rows.
        places: int64[num_batches, num_columns, 4].
    """

    kind: CellGroupKind
    map: FileMap
    views: dict[str, memoryview]
    edges: Int64Array
    places: Int64Array


def find_cells(
    content: FileMap, schema: Any, columns: Sequence[str], batches: Sequence[Message]
) -> Cells | None:
    """Cells of an open file; None where pyarrow has to read it.

    Args:
        content: the file; little-endian, without dictionaries.
        schema: ``pyarrow.Schema`` of it.
        columns: the chosen ones.
        batches: messages of the record batches.
    """
    kinds = {column: stored_as(schema.field(column).type) for column in columns}
    buffers = [count_buffers(field.type) for field in schema]
    if not batches or sys.byteorder != "little" or any(batch.is_compressed for batch in batches):
        return None
    if None in buffers or any(kind not in _LAYOUTS for kind in kinds.values()):
        return None
    layouts = [_LAYOUTS[kind] for kind in kinds.values()]
    all_bytes = memoryview(content.content())
    tables = _Tables.of(all_bytes, batches, np.array(buffers, np.int64))
    if tables is None:
        return None
    places = [
        tables.places(schema.get_field_index(column), layout)
        for column, layout in zip(columns, layouts, strict=True)
    ]
    edges = np.concatenate(([0], np.cumsum(tables.num_rows)))
    found = [place for place in places if place is not None]
    if len(found) < len(places):
        return None
    views = {layout.code: _as(all_bytes, layout) for layout in layouts} | {"B": all_bytes}
    kind = CellGroupKind(tuple(columns), tuple(layouts))
    return Cells(kind, content, views, edges, np.stack(found, axis=1))


def _as(content: memoryview, layout: Layout) -> memoryview:
    if layout.code == "?":
        return content
    return content[: len(content) // 8 * 8].cast(layout.code)  # type: ignore[call-overload, no-any-return]


class _Tables(NamedTuple):
    """What the headers of all batches say.

    Attributes:
        firsts: int64[num_fields, 2], of each field of the schema its first node and buffer.
        num_rows: int64[num_batches].
        nodes: int64[num_batches, num_nodes, 2], number of values and of nulls.
        buffers: int64[num_batches, num_buffers, 2], start in the file and length.
    """

    firsts: Int64Array
    num_rows: Int64Array
    nodes: Int64Array
    buffers: Int64Array

    @classmethod
    def of(
        cls, content: memoryview, batches: Sequence[Message], numbers: Int64Array
    ) -> _Tables | None:
        """Read the headers; None if one is not as expected.

        Args:
            content: of the file.
            batches: of the file.
            numbers: int64[num_fields, 2], nodes and buffers that each field takes.
        """
        stops = numbers.cumsum(axis=0)
        tables = []
        for number, vector in ((stops[-1, 0], "nodes"), (stops[-1, 1], "buffers")):
            rows = [_pairs(content, getattr(batch, vector), batch, number) for batch in batches]
            found = [row for row in rows if row is not None]
            if len(found) < len(rows):
                return None
            tables.append(np.stack(found))
        nodes, buffers = tables
        bodies = np.array([[batch.body, batch.stop] for batch in batches], np.int64)
        space = (bodies[:, 1] - bodies[:, 0])[:, None]
        starts, lengths = buffers[:, :, 0], buffers[:, :, 1]
        if ((starts < 0) | (lengths < 0) | (starts > space) | (lengths > space - starts)).any():
            return None
        starts += bodies[:, :1]
        num_rows = np.array([batch.num_rows for batch in batches], np.int64)
        return cls(stops - numbers, num_rows, nodes, buffers)

    def places(self, field: int, layout: Layout) -> Int64Array | None:
        """int64[num_batches, 4] of a column; None if its buffers are too short or not aligned."""
        node, first = self.firsts[field].tolist()
        num_values, num_nulls = self.nodes[:, node].T
        nulls, values = self.buffers[:, first], self.buffers[:, first + 1]
        data = values if layout.item is None else self.buffers[:, first + 2]
        has_nulls = num_nulls != 0
        wanted = num_values if layout.item is None else num_values + 1
        is_fine = (num_values == self.num_rows) & (8 * values[:, 1] >= wanted * layout.num_bits)
        is_fine &= 8 * values[:, 0] % layout.num_bits == 0
        is_fine &= ~has_nulls | (8 * nulls[:, 1] >= num_values)
        if not (is_fine | (self.num_rows == 0)).all():
            return None
        bits = np.where(has_nulls, 8 * nulls[:, 0], -1)
        return np.stack((8 * values[:, 0] // layout.num_bits, *data.T, bits), axis=1)


def _pairs(content: memoryview, start: int, batch: Message, number: int) -> Int64Array | None:
    """int64[number, 2], a vector of structs in a header; None if it is not that long."""
    stop = start + 4 + 16 * number
    if not batch.start < start < stop <= batch.body:
        return None
    if struct.unpack_from("<I", content, start)[0] != number:
        return None
    return np.frombuffer(content, "<i8", 2 * number, start + 4).reshape(number, 2)


@dataclass(frozen=True, slots=True)
class CellGroupKind:
    """Columns of the same names, order and layouts, in maps; see `GroupKind`."""

    columns: tuple[str, ...]
    layouts: tuple[Layout, ...]

    def make(self, num_shards: int) -> CellGroup:
        """A new group."""
        return CellGroup(self, num_shards)


class CellsReader(Protocol):
    """What a group takes in."""

    @property
    def cells(self) -> Cells:
        """Its cells, of the group's kind."""
        ...


class CellGroup:
    """Rows of plain columns in maps; see `ShardGroup`."""

    def __init__(self, kind: CellGroupKind, num_shards: int) -> None:
        self._kind = kind
        self._cells: dict[int, Cells] = {}
        self._views: dict[str, dict[int, _Views]] = {layout.code: {} for layout in kind.layouts}
        self._watched = WatchedMaps()
        self._num_rows = np.zeros(num_shards, np.uint64)  # 0 where no shard is open
        self._firsts = np.zeros(num_shards, np.int64)  # row 0 of each among the rows of all
        self._batches: Int64Array | None = None  # the first row of each batch among them
        self._places: Int64Array = np.empty((0, len(kind.layouts), 4), np.int64)
        self._have_nulls: list[bool] = []

    def add(self, number: int, reader: CellsReader) -> None:
        """Take in a reader."""
        cells = self._cells[number] = reader.cells
        for code, views in self._views.items():
            views[number] = cells.views["B"], cells.views[code]
        self._watched.add(number, cells.map)
        self._num_rows[number] = cells.edges[-1]
        self._batches = None

    def remove(self, number: int) -> None:
        """Forget a reader that is about to be closed."""
        self._num_rows[number] = 0
        self._watched.remove(number)
        for views in self._views.values():
            del views[number]
        del self._cells[number]
        self._batches = None

    def read(self, numbers: Int64Array, samples: Int64Array) -> list[dict[str, Any]]:
        """Rows as dicts of plain Python values."""
        # as unsigned, a negative number is a huge one
        if np.count_nonzero(samples.view(np.uint64) >= self._num_rows[numbers]):
            raise IndexError("a record outside of its shard")
        self._watched.check()
        batches = self._arranged() if self._batches is None else self._batches
        rows = self._firsts[numbers] + samples
        batch = batches.searchsorted(rows, side="right") - 1
        rows -= batches[batch]  # rows of their batches from here on
        places = self._places[batch]
        places[:, :, _FIRST] += rows[:, None]
        shards = numbers.tolist()
        made: list[dict[str, Any]] = [{} for _ in shards]
        for column, (name, layout) in enumerate(
            zip(self._kind.columns, self._kind.layouts, strict=True)
        ):
            here = places[:, column]
            views = map(self._views[layout.code].__getitem__, shards)
            if layout.item is None:
                _put_values(made, name, views, here[:, _FIRST].tolist(), layout.code == "?")
            else:
                _put_slices(made, name, views, here, layout.item is str)
            if self._have_nulls[column]:
                self._put_nulls(made, name, shards, here[:, _NULLS], rows)
        return made

    def _put_nulls(
        self,
        made: list[dict[str, Any]],
        name: str,
        shards: list[int],
        bitmaps: Int64Array,
        rows: Int64Array,
    ) -> None:
        nullable = np.flatnonzero(bitmaps >= 0)
        bits = (bitmaps + rows)[nullable].tolist()
        for i, bit in zip(nullable.tolist(), bits, strict=True):
            if not _bit(self._cells[shards[i]].views["B"], bit):
                made[i][name] = None

    def _arranged(self) -> Int64Array:
        """Number the rows of all shards through."""
        edges, places, first = [], [], 0
        for number, cells in self._cells.items():
            self._firsts[number] = first
            edges.append(cells.edges[:-1] + first)
            places.append(cells.places)
            first += int(cells.edges[-1])
        self._batches = np.concatenate(edges)
        self._places = np.concatenate(places)
        self._have_nulls = [bool((bits >= 0).any()) for bits in self._places[:, :, _NULLS].T]
        return self._batches


def _put_slices(
    made: list[dict[str, Any]],
    name: str,
    views: Iterable[_Views],
    places: Int64Array,
    is_text: bool,
) -> None:
    """Set the cells of a column of text or bytes."""
    firsts, begins, lengths, _ = places.T.tolist()
    for row, (content, offsets), first, begin, length in zip(
        made, views, firsts, begins, lengths, strict=True
    ):
        start, stop = offsets[first], offsets[first + 1]
        if not 0 <= start <= stop <= length:
            raise ValueError("an offset leads out of its batch")
        part = content[begin + start : begin + stop]
        row[name] = str(part, "utf-8") if is_text else bytes(part)


def _put_values(
    made: list[dict[str, Any]],
    name: str,
    views: Iterable[_Views],
    firsts: list[int],
    is_bits: bool,
) -> None:
    """Set the cells of a column of numbers."""
    for row, (content, values), first in zip(made, views, firsts, strict=True):
        row[name] = _bit(content, first) if is_bits else values[first]


def _bit(content: memoryview, place: int) -> bool:
    return bool(content[place >> 3] >> (place & 7) & 1)
