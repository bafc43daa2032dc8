"""Where the samples of a dataset are: the part that differs between files and objects in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from zephon_torch.arithmetic.permutation import Int64Array
from zephon_torch.io.files import Storage, StoredFile
from zephon_torch.io.formats import FormatOptions, load_format
from zephon_torch.io.formats.memory import MemoryReader
from zephon_torch.io.formats.reader import Reader
from zephon_torch.io.shards import ShardTable


class Content(Protocol):
    """What a dataset asks; holds nothing open."""

    @property
    def version(self) -> str | None:
        """What else tells one content from another, for the fingerprint."""
        ...

    def place(self, dataset: str, path: str, shard: int) -> str:
        """Name a shard for messages, given its relative path and number."""
        ...

    def records(self, shards: ShardTable, numbers: Int64Array, samples: Int64Array) -> Int64Array:
        """Numbers of samples among all records of their shards; see `Dataset.records`."""
        ...

    def open(self, dataset: str, shards: ShardTable, shard: int) -> Reader:
        """Open a shard, to be read by record; `dataset` is the name for messages."""
        ...


@dataclass(frozen=True, slots=True)
class FileContent:
    """Files of one format below one root, with the stamps they had when listed."""

    storage: Storage
    format: str
    options: FormatOptions
    stamps: npt.NDArray[np.int64]  # (shards,)

    @property
    def version(self) -> str | None:
        """What decides beside names and sizes which samples stand where."""
        return self.options.identity

    def place(self, dataset: str, path: str, shard: int) -> str:
        """Return path or URL, without credentials."""
        return self.storage.url(path)

    def records(self, shards: ShardTable, numbers: Int64Array, samples: Int64Array) -> Int64Array:
        """Return the samples' own numbers."""
        return samples

    def open(self, dataset: str, shards: ShardTable, shard: int) -> Reader:
        """Open a file through its format."""
        known = shards[shard]
        file = StoredFile(self.storage, known.path, known.num_bytes, int(self.stamps[shard]))
        module = load_format(self.format)
        return module.open_reader(file, self.options, dataset, known.num_samples)


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

    def open(self, dataset: str, shards: ShardTable, shard: int) -> Reader:
        """Return a reader of the shard's part of the object."""
        num_samples = int(shards.num_samples[shard])
        start = int(shards.stops[shard]) - num_samples
        return MemoryReader(self.samples, start, num_samples, f"dataset {dataset!r}, shard {shard}")
