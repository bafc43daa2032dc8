"""Rows of plain Arrow columns in maps, without pyarrow: of one file, or of many in one call.

A cell is two offsets and a slice, or one number. Values are those of ``to_pylist``. Offsets come
from files, so they are checked for every cell; what does not fit raises, and pyarrow then says what
is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from zephon_torch.io.formats.arrow_cells import FIRST, NULLS, Cells, Layout
from zephon_torch.io.ranges import WatchedMaps

Int64Array = npt.NDArray[np.int64]
_Views: TypeAlias = tuple[memoryview, memoryview]  # of bytes, and of values or offsets


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
        self._places: Int64Array = np.empty((len(kind.layouts), 4, 0), np.int64)
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
        places = self._places.take(batch, 2)
        places[:, FIRST] += rows
        shards = numbers.tolist()
        made: list[dict[str, Any]] = [{} for _ in shards]
        for column, (name, layout, here) in enumerate(
            zip(self._kind.columns, self._kind.layouts, places, strict=True)
        ):
            firsts, begins, lengths, _ = here.tolist()
            views = map(self._views[layout.code].__getitem__, shards)
            if layout.item is not None:
                _put_slices(made, name, views, firsts, begins, lengths, layout.item is str)
            elif layout.code == "?":
                _put_bits(made, name, views, firsts)
            else:
                _put_values(made, name, views, firsts)
            if self._have_nulls[column]:
                self._put_nulls(made, name, shards, here[NULLS], rows)
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
        self._places = np.concatenate(places, axis=2)
        self._have_nulls = [bool((bits >= 0).any()) for bits in self._places[:, NULLS]]
        return self._batches


def _put_slices(
    made: list[dict[str, Any]],
    name: str,
    views: Iterable[_Views],
    firsts: list[int],
    begins: list[int],
    lengths: list[int],
    is_text: bool,
) -> None:
    """Set the cells of a column of text or bytes."""
    for row, (content, offsets), first, begin, length in zip(
        made, views, firsts, begins, lengths, strict=True
    ):
        start, stop = offsets[first], offsets[first + 1]
        if not 0 <= start <= stop <= length:
            raise ValueError("an offset leads out of its batch")
        part = content[begin + start : begin + stop]
        row[name] = str(part, "utf-8") if is_text else bytes(part)


def _put_values(
    made: list[dict[str, Any]], name: str, views: Iterable[_Views], firsts: list[int]
) -> None:
    """Set the cells of a column of numbers."""
    for row, (_, values), first in zip(made, views, firsts, strict=True):
        row[name] = values[first]


def _put_bits(
    made: list[dict[str, Any]], name: str, views: Iterable[_Views], firsts: list[int]
) -> None:
    """Set the cells of a column of booleans."""
    for row, (content, _), first in zip(made, views, firsts, strict=True):
        row[name] = _bit(content, first)


def _bit(content: memoryview, place: int) -> bool:
    return bool(content[place >> 3] >> (place & 7) & 1)
