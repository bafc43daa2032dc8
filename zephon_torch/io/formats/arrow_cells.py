"""Where the cells of plain Arrow columns stand in a mapped file, told from the headers of batches.

Columns of text, bytes, whole numbers, floats and booleans are plain, in files without compression
and dictionaries. That buffers lie in their batches and are long enough is checked here, once; what
they hold is not touched. Source: "Serialization and Interprocess Communication" of the Arrow
columnar format (``RecordBatch`` of ``Message.fbs``).
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zephon_torch.io.formats.arrow_messages import Message
from zephon_torch.io.formats.arrow_types import count_buffers, stored_as
from zephon_torch.io.formats.libarrow import pa
from zephon_torch.io.ranges import FileMap

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

# What is known of a column in a batch, as int64: where in the file its values or offsets begin, in
# units of one of them; where its bytes begin and how many they are; the bit where its bitmap of
# nulls begins, or -1 where it has no nulls.
FIRST, START, LENGTH, NULLS = range(4)


class Cells(NamedTuple):
    """The chosen columns of one file, while it is open.

    Attributes:
        columns: names.
        layouts: one for each column.
        map: of the file.
        views: all of the file, by the codes of the layouts, and "B".
        edges: int64[num_batches + 1], the number of the first row of each, then of all rows.
        places: int64[num_columns, 4, num_batches].
    """

    columns: tuple[str, ...]
    layouts: tuple[Layout, ...]
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
    places_of_all = np.stack(found)
    return Cells(tuple(columns), tuple(layouts), content, views, edges, places_of_all)


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
        """int64[4, num_batches] of a column; None if its buffers are too short or not aligned."""
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
        return np.stack((8 * values[:, 0] // layout.num_bits, *data.T, bits))


def _pairs(content: memoryview, start: int, batch: Message, number: int) -> Int64Array | None:
    """int64[number, 2], a vector of structs in a header; None if it is not that long."""
    stop = start + 4 + 16 * number
    if not batch.start < start < stop <= batch.body:
        return None
    if struct.unpack_from("<I", content, start)[0] != number:
        return None
    return np.frombuffer(content, "<i8", 2 * number, start + 4).reshape(number, 2)
