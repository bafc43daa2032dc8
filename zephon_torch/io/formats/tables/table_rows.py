"""Rows of tables: groups of rows that are decoded at once, and samples made of them.

A sample is a dict of plain Python values, as pyarrow's ``to_pylist`` makes them. Values are made by
column, of rows that follow one another at once. Rows are not gathered by ``take`` before: pyarrow
has it for fewer types, and rows that are far apart cost more by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import DatasetError, RecordError
from zephon_torch.io.formats.tables.table import refusing
from zephon_torch.io.formats.tables.table_cache import keep, kept, numbers
from zephon_torch.io.storage.ranges import FileMap, WatchedMaps
from zephon_torch.io.storage.reader import GroupKind, check_bounds

Int64Array = npt.NDArray[np.int64]


class Group(NamedTuple):
    """Rows that were decoded at once.

    Attributes:
        columns: a ``pyarrow.Array`` of all rows for each chosen column.
        are_plain: of each, whether its values are numbers, booleans or times.
        num_bytes: of memory that it keeps.
        unsound: None where no value leads out of its buffers; else for each column the type as
            which the rows of it are validated before they are touched.
    """

    columns: Sequence[Any]
    are_plain: Sequence[bool]
    num_bytes: int
    unsound: Sequence[Any] | None = None


class Groups(Protocol):
    """Rows of one open file, in groups that are decoded at once."""

    @property
    def columns(self) -> dict[str, Any]:
        """Types of the chosen columns by name."""
        ...

    @property
    def edges(self) -> Int64Array:
        """int64[num_groups + 1]: number of the first row of each group, then of all rows."""
        ...

    @property
    def map(self) -> FileMap | None:
        """Of the file, if it is mapped and its groups are cheap to load in any order."""
        ...

    def load(self, group: int, record: str) -> Group:
        """Decode a group.

        Raises RecordError, beginning with the `record` that is wanted of it, if it is corrupt.
        """
        ...

    def check(self) -> None:
        """Raise unless loaded groups may be touched: see `Ranges.check`."""
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...


# A group, and numbers of rows in it, ascending.
_Wanted: TypeAlias = tuple[Group, list[int]]


def make_rows(names: Sequence[str], wanted: Iterable[_Wanted]) -> list[dict[str, Any]]:
    """Samples of the wanted rows of each group, in that order.

    Raises:
        Exception: whatever pyarrow raises for values that cannot be read.
    """
    made: list[list[Any]] = [[] for _ in names]
    for group, rows in wanted:
        first, stop = rows[0], rows[-1] + 1
        if group.unsound is not None:
            _validate(group, rows)
        is_run = stop - first == len(rows) and rows == [*range(first, stop)]
        for cells, column, is_plain in zip(made, group.columns, group.are_plain, strict=True):
            if is_run and not (is_plain and len(rows) == 1):
                cells += column.slice(first, len(rows)).to_pylist()
            elif is_plain:
                cells += [column[row].as_py() for row in rows]
            else:
                for row in rows:
                    cells += column.slice(row, 1).to_pylist()
    samples: list[dict[str, Any]] = [{} for _ in made[0]]
    for name, column in zip(names, made, strict=True):
        for sample, cell in zip(samples, column, strict=True):
            sample[name] = cell
    return samples


def _validate(group: Group, rows: list[int]) -> None:
    for column, kind in zip(group.columns, group.unsound or (), strict=True):
        for row in rows:
            column.slice(row, 1).view(kind).validate(full=True)


class TableReader:
    """Random access to the rows of one file.

    Args:
        groups: of the open file; closed with the reader.
        shard: dataset and file in words.
        num_samples: number of records when the dataset was made.

    Attributes:
        group_kind: of mapped files, whose rows are read together with those of others.

    Raises:
        DatasetError: the file holds another number of rows.
    """

    def __init__(self, groups: Groups, shard: str, num_samples: int) -> None:
        self.groups = groups
        self.edges = groups.edges
        self.names = tuple(groups.columns)
        self.group_kind: GroupKind | None = None if groups.map is None else RowsKind(self.names)
        self._shard = shard
        self._number = next(numbers)
        if (now := int(self.edges[-1])) != num_samples:
            groups.close()
            raise DatasetError(
                f"{shard} holds {now:,} records, {num_samples:,} when the dataset was made; make "
                "the dataset anew"
            )

    def read(self, samples: Int64Array) -> list[dict[str, Any]]:
        """Rows by number, in the order of the file; see `Reader.read`."""
        samples = np.asarray(samples, dtype=np.int64)
        self.groups.check()
        check_bounds(samples, int(self.edges[-1]), self._shard)
        if not len(samples):
            return []
        order = np.argsort(samples, kind="stable")
        try:
            rows = self._read_sorted(samples[order])
        except RecordError:
            if len(samples) == 1:
                raise
            # The bad one among them names itself.
            rows = [row for i in order for row in self._read_sorted(samples[i : i + 1])]
        return _in_order(order, rows)

    def load(self, number: int, record: str = "") -> Group:
        """A group that was used lately, or decode it; see `Groups.load`."""
        key = (self._number, number)
        group: Group | None = kept.get(key)
        if group is None:
            group = self.groups.load(number, record)
            keep(key, group, group.num_bytes)
        return group

    def close(self) -> None:
        """Forget the groups and let go of the file."""
        kept.drop(self._number)
        self.groups.close()

    def _read_sorted(self, samples: Int64Array) -> list[dict[str, Any]]:
        record = f"{self._shard}, record {samples[0]}"
        groups = self.edges.searchsorted(samples, side="right") - 1
        numbers, inside = groups.tolist(), (samples - self.edges[groups]).tolist()
        rows: list[dict[str, Any]] = []
        for start, stop in _cut(groups):
            group = self.load(numbers[start], record)  # what storage raises comes as it is
            with refusing(record, RecordError):
                rows += make_rows(self.names, [(group, inside[start:stop])])
        return rows


@dataclass(frozen=True, slots=True)
class RowsKind:
    """Files with the same columns in the same order; see `GroupKind`."""

    names: tuple[str, ...]

    def make(self, num_shards: int) -> RowsGroup:
        """A new group."""
        return RowsGroup(self.names, num_shards)


class RowsGroup:
    """Rows of mapped files; see `ShardGroup`."""

    def __init__(self, names: tuple[str, ...], num_shards: int) -> None:
        self._names = names
        self._readers: dict[int, TableReader] = {}
        self._watched = WatchedMaps()
        self._num_rows = np.zeros(num_shards, np.uint64)  # 0 where no shard is open
        self._firsts = np.zeros(num_shards, np.int64)  # row 0 of each among the rows of all
        self._edges: Int64Array | None = None  # the first row of each batch among them
        self._shards: Int64Array = self._firsts  # the shard of each batch
        self._first_batches = np.zeros(num_shards, np.int64)  # of each shard among them

    def add(self, number: int, reader: TableReader) -> None:
        """Take in a reader."""
        if reader.groups.map is not None:
            self._watched.add(number, reader.groups.map)
        self._readers[number] = reader
        self._num_rows[number] = reader.edges[-1]
        self._edges = None

    def remove(self, number: int) -> None:
        """Forget a reader that is about to be closed."""
        self._num_rows[number] = 0
        self._watched.remove(number)
        del self._readers[number]
        self._edges = None

    def read(self, numbers: Int64Array, samples: Int64Array) -> list[dict[str, Any]]:
        """Rows as dicts of plain Python values."""
        # as unsigned, a negative number is a huge one
        if np.count_nonzero(samples.view(np.uint64) >= self._num_rows[numbers]):
            raise IndexError("a record outside of its shard")
        self._watched.check()
        if not len(samples):
            return []
        edges = self._arranged() if self._edges is None else self._edges
        rows = self._firsts[numbers] + samples
        order = rows.argsort(kind="stable")
        return _in_order(order, make_rows(self._names, self._wanted(edges, rows[order])))

    def _wanted(self, edges: Int64Array, rows: Int64Array) -> Iterator[_Wanted]:
        batches = edges.searchsorted(rows, side="right") - 1
        inside = (rows - edges[batches]).tolist()
        owners = self._shards[batches]
        numbers, owner = (batches - self._first_batches[owners]).tolist(), owners.tolist()
        for start, stop in _cut(batches):
            yield self._readers[owner[start]].load(numbers[start]), inside[start:stop]

    def _arranged(self) -> Int64Array:
        """Number the rows of all shards through."""
        edges, shards, first, first_batch = [], [], 0, 0
        for number, reader in self._readers.items():
            self._firsts[number], self._first_batches[number] = first, first_batch
            edges.append(reader.edges[:-1] + first)
            shards.append(np.full(len(edges[-1]), number))
            first += int(reader.edges[-1])
            first_batch += len(edges[-1])
        self._edges, self._shards = np.concatenate(edges), np.concatenate(shards)
        return self._edges


def _cut(groups: Int64Array) -> Iterator[tuple[int, int]]:
    """Where rows of one group start and stop among sorted ones. Pure."""
    cuts = (groups[1:] != groups[:-1]).nonzero()[0] + 1
    return pairwise((0, *cuts.tolist(), len(groups)))


def _in_order(order: Int64Array, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows at the places that they were asked for at, not sorted."""
    placed: list[Any] = [None] * len(rows)
    for place, row in zip(order.tolist(), rows, strict=True):
        placed[place] = row
    return placed
