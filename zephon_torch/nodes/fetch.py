"""Reads the samples that pointers point to.

Pointers are grouped by shard, each group is read at once, and the samples come back in the order of
the pointers. Readers are opened by the process and thread that uses them: nothing open crosses a
fork, and two threads never share a handle. A reader of a copy holds its place in the cache, so it
is closed as soon as some batches came without it.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import numpy as np

from zephon_torch.arithmetic.permutation import Int64Array
from zephon_torch.errors import RecordError, WorkerError
from zephon_torch.io.content import directly
from zephon_torch.io.copies import CopyReader, ShardCopies
from zephon_torch.io.dataset import Dataset, Reader, Samples, samples_of
from zephon_torch.io.files import StoredFile
from zephon_torch.work.plan import Pointers

_MAX_OPEN = 192  # readers kept open by all threads: each takes two to four descriptors
_MIN_OPEN = 8  # but by each thread
_MAX_IDLE_CALLS = 8  # through which a reader holds its copy unused


class Fetcher:
    """Samples by pointer.

    Args:
        datasets: what ``Pointers.dataset`` counts in.
        copies: of remote shards; None reads them where they are.
    """

    def __init__(self, datasets: Sequence[Dataset], copies: ShardCopies | None = None) -> None:
        self.datasets, self.copies = tuple(datasets), copies
        self._has_one_shard = [len(d.shard_num_samples) for d in self.datasets] == [1]
        self._parts = [number for number, d in enumerate(self.datasets) if d.is_part]
        self._open = _OpenReaders()

    def __getstate__(self) -> dict[str, Any]:
        return {"datasets": self.datasets, "copies": self.copies}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["datasets"], state["copies"])  # type: ignore[misc]

    def read(self, pointers: Pointers) -> Samples:
        """Samples in the order of the pointers: an array where all are rows of one kind.

        Raises:
            RecordError: a record that cannot be decoded. What an in-memory or torch dataset raises
                comes as it is, with a note that names the samples that were read.
        """
        shards, datasets = pointers.shard, pointers.dataset
        if not len(pointers):
            return []
        if self.copies is not None:
            self._open.close_idle()
        records = self._records(pointers)
        if self._has_one_shard or not len(_edges(datasets, shards)):
            return self._read_shard(int(datasets[0]), int(shards[0]), records)
        groups = list(_by_shard(datasets, shards))
        parts = [
            self._read_shard(int(datasets[g[0]]), int(shards[g[0]]), records[g]) for g in groups
        ]
        return _in_order(groups, parts, len(pointers))

    def name(self, dataset: int, shard: int, sample: int) -> str:
        """A sample in words, for messages."""
        return self._record_name(dataset, shard, self.datasets[dataset].record(shard, sample))

    def _record_name(self, dataset: int, shard: int, record: int) -> str:
        held = self.datasets[dataset]
        return f"dataset {held.name!r}, shard {held.shard_path(shard)}, record {record}"

    def close(self) -> None:
        """Close the readers of this thread."""
        self._open.close()

    def _records(self, pointers: Pointers) -> Int64Array:
        """Record numbers of samples: for parts of datasets, mapped for all shards at once."""
        records = pointers.sample
        for number in self._parts:
            here = np.flatnonzero(pointers.dataset == number)
            if len(here):
                records = records.copy() if records is pointers.sample else records
                records[here] = self.datasets[number].records(pointers.shard[here], records[here])
        return records

    def _read_shard(self, dataset: int, shard: int, records: Int64Array) -> Samples:
        reader: Reader | None = None
        try:
            reader = self._reader(dataset, shard)
            return reader.read(records)
        except RecordError:
            if not isinstance(reader, CopyReader):  # a file that changed is no bad record to skip
                self.datasets[dataset].check_unchanged(shard)
            raise
        except StopIteration as error:  # would end the epoch of whoever asks, without a word
            raise WorkerError(
                f"{self._record_name(dataset, shard, int(records[0]))}: reading raised "
                "StopIteration; a plain next() in the dataset ran dry, give next() a default"
            ) from error
        except Exception as error:
            held = self.datasets[dataset]
            error.add_note(f"while reading dataset {held.name!r}, shard {held.shard_path(shard)}")
            raise

    def _reader(self, dataset: int, shard: int) -> Reader:
        readers = self._open.of_this_process()
        key = (dataset, shard)
        reader = readers.get(key)
        if reader is None:
            through = directly if self.copies is None else self._open_copy
            reader = self.datasets[dataset].open_records(shard, through)
            readers[key] = reader
            while len(readers) > _MIN_OPEN and _num_open() > _MAX_OPEN:
                readers.popitem(last=False)[1].close()
        else:
            readers.move_to_end(key)
        if isinstance(reader, CopyReader):
            self._open.note_use(key)
        return reader

    def _open_copy(self, file: StoredFile, open_file: Callable[[StoredFile], Reader]) -> Reader:
        assert self.copies is not None
        return self.copies.open(file, open_file, self._open.make_way)


_Readers: TypeAlias = OrderedDict[tuple[int, int], Reader]
_of_all_threads: WeakValueDictionary[int, _Readers] = WeakValueDictionary()


def _num_open() -> int:
    """Readers that this process has open, in whatever thread and for whatever fetcher."""
    tables = [reference() for reference in _of_all_threads.valuerefs()]
    return sum(len(readers) for readers in tables if readers is not None)


def _new_readers() -> _Readers:
    readers: _Readers = OrderedDict()
    _of_all_threads[id(readers)] = readers
    return readers


class _OpenReaders(threading.local):
    """Readers of one thread, least recently used first. Empty again after a fork."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._readers = _new_readers()
        self._calls = 0
        self._used: OrderedDict[tuple[int, int], int] = OrderedDict()  # readers of copies

    def of_this_process(self) -> _Readers:
        if self._pid != os.getpid():
            self._pid, self._readers, self._used = os.getpid(), _new_readers(), OrderedDict()
        return self._readers

    def note_use(self, key: tuple[int, int]) -> None:
        """A reader of a copy is used in this call."""
        self._used[key] = self._calls
        self._used.move_to_end(key)

    def close_idle(self) -> None:
        """Begin another call; close readers of copies that the last ones did not use."""
        self.of_this_process()
        self._calls += 1
        while self._close_unused(_MAX_IDLE_CALLS):
            pass

    def make_way(self) -> bool:
        """Close a reader of a copy that neither this call nor the one before it used."""
        return self._close_unused(1)

    def _close_unused(self, num_calls: int) -> bool:
        if not self._used or self._calls - next(iter(self._used.values())) <= num_calls:
            return False
        key, _ = self._used.popitem(last=False)
        reader = self._readers.pop(key, None)
        if reader is not None:
            reader.close()
        return True

    def close(self) -> None:
        for reader in self.of_this_process().values():
            reader.close()
        self._readers.clear()
        self._used.clear()


def _in_order(groups: Sequence[Int64Array], parts: Sequence[Samples], length: int) -> Samples:
    """Samples of all groups, each at the place that its group's indices say."""
    rows = [part for part in parts if isinstance(part, np.ndarray)]
    if len(rows) == len(parts) and len({(part.dtype, part.shape[1:]) for part in rows}) == 1:
        together = np.empty((length, *rows[0].shape[1:]), rows[0].dtype)
        for group, part in zip(groups, rows, strict=True):
            together[group] = part
        return together
    samples: list[Any] = [None] * length
    for group, read in zip(groups, parts, strict=True):
        for place, sample in zip(group.tolist(), samples_of(read), strict=True):
            samples[place] = sample
    return samples


def _by_shard(datasets: Int64Array, shards: Int64Array) -> list[Int64Array]:
    """Indices of the pointers of each shard, in the order in which they came."""
    order = np.lexsort((shards, datasets))
    edges = _edges(datasets[order], shards[order]).tolist()
    return [order[start:stop] for start, stop in pairwise((0, *edges, len(order)))]


def _edges(datasets: Int64Array, shards: Int64Array) -> Int64Array:
    """Where a pointer is of another shard than the one before it."""
    differs = (datasets[1:] != datasets[:-1]) | (shards[1:] != shards[:-1])
    return np.flatnonzero(differs) + 1
