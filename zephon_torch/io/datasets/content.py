"""Where the samples of a dataset are: the part that differs between files and objects in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from zephon_torch.arithmetic.permutation import Int64Array
from zephon_torch.io.datasets.shards import ShardTable
from zephon_torch.io.formats import FormatOptions, load_format
from zephon_torch.io.formats.memory import MemoryReader
from zephon_torch.io.storage.files import FileInfo, Storage, StoredFile
from zephon_torch.io.storage.reader import Reader

# Opens a remote file, given what opens any file of its format.
Through: TypeAlias = Callable[[StoredFile, Callable[[StoredFile], Reader]], Reader]


def directly(file: StoredFile, open_file: Callable[[StoredFile], Reader]) -> Reader:
    """Open a remote file where it is."""
    return open_file(file)


class Content(Protocol):
    """The content of a dataset; holds nothing open."""

    @property
    def version(self) -> str | None:
        """Extra text for the fingerprint: options or the user's version; None if there is none."""
        ...

    def place(self, dataset: str, path: str, shard: int) -> str:
        """Name a shard for messages, given its relative path and number."""
        ...

    def records(self, shards: ShardTable, numbers: Int64Array, samples: Int64Array) -> Int64Array:
        """Numbers of samples among all records of their shards; see `Dataset.records`."""
        ...

    def remote_file(self, shards: ShardTable, shard: int) -> StoredFile | None:
        """Return a shard that is a file of another machine, None where it is not."""
        ...

    def check_unchanged(self, shards: ShardTable, shard: int) -> None:
        """Raise DatasetError if the file of a shard is gone or changed."""
        ...

    def open(self, dataset: str, shards: ShardTable, shard: int, through: Through) -> Reader:
        """Open a shard, to be read by record; `dataset` is the name for messages."""
        ...


@dataclass(frozen=True, slots=True)
class FileContent:
    """Files of one format below one root, with the stamps they had when listed.

    Attributes:
        stamps: int64[num_shards].
        beside: for each shard the file that says what is in it; empty for most formats.
    """

    storage: Storage
    format: str
    options: FormatOptions
    stamps: npt.NDArray[np.int64]
    beside: Sequence[FileInfo] = ()

    @property
    def version(self) -> str | None:
        """Options that decide which samples stand where, as text for the fingerprint."""
        return self.options.identity

    def place(self, dataset: str, path: str, shard: int) -> str:
        """Return path or URL, without credentials."""
        return self.storage.url(path)

    def records(self, shards: ShardTable, numbers: Int64Array, samples: Int64Array) -> Int64Array:
        """Return the samples' own numbers."""
        return samples

    def remote_file(self, shards: ShardTable, shard: int) -> StoredFile | None:
        """Return the file if its storage is remote."""
        file = self._file(shards, shard)
        return file if file.local_path is None else None

    def check_unchanged(self, shards: ShardTable, shard: int) -> None:
        """Look at the file."""
        self._file(shards, shard).check_unchanged()

    def open(self, dataset: str, shards: ShardTable, shard: int, through: Through) -> Reader:
        """Open a file through its format."""
        module, num_samples = load_format(self.format), int(shards.num_samples[shard])

        def open_file(file: StoredFile) -> Reader:
            return module.open_reader(file, self.options, dataset, num_samples)

        file = self._file(shards, shard)
        return open_file(file) if file.local_path is not None else through(file, open_file)

    def _file(self, shards: ShardTable, shard: int) -> StoredFile:
        num_bytes, stamp = int(shards.num_bytes[shard]), int(self.stamps[shard])
        beside = StoredFile(self.storage, *self.beside[shard]) if self.beside else None
        return StoredFile(self.storage, shards.path(shard), num_bytes, stamp, beside)


@dataclass(frozen=True, slots=True)
class ObjectContent:
    """A map-style object whose items are cut into shards."""

    samples: Any
    version: str | None

    def place(self, dataset: str, path: str, shard: int) -> str:
        """Return ``name[shard]``."""
        return f"{dataset}[{shard}]"

    def records(self, shards: ShardTable, numbers: Int64Array, samples: Int64Array) -> Int64Array:
        """Return the samples' own numbers."""
        return samples

    def remote_file(self, shards: ShardTable, shard: int) -> None:
        """Return None: it is no file."""

    def check_unchanged(self, shards: ShardTable, shard: int) -> None:
        """Do nothing: it is no file."""

    def open(self, dataset: str, shards: ShardTable, shard: int, through: Through) -> Reader:
        """Return a reader of the shard's part of the object."""
        num_samples = int(shards.num_samples[shard])
        start = int(shards.stops[shard]) - num_samples
        return MemoryReader(self.samples, start, num_samples, f"dataset {dataset!r}, shard {shard}")
