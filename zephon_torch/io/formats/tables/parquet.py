"""Parquet: counts from the footers, rows from row groups that are decoded as a whole or in slices.

pyarrow decodes, from bytes that our storage reads: the footer, then of each row group the chunks of
the chosen columns. Decoding begins at the start of a row group, whichever of its rows is wanted. A
small one is decoded as a whole; a large one in slices, from one to the next as long as reading goes
forward, so that memory does not grow with row groups. What was used lately is kept (``table.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any
from urllib.parse import unquote

import numpy as np

from zephon_torch.errors import DatasetError, RecordError
from zephon_torch.io.formats.tables.arrow_types import has_values, stored
from zephon_torch.io.formats.tables.file_object import RangesFile
from zephon_torch.io.formats.tables.libarrow import pa, types
from zephon_torch.io.formats.tables.table import (
    TableOptions,
    choose_columns,
    count_alike,
    edges_of,
    refusing,
)
from zephon_torch.io.formats.tables.table_cache import keep, kept, numbers
from zephon_torch.io.formats.tables.table_rows import Group, Int64Array, TableReader
from zephon_torch.io.storage.files import StoredFile
from zephon_torch.io.storage.ranges import open_ranges
from zephon_torch.io.storage.reader import Reader
from zephon_torch.support.extras import require

parquet: Any = require("pyarrow.parquet", "parquet", "reading Parquet files")

# What is decoded at once of a larger row group: few enough bytes in the file, and few enough rows,
# since values that repeat take more memory than they take in the file.
_SLICE_BYTES = 16 << 20
_SLICE_ROWS = 64 << 10
_MAX_SLICES = 1 << 16  # of one row group, whatever a corrupt footer claims
_FOOTER_BYTES = 64 << 10  # requested at once
_FOOTER_FACTOR = 4  # measured: 2 kB of memory for a column chunk of a row group

_NULL = "__HIVE_DEFAULT_PARTITION__"  # how a folder tells that there is no value

Options = TableOptions


def count_all(
    files: Sequence[StoredFile], options: TableOptions, advance: Callable[[int], object]
) -> list[int]:
    """Count the rows of each file by its footer."""
    return count_alike(files, options, advance, _inspect)


def open_reader(file: StoredFile, options: TableOptions, dataset: str, num_samples: int) -> Reader:
    """Open a file that must be as it was when counted."""
    shard = f"dataset {dataset!r}, file {file.url!r}"
    return TableReader(_Slices(file, options), shard, num_samples)


def _inspect(file: StoredFile, options: TableOptions) -> tuple[int, dict[str, Any]]:
    with closing(_Slices(file, options)) as slices:
        return int(slices.edges[-1]), slices.columns


class _Slices:
    """The row groups of one open file, large ones cut into slices of rows."""

    def __init__(self, file: StoredFile, options: TableOptions) -> None:
        self._name = repr(file.url)
        if not file.num_bytes:
            raise DatasetError(f"{self._name} is empty: restore it or move it out of the dataset")
        self._partition = _partition(file.path)
        self._ranges = open_ranges(file)
        self._source = RangesFile(self._ranges, file.num_bytes)
        self._forward: _Forward | None = None
        self._number = next(numbers)
        # Joins requests; by threads of pyarrow's, which reading from a map does without.
        self._pre_buffer = file.local_path is None
        try:
            self._choose(options)
            self._cut()
        except BaseException:
            self.close()
            raise

    def load(self, group: int, record: str) -> Group:
        """Decode one slice."""
        row_group, start = int(self._group_of[group]), int(self._start_of[group])
        stop = start + int(self.edges[group + 1] - self.edges[group])
        forward, self._forward = self._forward, None
        with refusing(f"{record}: row group {row_group}", RecordError, self._source):
            if forward is None or forward.row_group != row_group or forward.position > start:
                forward = self._begin(row_group)
            table = forward.read(start, stop)
            for column, value in self._partition.items():
                values = pa.repeat(pa.scalar(value, pa.string()), len(table))
                table = table.append_column(column, values)
            (batch,) = table.select(list(self.columns)).combine_chunks().to_batches()
            columns = [column.view(stored(column.type)) for column in batch.columns]
        if stop < self._num_rows[row_group]:
            self._forward = forward
        are_plain = [types.is_primitive(column.type) for column in columns]
        return Group(columns, are_plain, batch.nbytes)

    @property
    def map(self) -> None:
        """None: rows that lie apart need others to be decoded."""

    def check(self) -> None:
        """Refuse when closed."""
        self._ranges.check()

    def close(self) -> None:
        """Let go of the file."""
        self._forward = None
        kept.drop(self._number)
        self._ranges.close()

    def _file(self) -> Any:
        """The file with its footer, which is read anew if it was not used lately."""
        key = (self._number, 0)
        if (file := kept.get(key)) is None:
            file = self._open()
            keep(key, file, _FOOTER_FACTOR * file.metadata.serialized_size)
        return file

    def _open(self) -> Any:
        source = self._source
        source.hold(max(0, source.num_bytes - _FOOTER_BYTES), source.num_bytes)
        with refusing(f"{self._name} is no Parquet file or is corrupt: it", DatasetError, source):
            file = parquet.ParquetFile(
                pa.PythonFile(source, "r"),
                pre_buffer=self._pre_buffer,
                page_checksum_verification=True,
            )
        source.close()
        return file

    def _choose(self, options: TableOptions) -> None:
        """Choose columns."""
        file = self._file()
        with refusing(f"the schema of {self._name}", DatasetError):
            there = [field for field in file.schema_arrow if has_values(field.type)]
            schema = pa.schema(there)  # pyarrow, too, leaves out structs without fields
            for name in self._partition:
                schema = schema.append(pa.field(name, pa.string()))
            self.columns = choose_columns(schema, options.columns, self._name)
        self._stored = [name for name in self.columns if name not in self._partition]

    def _cut(self) -> None:
        """Cut the row groups into slices."""
        metadata = self._file().metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        self._num_rows = [int(group.num_rows) for group in groups]
        num_rows = sum(self._num_rows)
        before = edges_of(self._num_rows, self._name)
        if num_rows != metadata.num_rows:
            raise DatasetError(
                f"{self._name} is corrupt: {metadata.num_rows:,} rows in its footer, {num_rows:,} "
                "in its row groups; restore it or move it out of the dataset"
            )
        self._steps = [_step(int(group.num_rows), int(group.total_byte_size)) for group in groups]
        starts = [
            np.arange(0, rows, step, dtype=np.int64)
            for rows, step in zip(self._num_rows, self._steps, strict=True)
        ]
        self._start_of = np.concatenate([np.empty(0, np.int64), *starts])
        self._group_of = np.repeat(np.arange(len(groups)), [len(part) for part in starts])
        self.edges: Int64Array = np.append(before[self._group_of] + self._start_of, before[-1])

    def _begin(self, number: int) -> _Forward:
        """Stand before the first row of a row group."""
        batches = self._file().iter_batches(
            self._steps[number], [number], self._stored, use_threads=False
        )
        return _Forward(number, batches)


class _Forward:
    """Rows of one row group, decoded from its first row on."""

    def __init__(self, row_group: int, batches: Iterator[Any]) -> None:
        self.row_group = row_group
        self.position = 0
        self._batches = batches
        self._left: Any = None

    def read(self, start: int, stop: int) -> Any:
        """Table of the rows [start, stop), none of which was read before."""
        parts = []
        while self.position < stop:
            if not self._left:
                self._left = next(self._batches, None)
                if self._left is None:
                    raise ValueError(f"it ends after {self.position:,} rows")
            used = self._left.slice(0, stop - self.position)
            parts.append(used.slice(max(0, start - self.position)))
            self.position += len(used)
            self._left = self._left.slice(len(used))
        return pa.Table.from_batches(parts)


def _step(num_rows: int, num_bytes: int) -> int:
    """Rows of a slice of a row group, at least 1. Pure."""
    wanted = max(num_bytes // _SLICE_BYTES, num_rows // _SLICE_ROWS)
    num_slices = min(max(wanted, 0), _MAX_SLICES) + 1
    return max(1, -(-num_rows // num_slices))


def _partition(path: str) -> dict[str, str | None]:
    """Columns that the folders of a file tell, as in ``date=2024-01-01/lang=de/part-0.parquet``."""
    pairs = [part.split("=", 1) for part in path.split("/")[:-1] if "=" in part]
    return {unquote(key): None if value == _NULL else unquote(value) for key, value in pairs if key}
