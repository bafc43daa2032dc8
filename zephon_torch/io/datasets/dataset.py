"""A dataset: a named collection of shards of one format, described once and never changed.

The description (names, counts, sizes) is all that the plan needs; samples are read through
`Dataset.open`, by the process that wants them. A dataset holds no open handle: it can be pickled
and used on both sides of a fork.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, SupportsIndex

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import ConfigurationError, DatasetError, ZephonError
from zephon_torch.io.datasets import manifest
from zephon_torch.io.datasets.content import Content, FileContent, ObjectContent, Through, directly
from zephon_torch.io.datasets.discovery import Found, count_samples, find_shards
from zephon_torch.io.datasets.fingerprint import fingerprint
from zephon_torch.io.datasets.part import PartContent, PartReader, split
from zephon_torch.io.datasets.shards import Shard, ShardTable
from zephon_torch.io.formats import FormatOptions, make_options
from zephon_torch.io.formats.map_style import check_sizes, length_of
from zephon_torch.io.remote.options import HiddenPath, StorageOptions
from zephon_torch.io.storage.files import StoredFile
from zephon_torch.io.storage.reader import Reader, Samples, samples_of
from zephon_torch.support import checks
from zephon_torch.support.wording import describe_bytes, plural

__all__ = ["Dataset", "Reader", "Samples", "Shard", "samples_of"]

_ITERATION_STEP = 256


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A named, immutable collection of shards of one format.

    Made by `from_path`, `from_manifest`, `from_samples` or `from_torch`, or by `split` of another.
    Samples stand in shard-then-record order; shards stand in the order of their relative paths,
    however they were listed.

    Attributes:
        name: Unique in a mixture; part of the fingerprint.
        format: name of the files' format, or ``"memory"`` or ``"torch"``.
        shards: Sequence of `Shard`, made on access.
        content: Where the samples are; for this package.
    """

    name: str
    format: str
    shards: ShardTable
    content: Content

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigurationError(
                f"a dataset's name must be a str, not empty, got {self.name!r}"
            )

        checks.total(
            f"dataset {self.name!r}: numbers of samples",
            self.shards.num_samples,
            error=DatasetError,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # immutable, and what it describes may be large

    @classmethod
    def from_path(
        cls,
        name: str,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Self:
        """Describe files.

        Counting the records of a file reads it once and leaves a hidden index beside it, or in a
        cache folder (``$ZEPHON_CACHE_DIR``); later calls read the index.

        Args:
            name: The dataset's name.
            path: A folder (read to any depth), one file, or a pattern with wildcards; local or a
                URL that fsspec knows. In folders, names that begin with ``.`` or ``_`` or end with
                ``.tmp`` are left out.
            format: Name of the format; told from the extensions by default.
            storage_options: For fsspec; never shown in any message.
            options: Of the format; the documentation has a page on each. ``columns`` (parquet,
                arrow), ``decode`` (webdataset), ``dtype`` (tokens), ``row_length`` (tokens,
                megatron), ``unit`` (megatron), ``keep_bytes`` (mds), and ``allow_pickle``
                (webdataset, mds): pickles among the data run whatever code they hold, so they are
                loaded only where it is True.

        Raises:
            ConfigurationError: A bad name, not a path, an unknown format, an option that the format
                does not have, or a format whose package is not installed.
            DatasetError: Nothing there, no data there, more than one format, or files that change
                while they are read.
        """
        place, hidden = HiddenPath(path), StorageOptions(storage_options)
        del path, storage_options  # crash reports show local variables
        _check_name(name)  # before anything is read
        with _naming(name):
            found = find_shards(place, format, hidden)
            format_options = make_options(found.format, options)
            num_samples = count_samples(name, found, format_options)
        return cls.of_counted(name, found, format_options, num_samples)

    @classmethod
    def of_counted(
        cls, name: str, found: Found, options: FormatOptions, num_samples: npt.NDArray[np.int64]
    ) -> Self:
        """Describe files that were found and counted: the last step of `from_path`."""
        num_bytes = np.fromiter((file.num_bytes for file in found.files), np.int64)
        stamps = np.fromiter((file.stamp for file in found.files), np.int64)
        shards = ShardTable(num_samples, num_bytes, (file.path for file in found.files))
        content = FileContent(found.storage, found.format, options, stamps, tuple(found.beside))
        return cls(name, found.format, shards, content)

    @classmethod
    def from_manifest(
        cls,
        name: str,
        path: str | os.PathLike[str],
        *,
        root: str | os.PathLike[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
        allow_pickle: bool = False,
    ) -> Self:
        """Describe the files that a manifest names, without a look at any of them.

        Has the fingerprint that `from_path` gives it. A file that has changed since the manifest
        was saved is noticed when its shard is opened.

        Args:
            name: The dataset's name.
            path: What `save_manifest` wrote; local or a URL that fsspec knows.
            root: The folder that its paths are relative to; the manifest's own by default.
            storage_options: For fsspec, for both; never shown in any message.
            allow_pickle: As for `from_path`; a manifest does not say it.

        Raises:
            ConfigurationError: A bad name, not a path, or a format or option that is not known.
            DatasetError: The manifest is not there, damaged or foreign, or leads out of its root.
        """
        options = {"allow_pickle": True} if allow_pickle else {}
        place, hidden = HiddenPath(path), StorageOptions(storage_options)
        base = None if root is None else HiddenPath(root)
        del path, root, storage_options  # crash reports show local variables
        _check_name(name)
        with _naming(name):
            found, content = manifest.load(place, base, hidden, options)
        return cls(name, found.format, found.shards, content)

    @classmethod
    def from_samples(
        cls,
        name: str,
        samples: Sequence[Any],
        *,
        shard_sizes: Sequence[int] | npt.NDArray[np.int64] | None = None,
    ) -> Self:
        """Describe a sequence in memory.

        Args:
            name: The dataset's name.
            samples: Anything with ``__len__`` and ``__getitem__``; kept, not copied.
            shard_sizes: Numbers of samples, in order, that sum to ``len(samples)``; one shard of
                everything by default.

        Raises:
            ConfigurationError: A bad name, not a sequence, or sizes that do not fit.
        """
        if isinstance(samples, str | bytes | Mapping):
            raise ConfigurationError(
                f"samples of dataset {name!r} must be a sequence of samples, got "
                f"{type(samples).__name__}; files are read with Dataset.from_path"
            )
        length = length_of(name, samples)
        sizes = check_sizes(name, [length] if shard_sizes is None else shard_sizes, length)
        return cls(name, "memory", ShardTable(sizes), ObjectContent(samples, None))

    @classmethod
    def from_torch(cls, name: str, dataset: Any, *, version: str | None = None) -> Self:
        """Describe a map-style dataset: anything with ``__len__`` and ``__getitem__``.

        It is asked for its length once and never iterated; one that has ``__getitems__`` is asked
        for several samples at once.

        Args:
            name: The dataset's name.
            dataset: The map-style dataset; kept, not copied.
            version: Anything that tells one content from another; part of the fingerprint, which
                otherwise only knows the length.

        Raises:
            ConfigurationError: A bad name or version, or a dataset that is not map-style.
        """
        if version is not None and not isinstance(version, str):
            raise ConfigurationError(f"version of dataset {name!r} must be a str, got {version!r}")
        sizes = np.array([length_of(name, dataset)], dtype=np.int64)
        return cls(name, "torch", ShardTable(sizes), ObjectContent(dataset, version))

    def split(self, parts: Mapping[str, float], *, seed: int = 0) -> dict[str, Dataset]:
        """Cut into disjoint datasets that hold everything together, named ``<name>/<part>``.

        Each part has the shards of this dataset, with as many of their samples as fall to it: an
        even share of every stretch of the data, chosen by the seed. The same data under another
        name or root are split alike. Costs nothing, whatever the number of samples.

        Args:
            parts: By the name of the part: fractions that sum to 1 (within 1e-9), rounded by
                largest remainder, or integers that sum to the number of samples. Their order does
                not matter.
            seed: Any integer.

        Raises:
            ConfigurationError: Names or numbers that cannot be, or another sum.
        """
        made = {}
        for part, content in split(self, parts, seed).items():
            sizes = content.cut.shard_sizes(part, self.shards)
            shards = ShardTable(sizes, self.shard_num_bytes, self.shards.paths)
            made[part] = Dataset(f"{self.name}/{part}", self.format, shards, content)
        return made

    def save_manifest(
        self,
        path: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Write what is known of the files, for `from_manifest`; replaces what is there.

        Best beside the files, in the root of the dataset, under a name like ``web.zman`` that is
        not taken for data.

        Args:
            path: Local, or a URL that fsspec can write to.
            storage_options: For fsspec.

        Raises:
            ConfigurationError: Not a path, no dataset of files, or a part of one.
            OSError: It cannot be written.
        """
        place, hidden = HiddenPath(path), StorageOptions(storage_options)
        del path, storage_options  # crash reports show local variables
        content = self.content
        if not isinstance(content, FileContent):
            raise ConfigurationError(
                f"dataset {self.name!r} has no files of its own: a manifest is of what "
                "Dataset.from_path made; split it after Dataset.from_manifest"
            )
        known = manifest.Manifest(
            self.format, content.options, self.shards, content.stamps, content.beside
        )
        manifest.save(place, hidden, known)

    @cached_property
    def num_samples(self) -> int:
        """Number of samples in all shards."""
        return int(self.shards.num_samples.sum())

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return len(self.shards)

    @property
    def shard_num_samples(self) -> npt.NDArray[np.int64]:
        """int64[num_shards], read-only."""
        return self.shards.num_samples

    @property
    def shard_num_bytes(self) -> npt.NDArray[np.int64]:
        """int64[num_shards], read-only; zeros for in-memory datasets."""
        return self.shards.num_bytes

    @property
    def samples(self) -> Any:
        """The object in memory that was described; None for files."""
        return self.content.samples if isinstance(self.content, ObjectContent) else None

    @property
    def is_part(self) -> bool:
        """Whether this is a part of another dataset: its samples have other record numbers."""
        return isinstance(self.content, PartContent)

    @cached_property
    def fingerprint(self) -> str:
        """64 hexadecimal digits, which change when samples could stand elsewhere."""
        return fingerprint(self.name, self.format, self.shards, self.content.version)

    def shard_path(self, shard: int) -> str:
        """Full path or URL of a shard for messages, ``name[shard]`` for in-memory datasets."""
        path = self.shards.path(self._check_shard(shard))
        return self.content.place(self.name, path, shard)

    def record(self, shard: int, sample: int) -> int:
        """Number of a sample among all records of its file: another one in a part of a dataset."""
        shards = np.array([self._check_shard(shard)])
        return int(self.records(shards, np.array([sample]))[0])

    def records(
        self, shards: npt.NDArray[np.int64], samples: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """:meth:`record` of many samples, int64[n], by their shards and their numbers in these.

        Numbers that a shard does not have give numbers without meaning.
        """
        return self.content.records(self.shards, shards, samples)

    def remote_file(self, shard: int) -> StoredFile | None:
        """The file of a shard that lies on another machine; None for any other."""
        return self.content.remote_file(self.shards, self._check_shard(shard))

    def check_unchanged(self, shard: int) -> None:
        """Raise DatasetError if the file of a shard is gone, or is not as it was."""
        self.content.check_unchanged(self.shards, self._check_shard(shard))

    def open(self, shard: int, through: Through = directly) -> Reader:
        """Open one shard for this process; close the reader after use.

        Args:
            shard: its number.
            through: opens a remote file, such as ``ShardCopies.open``; where it is by default.

        Raises:
            IndexError: No such shard.
            DatasetError: The file is gone or changed, or its index does not fit.
        """
        reader = self.open_records(shard, through)
        return PartReader(self, shard, reader) if self.is_part else reader

    def open_records(self, shard: int, through: Through = directly) -> Reader:
        """:meth:`open`, but the reader takes the numbers that :meth:`records` gives."""
        return self.content.open(self.name, self.shards, self._check_shard(shard), through)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: SupportsIndex) -> Any:
        """Read one sample, by its number in shard-then-record order; opens its shard to do so."""
        number = operator.index(index)
        if not -self.num_samples <= number < self.num_samples:
            raise IndexError(f"sample {number} of dataset {self.name!r}: it has {len(self):,}")
        shard, sample = self.shards.locate(number % self.num_samples)
        with closing(self.open(shard)) as reader:
            return samples_of(reader.read(np.array([sample], dtype=np.int64)))[0]

    def __iter__(self) -> Iterator[Any]:
        """Read all samples in shard-then-record order, opening each shard once."""
        for shard, num_samples in enumerate(self.shard_num_samples.tolist()):
            with closing(self.open(shard)) as reader:
                for start in range(0, num_samples, _ITERATION_STEP):
                    stop = min(start + _ITERATION_STEP, num_samples)
                    yield from samples_of(reader.read(np.arange(start, stop, dtype=np.int64)))

    def __repr__(self) -> str:
        parts = [self.format, plural(self.num_shards, "shard"), plural(len(self), "sample")]
        if num_bytes := int(self.shard_num_bytes.sum()):
            parts.append(describe_bytes(num_bytes))
        return f"Dataset({self.name!r}, {', '.join(parts)})"

    def _check_shard(self, shard: int) -> int:
        if not 0 <= shard < self.num_shards:
            raise IndexError(f"shard {shard} of dataset {self.name!r}: it has {self.num_shards:,}")
        return operator.index(shard)


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Say of which dataset an error is: what finds and counts files does not know its name."""
    try:
        yield
    except ZephonError as error:
        if f"dataset {name!r}" not in str(error):
            error.args = (f"dataset {name!r}: {error}",)
        raise


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigurationError(f"a dataset's name must be a str, not empty, got {name!r}")
