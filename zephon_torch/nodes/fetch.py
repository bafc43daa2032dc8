"""Reads the samples that pointers point to.

Where all records can be read in one call, whatever their shards (see `ShardGroup`), they are. Else
pointers are grouped by shard, each group is read at once, and the samples come back in the order of
the pointers. Reading shard by shard is also what says what is wrong when reading together fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from zephon_torch.arithmetic.permutation import Int64Array
from zephon_torch.errors import RecordError, StorageError, WorkerError
from zephon_torch.io.cache.copies import CopyReader, ShardCopies
from zephon_torch.io.datasets.content import directly
from zephon_torch.io.datasets.dataset import Dataset, Reader, Samples, samples_of
from zephon_torch.io.formats.rows.mapped import PlacedRows, RowGroup
from zephon_torch.io.storage.files import StoredFile
from zephon_torch.io.storage.reader import ShardGroup
from zephon_torch.nodes.open_readers import OpenReaders, ThreadReaders
from zephon_torch.work.plan.plan import Pointers

ROWS = {"tokens", "megatron"}  # formats whose samples are rows, or sequences, of numbers


class Fetcher:
    """Samples by pointer.

    Args:
        datasets: what ``Pointers.dataset`` counts in.
        copies: of remote shards; None reads them where they are.
    """

    def __init__(self, datasets: Sequence[Dataset], copies: ShardCopies | None = None) -> None:
        self.datasets, self.copies = tuple(datasets), copies
        self._shards = _Shards(self.datasets, self.copies)
        self._parts = [number for number, d in enumerate(self.datasets) if d.is_part]
        self._opened = ThreadReaders(self._shards.open_readers)

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
        if not len(pointers):
            return []
        opened = self._opened.get()
        opened.begin()
        records = self._records(pointers)
        numbers = self._shards.numbers(pointers)
        if opened.together is not None:
            return self._read_group(opened, opened.together, numbers, records)
        if self._shards.num_shards == 1:
            return self._read_shard(opened, 0, records)
        groups = opened.groups_of(numbers)
        if groups is None:
            return self._read_by_shard(opened, numbers, records)
        if not np.count_nonzero(groups != groups[0]):
            return self._read_group(opened, opened.group(int(groups[0])), numbers, records)
        places = list(_by_number(groups))
        parts = [
            self._read_group(
                opened, opened.group(int(groups[here[0]])), numbers[here], records[here]
            )
            for here in places
        ]
        return _in_order(places, parts, len(pointers))

    def place(self, pointers: Pointers) -> Samples | PlacedRows:
        """Like :meth:`read`, but rows of mapped files are only located; ``gather`` copies them."""
        group = self._opened.get().together
        if isinstance(group, RowGroup) and len(pointers):
            with suppress(IndexError):
                return group.place(self._shards.numbers(pointers), self._records(pointers))
        return self.read(pointers)

    def first_row(self) -> npt.NDArray[Any] | None:
        """One of the rows, where samples are rows of local files; None otherwise.

        Leaves nothing open: processes may be started next.
        """
        for dataset in self.datasets:
            for shard in np.flatnonzero(dataset.shard_num_samples)[:1].tolist():
                if dataset.format in ROWS and dataset.remote_file(shard) is None:
                    with suppress(Exception), closing(dataset.open(shard)) as reader:
                        read = reader.read(np.zeros(1, np.int64))
                        return read[0] if isinstance(read, np.ndarray) else None
        return None

    def name(self, dataset: int, shard: int, sample: int) -> str:
        """A sample in words, for messages."""
        return self._record_name(dataset, shard, self.datasets[dataset].record(shard, sample))

    def _record_name(self, dataset: int, shard: int, record: int) -> str:
        held = self.datasets[dataset]
        return f"dataset {held.name!r}, shard {held.shard_path(shard)}, record {record}"

    def close(self) -> None:
        """Close the readers of this thread."""
        self._opened.get().close()

    def _records(self, pointers: Pointers) -> Int64Array:
        """Record numbers of samples: for parts of datasets, mapped for all shards at once."""
        records = pointers.sample
        for number in self._parts:
            here = np.flatnonzero(pointers.dataset == number)
            if len(here):
                records = records.copy() if records is pointers.sample else records
                records[here] = self.datasets[number].records(pointers.shard[here], records[here])
        return records

    def _read_group(
        self,
        opened: OpenReaders,
        group: ShardGroup | None,
        numbers: Int64Array,
        records: Int64Array,
    ) -> Samples:
        if group is not None:
            try:
                return group.read(numbers, records)
            except StorageError:  # no shard's: it would only be met again, after all its tries
                raise
            except Exception:  # what is wrong, and where, is found out shard by shard
                pass
        return self._read_by_shard(opened, numbers, records)

    def _read_by_shard(
        self, opened: OpenReaders, numbers: Int64Array, records: Int64Array
    ) -> Samples:
        places = list(_by_number(numbers))
        parts = []
        for here in places:
            number = int(numbers[here[0]])
            parts.append(self._read_shard(opened, number, records[here]))
        return parts[0] if len(parts) == 1 else _in_order(places, parts, len(numbers))

    def _read_shard(self, opened: OpenReaders, number: int, records: Int64Array) -> Samples:
        reader: Reader | None = None
        try:
            reader = opened.get(number)
            return reader.read(records)
        except RecordError:
            if not isinstance(reader, CopyReader):  # a file that changed is no bad record to skip
                self._shards.check_unchanged(number)
            raise
        except StopIteration as error:  # would end the epoch of whoever asks, without a word
            name = self._record_name(*self._shards.of(number), int(records[0]))
            raise WorkerError(
                f"{name}: reading raised StopIteration; a plain next() in the dataset ran dry, "
                "give next() a default"
            ) from error
        except Exception as error:
            dataset, shard = self._shards.of(number)
            held = self.datasets[dataset]
            error.add_note(f"while reading dataset {held.name!r}, shard {held.shard_path(shard)}")
            raise


class _Shards:
    """The shards of all datasets, numbered through. Holds nothing open."""

    def __init__(self, datasets: Sequence[Dataset], copies: ShardCopies | None) -> None:
        self._datasets, self._copies = datasets, copies
        self._stops = np.cumsum([dataset.num_shards for dataset in datasets])
        self._firsts = self._stops - [dataset.num_shards for dataset in datasets]
        self.num_shards = int(self._stops[-1])

    def numbers(self, pointers: Pointers) -> Int64Array:
        """Number of the shard of each pointer."""
        if len(self._datasets) == 1:
            return pointers.shard
        numbers: Int64Array = self._firsts[pointers.dataset] + pointers.shard
        return numbers

    def of(self, number: int) -> tuple[int, int]:
        """Dataset of a shard, and its number in it."""
        dataset = int(np.searchsorted(self._stops, number, side="right"))
        return dataset, number - int(self._firsts[dataset])

    def check_unchanged(self, number: int) -> None:
        """Raise DatasetError if the file is not as it was."""
        dataset, shard = self.of(number)
        self._datasets[dataset].check_unchanged(shard)

    def open_readers(self) -> OpenReaders:
        """A table without any reader open."""
        return OpenReaders(self.num_shards, self._open)

    def _open(self, number: int, make_way: Callable[[], bool]) -> Reader:
        dataset, shard = self.of(number)
        if self._copies is None:
            return self._datasets[dataset].open_records(shard, directly)
        copies = self._copies

        def open_copy(file: StoredFile, open_file: Callable[[StoredFile], Reader]) -> Reader:
            return copies.open(file, open_file, make_way)

        return self._datasets[dataset].open_records(shard, open_copy)


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


def _by_number(numbers: npt.NDArray[Any]) -> Iterator[Int64Array]:
    """Places of each number, in the order in which they came."""
    order = np.argsort(numbers, kind="stable")
    edges = np.flatnonzero(np.diff(numbers[order])) + 1
    for start, stop in pairwise((0, *edges.tolist(), len(order))):
        yield order[start:stop]
