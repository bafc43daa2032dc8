"""Rows of equal length in mapped files: of one file, or of many in one gather.

All maps of a process lie in one address space, so a row is an address, and rows of any files are
items of one array that begins at the lowest map and ends with the highest: item k of it is the row
that begins k bytes up. One fancy index into that array replaces a loop over files. It never becomes
an array of its own: it overlaps itself and spans what lies between the maps, which must not be
touched.

A wrong address is a segmentation fault, so record numbers are compared with the number of rows in
each call, and shards that are not open have none. Nothing else in the package computes addresses;
readers of single files give the same rows, and are where errors come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import DatasetError
from zephon_torch.io.formats.rows.layout import RowLayout
from zephon_torch.io.storage.files import StoredFile
from zephon_torch.io.storage.ranges import FileMap, WatchedMaps

Array: TypeAlias = npt.NDArray[Any]
Int64Array: TypeAlias = npt.NDArray[np.int64]


class MappedRows:
    """Rows of one local file.

    Attributes:
        layout: Where they stand; in the file.
    """

    def __init__(self, file: StoredFile, path: str, layout: RowLayout) -> None:
        self._file, self.layout = file, layout
        self._map: FileMap | None = FileMap(file, path)
        # As bytes: numpy would copy all of an array whose values are not aligned.
        content = np.frombuffer(
            self._map.content(), np.uint8, layout.num_rows * layout.row_bytes, layout.start
        )
        self._rows: Array | None = content.reshape(layout.num_rows, layout.row_bytes)

    @property
    def content(self) -> FileMap:
        """The map."""
        return self._opened[0]

    @property
    def array(self) -> Array:
        """The rows as bytes, uint8[num_rows, row_bytes]; a view of the map."""
        return self._opened[1]

    @property
    def address(self) -> int:
        """Where row 0 stands in memory, while this is open."""
        return int(self.array.__array_interface__["data"][0])

    def take(self, samples: Int64Array) -> Array:
        """Rows by number, (n, row_length), which are there; they own their memory."""
        content, rows = self._opened
        content.content()  # checks it
        return rows.take(samples, 0).view(self.layout.dtype)

    def close(self) -> None:
        """Unmap the file."""
        self._rows = None  # a map that an array looks into cannot be closed
        if self._map is not None:
            self._map.close()
            self._map = None

    @property
    def _opened(self) -> tuple[FileMap, Array]:
        if self._map is None or self._rows is None:
            raise DatasetError(f"the reader of {self._file.url!r} is closed")
        return self._map, self._rows


@dataclass(frozen=True, slots=True)
class RowGroupKind:
    """Rows of one type and length in maps; see `GroupKind`.

    Attributes:
        dtype: Of the values, in the byte order of this machine.
        row_length: Values of a row.
    """

    dtype: np.dtype[Any]
    row_length: int

    def make(self, num_shards: int) -> RowGroup:
        """A new group."""
        return RowGroup(self, num_shards)


class PlacedRows:
    """Rows that are known to be there, and where, but not read yet."""

    __slots__ = ("_kind", "_places", "_space", "_watched")

    def __init__(
        self, space: Array, places: Int64Array, kind: RowGroupKind, watched: WatchedMaps
    ) -> None:
        self._space, self._places, self._kind, self._watched = space, places, kind, watched

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, where: slice) -> PlacedRows:
        return PlacedRows(self._space, self._places[where], self._kind, self._watched)

    def gather(self) -> Array:
        """The rows, (n, row_length), in memory of their own.

        Raises:
            DatasetError: a file was cut short or written over.
        """
        self._watched.check()
        rows = self._space[self._places].view(self._kind.dtype)
        return rows.reshape(len(self._places), self._kind.row_length)


class RowsReader(Protocol):
    """A reader that a group can take in."""

    @property
    def mapped(self) -> MappedRows:
        """Its rows, of the group's kind."""
        ...


class RowGroup:
    """Rows of one kind in maps; see `ShardGroup`."""

    def __init__(self, kind: RowGroupKind, num_shards: int) -> None:
        self._kind = kind
        self._row = np.dtype((np.void, kind.row_length * kind.dtype.itemsize))
        self._addresses = np.zeros(num_shards, np.int64)
        self._num_rows = np.zeros(num_shards, np.uint64)  # 0 where no shard is open
        self._open: dict[int, MappedRows] = {}
        self._watched = WatchedMaps()
        self._space: npt.NDArray[Any] | None = None
        self._offsets = self._addresses  # from where the space begins

    def add(self, number: int, reader: RowsReader) -> None:
        """Take in a reader."""
        rows = reader.mapped
        self._addresses[number] = rows.address
        self._watched.add(number, rows.content)
        self._num_rows[number] = rows.layout.num_rows
        self._open[number] = rows
        self._space = None

    def remove(self, number: int) -> None:
        """Forget a reader that is about to be closed."""
        self._num_rows[number] = 0
        self._watched.remove(number)
        del self._open[number]
        self._space = None

    def read(self, numbers: Int64Array, samples: Int64Array) -> Array:
        """Rows, (n, row_length), in memory of their own."""
        return self.place(numbers, samples).gather()

    def place(self, numbers: Int64Array, samples: Int64Array) -> PlacedRows:
        """The same rows, but not gathered yet; whatever is closed meanwhile, they can be."""
        # as unsigned, a negative number is a huge one
        if np.count_nonzero(samples.view(np.uint64) >= self._num_rows[numbers]):
            raise IndexError("a record outside of its shard")
        if self._space is None:
            self._space = self._span()
        places = samples * self._row.itemsize
        places += self._offsets[numbers]
        return PlacedRows(self._space, places, self._kind, self._watched)

    def _span(self) -> npt.NDArray[Any]:
        """The address space from the lowest row to the highest one, one row at each byte."""
        opened = self._open.values()
        lowest = min(rows.address for rows in opened)
        highest = max(
            rows.address + (rows.layout.num_rows - 1) * self._row.itemsize for rows in opened
        )
        self._offsets = self._addresses - lowest
        arrays = [rows.array for rows in opened]
        return np.asarray(_Bytes(lowest, highest - lowest + 1, self._row, arrays))


class _Bytes:
    """Memory as numpy's array interface, version 3, describes it: an item at each byte.

    Args:
        address: of the first byte.
        length: number of items.
        item: their type.
        arrays: what the memory belongs to. An array of this object keeps it, and with it the maps:
            they cannot be closed as long as an array looks into them.
    """

    def __init__(
        self, address: int, length: int, item: np.dtype[Any], arrays: Sequence[Array]
    ) -> None:
        self._arrays = arrays
        self.__array_interface__ = {
            "version": 3,
            "data": (address, True),  # read-only
            "shape": (length,),
            "strides": (1,),
            "typestr": item.str,
        }
