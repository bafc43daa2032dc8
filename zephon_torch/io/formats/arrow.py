"""Arrow IPC: streams, files, and the folders that ``save_to_disk`` of HF datasets writes.

Batches are found by the headers of their messages (``arrow_messages.py``). A local file is mapped:
a row costs the pages that hold it. Plain columns are read by hand (``arrow_rows.py``), others are
views of batches. Where batches are compressed or have dictionaries, and over a network, the whole
batch is read for a row of it, and kept for a while. Columns of nested values are validated batch by
batch, others row by row: a wrong offset would lead out of the map.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import partial
from typing import Any

import numpy as np

from zephon_torch.errors import DatasetError, RecordError
from zephon_torch.io import index
from zephon_torch.io.files import FileInfo, Storage, StoredFile
from zephon_torch.io.formats.arrow_cells import Cells, find_cells
from zephon_torch.io.formats.arrow_messages import (
    BATCH,
    DICTIONARY,
    HEADER_BYTES,
    SCHEMA,
    Message,
    ReadView,
    find_messages,
)
from zephon_torch.io.formats.arrow_rows import CellGroup, CellGroupKind
from zephon_torch.io.formats.arrow_types import (
    has_dictionary,
    is_shallow,
    unsupported,
    without_extensions,
)
from zephon_torch.io.formats.libarrow import ipc, pa
from zephon_torch.io.formats.reader import Reader
from zephon_torch.io.formats.table import (
    Group,
    Int64Array,
    TableOptions,
    TableReader,
    choose_columns,
    count_alike,
    edges_of,
    refusing,
)
from zephon_torch.io.ranges import MappedFile, View, open_ranges, view

_STATE = "state.json"
_SPLITS = "dataset_dict.json"
_VIEW_BYTES = 1 << 10  # memory that a view of one column takes, roughly

Options = TableOptions


def count_all(
    files: Sequence[StoredFile], options: TableOptions, advance: Callable[[int], object]
) -> list[int]:
    """Count the rows of each file by the headers of its batches."""
    return count_alike(files, options, advance, _inspect)


def open_reader(file: StoredFile, options: TableOptions, dataset: str, num_samples: int) -> Reader:
    """Open a file that must be as it was when counted."""
    shard = f"dataset {dataset!r}, file {file.url!r}"
    batches = _Batches(file, options)
    reader = TableReader(batches, shard, num_samples)
    try:
        cells = batches.find_cells()
    except BaseException:
        reader.close()
        raise
    return reader if cells is None else _CellReader(cells, reader)


def choose(storage: Storage, listed: Sequence[FileInfo]) -> Sequence[FileInfo]:
    """The data files of a folder by ``save_to_disk``: caches may lie beside them."""
    there = {file.path: file for file in listed}
    if _SPLITS in there:
        splits = _state(storage, there[_SPLITS]).get("splits")
        raise DatasetError(
            f"{storage.url()!r} holds the splits {splits} of a DatasetDict: give the folder of one"
        )
    state = _state(storage, there[_STATE])
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DatasetError(
            f"{storage.url()!r} holds a selection of rows by an old version of datasets: load it, "
            "call flatten_indices() and save it anew"
        )
    names = _data_files(storage, state)
    for name in names:
        if name not in there:
            raise DatasetError(
                f"{storage.url(name)!r} is not there, but {_STATE} beside it names it: restore it"
            )
    return [there[name] for name in names]


def _state(storage: Storage, file: FileInfo) -> dict[str, Any]:
    try:
        state = json.loads(storage.read(file.path, 0, file.num_bytes))
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{storage.url(file.path)!r} is not valid JSON: {error}") from error
    return state if isinstance(state, dict) else {}


def _data_files(storage: Storage, state: dict[str, Any]) -> list[str]:
    try:
        return [str(entry["filename"]) for entry in state["_data_files"]]
    except (KeyError, TypeError):
        raise DatasetError(
            f"{storage.url(_STATE)!r} is not one of HF datasets, which lists _data_files: give a "
            "pattern such as *.arrow, or format= of the files"
        ) from None


def _inspect(file: StoredFile, options: TableOptions) -> tuple[int, dict[str, Any]]:
    with closing(_Batches(file, options)) as batches:
        return int(batches.edges[-1]), batches.columns


def _find_places(file: StoredFile, advance: index.Advance) -> index.Offsets:
    """Where each message starts, then the size of the file."""
    with closing(open_ranges(file)) as ranges:
        found = find_messages(partial(view, ranges), file.num_bytes, repr(file.url))
        starts = [message.start for message in found]
    return np.array([*starts, file.num_bytes], dtype=np.int64)


_INDEXER = index.Indexer("arrow", 1, _find_places)


class _CellReader:
    """Rows of one file by its cells, and as pyarrow has them where that fails, to say why."""

    def __init__(self, cells: Cells, reader: TableReader) -> None:
        self.cells, self._reader = cells, reader
        self.group_kind = CellGroupKind(cells.columns, cells.layouts)
        self._alone: CellGroup | None = self.group_kind.make(1)
        self._alone.add(0, self)

    def read(self, samples: Int64Array) -> list[dict[str, Any]]:
        """Rows by number; see `Reader.read`."""
        samples = np.asarray(samples, dtype=np.int64)
        if self._alone is not None and len(samples):
            self.cells.map.content()  # checks it
            with suppress(Exception):
                return self._alone.read(np.zeros(len(samples), np.int64), samples)
        return self._reader.read(samples)

    def close(self) -> None:
        """Let go of the file."""
        self._alone = None
        self.cells.views.clear()  # a map that views look into cannot be closed
        self._reader.close()


class _Batches:
    """The record batches of one open file."""

    def __init__(self, file: StoredFile, options: TableOptions) -> None:
        self._name = repr(file.url)
        self._is_mapped = file.local_path is not None
        if not file.num_bytes:
            raise DatasetError(f"{self._name} is empty: restore it or move it out of the dataset")
        self._ranges = open_ranges(file)
        self._view = partial(view, self._ranges)
        try:
            read = self._view if self._is_mapped else self._request_headers(file)
            self._open(list(find_messages(read, file.num_bytes, self._name)), options)
        except BaseException:
            self._ranges.close()
            raise

    def load(self, group: int, record: str) -> Group:
        """Take one batch from the map, or read it."""
        message = self._batches[group]
        before = self._needed(message) if self._has_dictionaries else []
        parts = [self._view(part.start, part.stop) for part in (*before, message)]
        is_view = self._is_mapped and not before and not message.is_compressed
        is_sound = not (is_view and self._is_shallow)
        with refusing(f"{record}: batch {group}", RecordError):
            if before:
                batch = ipc.open_stream(b"".join(parts)).read_next_batch()
            else:
                content = ipc.read_message(pa.py_buffer(parts[0]))
                batch = ipc.read_record_batch(content, self._schema)
            batch = without_extensions(batch.select(list(self.columns)))
            batch.validate(full=is_sound)
        num_bytes = _VIEW_BYTES * len(self.columns) if is_view else batch.nbytes
        return Group(batch, num_bytes, is_sound)

    def find_cells(self) -> Cells | None:
        """The cells of the file, where they can be read without pyarrow."""
        content = self._ranges.map if isinstance(self._ranges, MappedFile) else None
        if content is None or self._has_dictionaries or self._first.is_big_endian:
            return None
        return find_cells(content, self._schema, list(self.columns), self._batches)

    def check(self) -> None:
        """Compare the size of a mapped file."""
        self._ranges.check()

    def close(self) -> None:
        """Let go of the file."""
        self._ranges.close()

    def _open(self, messages: Sequence[Message], options: TableOptions) -> None:
        if not messages or messages[0].kind != SCHEMA:
            raise DatasetError(f"{self._name} has no schema: it is no Arrow IPC stream or file")
        self._first = messages[0]
        self._batches = [message for message in messages if message.kind == BATCH]
        self._dictionaries = [message for message in messages if message.kind == DICTIONARY]
        num_rows = [message.num_rows for message in self._batches]
        self.edges = edges_of(num_rows, self._name)
        with refusing(f"the schema of {self._name}", DatasetError):
            content = self._view(self._first.start, self._first.stop)
            self._schema = ipc.read_schema(pa.py_buffer(content))
            self.columns = choose_columns(self._schema, options.columns, self._name)
            self._has_dictionaries = any(has_dictionary(field.type) for field in self._schema)
            self._is_shallow = all(map(is_shallow, self.columns.values()))
        for column, kind in self.columns.items():
            if (found := unsupported(kind)) is not None:
                raise DatasetError(
                    f"column {column!r} of {self._name} holds {found} values, which are not "
                    "supported: choose others with columns=, or write it anew"
                )

    def _request_headers(self, file: StoredFile) -> ReadView:
        """Request the headers of all messages together, where an index says they are.

        The index saves one request after the other; what it says is not relied on.
        """
        known = index.stored_count(file, _INDEXER)
        if known is None:
            places = index.build(file, _INDEXER, lambda _: None)
        else:
            places = index.load(file, _INDEXER, known)
        starts = places[:-1]
        stops = np.minimum(starts + HEADER_BYTES, file.num_bytes)
        held = dict(zip(starts.tolist(), self._ranges.read(starts, stops), strict=True))

        def read(start: int, stop: int) -> View:
            head = held.get(start, b"")
            return head[: stop - start] if stop - start <= len(head) else self._view(start, stop)

        return read

    def _needed(self, batch: Message) -> list[Message]:
        """The schema, and the dictionaries that hold for a batch."""
        needed: dict[int, list[Message]] = {}
        for message in self._dictionaries:
            if message.start < batch.start:
                if not message.is_delta:
                    needed[message.dictionary] = []
                needed.setdefault(message.dictionary, []).append(message)
        found = (message for messages in needed.values() for message in messages)
        return [self._first, *sorted(found, key=lambda message: message.start)]
