"""The record batches of one open Arrow file: found by ``arrow_places.py``, read by pyarrow.

Of a file pyarrow reads any batch, of a stream the next one: there its source is moved to the batch
that is wanted or, where there are dictionaries, is given all that the batch needs, in order.
Each batch that is loaded is validated before a value of it is touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from zephon_torch.errors import DatasetError, RecordError
from zephon_torch.io.formats.tables.arrow_input import TAIL, Input
from zephon_torch.io.formats.tables.arrow_places import (
    MAGIC,
    Dictionary,
    Places,
    find_blocks,
    find_in_file,
    find_in_stream,
)
from zephon_torch.io.formats.tables.arrow_types import bare, has_dictionary, stored
from zephon_torch.io.formats.tables.libarrow import ipc, pa, types
from zephon_torch.io.formats.tables.table import TableOptions, choose_columns, refusing
from zephon_torch.io.formats.tables.table_rows import Group, Int64Array
from zephon_torch.io.storage.files import StoredFile
from zephon_torch.io.storage.ranges import FileMap

_VIEW_BYTES = 1 << 10  # memory that a view of one column takes, roughly

# Threads of pyarrow's own would not be there after a fork.
_OPTIONS = ipc.IpcReadOptions(use_threads=False)


class Batches:
    """The record batches of one file; see `Groups`.

    Attributes:
        columns: types of the chosen columns by name.
        edges: int64[num_batches + 1], number of the first row of each, then of all rows.
        map: of a local file.

    Raises:
        DatasetError: It is no Arrow IPC stream or file, is not whole, or is not supported.
    """

    def __init__(self, file: StoredFile, options: TableOptions) -> None:
        self._name = repr(file.url)
        if not file.num_bytes:
            raise DatasetError(f"{self._name} is empty: restore it or move it out of the dataset")
        self._input = Input(file)
        self._opened: _Opened | None = None
        try:
            self._opened = _open(self._input, self._name)
            self._choose(options)
        except BaseException:
            self.close()
            raise

    @property
    def map(self) -> FileMap | None:
        """The map of a local file."""
        return self._input.map

    def load(self, group: int, record: str) -> Group:
        """Take one batch from the map, or read it."""
        assert self._opened is not None
        allocated = pa.total_allocated_bytes()
        try:
            with refusing(f"{record}: batch {group}", RecordError, self._input.ranges_file):
                batch, num_bytes = self._opened.load(group)
                batch.validate()
                columns = [batch.column(number) for number in self._numbers]
                for number, kind in self._stored:
                    columns[number] = columns[number].view(kind)
        finally:
            self._input.release()
        if pa.total_allocated_bytes() != allocated:
            num_bytes += sum(map(self._input.count_outside, columns))
        unsound = None if self._is_sound(columns) else self._bare
        return Group(columns, self._are_plain, num_bytes + _VIEW_BYTES * len(columns), unsound)

    def check_claims(self) -> None:
        """Look at batches that claim more rows than their bytes could tell of.

        Raises:
            DatasetError: They do not hold them.
        """
        assert self._opened is not None
        for group in self._opened.places.doubtful():
            try:
                self.load(group, self._name)
            except RecordError as error:
                num_rows = int(self.edges[group + 1] - self.edges[group])
                raise DatasetError(
                    f"{self._name} is corrupt: batch {group} claims {num_rows:,} rows; {error}"
                ) from error

    def check(self) -> None:
        """Compare the size of a mapped file."""
        self._input.check()

    def close(self) -> None:
        """Let go of the file."""
        self._opened = None
        self._input.close()

    def _choose(self, options: TableOptions) -> None:
        """Choose columns, and what each is read and validated as."""
        assert self._opened is not None
        self.edges: Int64Array = self._opened.places.edges
        schema = self._opened.schema
        with refusing(f"the schema of {self._name}", DatasetError):
            self.columns: dict[str, Any] = choose_columns(schema, options.columns, self._name)
            self._numbers = [schema.get_field_index(column) for column in self.columns]
            kinds = [stored(kind) for kind in self.columns.values()]
            self._stored = [
                (number, kind)
                for number, (kind, given) in enumerate(
                    zip(kinds, self.columns.values(), strict=True)
                )
                if kind != given
            ]
            self._bare = [bare(kind) for kind in kinds]
            self._are_plain = [types.is_primitive(kind) for kind in kinds]

    def _is_sound(self, columns: list[Any]) -> bool:
        """Whether no offset leads out of its buffer; no value is touched for it."""
        try:
            for column, kind in zip(columns, self._bare, strict=True):
                column.view(kind).validate(full=True)
        except pa.ArrowException:
            return False
        return True


class _Opened(Protocol):
    """A file or stream that pyarrow has open."""

    schema: Any
    places: Places

    def load(self, batch: int) -> tuple[Any, int]:
        """A record batch, and the number of bytes that were requested or copied for it."""
        ...


def _open(source: Input, name: str) -> _Opened:
    head = bytes(source.read(0, min(8, source.num_bytes)))
    if head.startswith(b"FEA1"):
        raise DatasetError(
            f"{name} is old: it is Feather of version 1; read it and write it anew with pyarrow"
        )
    return _File(source, name) if head.startswith(MAGIC) else _Stream(source, name)


class _File:
    """A file, which has a footer."""

    def __init__(self, source: Input, name: str) -> None:
        self._input = source
        what = f"{name} is cut short, corrupt or no Arrow file: it"
        with refusing(what, DatasetError, source.ranges_file):
            footer = source.read_footer()
            self._reader = ipc.open_file(source.open(), options=_OPTIONS)
            self.schema = self._reader.schema
        source.release()
        blocks = find_blocks(footer, source.num_bytes - len(footer) - TAIL.size)
        self.places = find_in_file(source.headers(name, blocks.starts), blocks)

    def load(self, batch: int) -> tuple[Any, int]:
        """Read a batch by its number."""
        start, stop = int(self.places.starts[batch]), int(self.places.stops[batch])
        num_bytes = self._input.hold(start, stop)
        return self._reader.get_batch(batch), num_bytes


class _Stream:
    """A stream."""

    def __init__(self, source: Input, name: str) -> None:
        self._input = source
        self.places = find_in_stream(source.headers_of_stream(name))
        with refusing(f"the schema of {name}", DatasetError, source.ranges_file):
            self._renew()
            self._has_dictionaries = any(has_dictionary(field.type) for field in self.schema)

    def load(self, batch: int) -> tuple[Any, int]:
        """Read a batch by where it lies."""
        start, stop = int(self.places.starts[batch]), int(self.places.stops[batch])
        if self._has_dictionaries:
            ranges = [(0, self.places.schema_stop)]
            ranges += [(d.start, d.stop) for d in _needed(self.places.dictionaries, start)]
            content = b"".join(self._input.read_all([*ranges, (start, stop)]))
            return ipc.open_stream(content, options=_OPTIONS).read_next_batch(), len(content)
        num_bytes = self._input.hold(start, stop)
        try:
            self._source.seek(start)
            return self._reader.read_next_batch(), num_bytes
        except BaseException:
            self._renew()  # it may have stopped in the middle of a message
            raise

    def _renew(self) -> None:
        self._input.hold(0, self.places.schema_stop)
        self._source = self._input.open()
        self._reader = ipc.open_stream(self._source, options=_OPTIONS)
        self.schema = self._reader.schema


def _needed(dictionaries: Sequence[Dictionary], start: int) -> list[Dictionary]:
    """The dictionaries that hold for a batch at a position, in the order of the stream. Pure."""
    needed: dict[int, list[Dictionary]] = {}
    for dictionary in dictionaries:
        if dictionary.start < start:
            if not dictionary.is_delta:
                needed[dictionary.number] = []
            needed.setdefault(dictionary.number, []).append(dictionary)
    return sorted(found for messages in needed.values() for found in messages)
