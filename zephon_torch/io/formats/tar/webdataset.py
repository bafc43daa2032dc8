"""WebDataset tar shards: members that share a key are one sample.

A sample is the dict that ``webdataset.WebDataset(url).decode(...)`` gives: ``__key__``, ``__url__``
and one entry for each extension, decoded as webdataset does, but for what may run code or take the
process down (``decoding.py``). The grouping rule is that of ``samples.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import ConfigurationError, DatasetError, RecordError
from zephon_torch.io.formats.pickles import REMEDY, AllowPickle, PickleRefused, check_allow_pickle
from zephon_torch.io.formats.tar.decoding import Decode, check_handler, handlers, make_decode
from zephon_torch.io.formats.tar.members import TarError
from zephon_torch.io.formats.tar.samples import find_samples, parse_sample
from zephon_torch.io.index import index
from zephon_torch.io.storage.files import StoredFile
from zephon_torch.io.storage.ranges import open_ranges
from zephon_torch.io.storage.reader import Reader, check_bounds

INDEXER = index.Indexer("webdataset", 1, find_samples)


@dataclass(frozen=True, slots=True)
class Options:
    """How contents are decoded.

    Attributes:
        decode: True for webdataset's basic decoders, which know json, txt, cls, npy, pkl, pth and
            others by the last extension, and leave what they do not know as bytes. False for
            bytes. Or what comes before these, in order: names of webdataset's image decoders
            (``"pil"``, ``"rgb8"``, ``"torchrgb"`` ...) and functions of an extension with its dot
            and the content, which return None for what is not theirs.
        allow_pickle: Whether pickles are loaded (pkl, pickle, pyd, pth, and arrays of objects),
            which runs whatever code they hold. False: they raise. None: a note of their size stands
            in their place.

    Raises:
        ConfigurationError: None of these, or a package for images is missing.
    """

    decode: Decode = True
    allow_pickle: AllowPickle = False

    def __post_init__(self) -> None:
        check_allow_pickle(self.allow_pickle)
        for handler in handlers(self.decode):
            check_handler(handler)

    def without_pickles(self) -> Options:
        """The same, but for pickles, which are only named."""
        return replace(self, allow_pickle=None)

    @property
    def identity(self) -> None:
        """Nothing: samples stand where they are, however they are decoded."""


def count(file: StoredFile, options: Options) -> int | None:
    """Count the samples where an index exists already, else return None."""
    return index.stored_count(file, INDEXER)


def scan(file: StoredFile, options: Options, advance: index.Advance) -> int:
    """Count the samples; reads the headers and writes the index."""
    return len(index.build(file, INDEXER, advance)) - 1


def open_reader(file: StoredFile, options: Options, dataset: str, num_samples: int) -> Reader:
    """Open a file that must be as it was when counted."""
    return TarReader(file, options, dataset, num_samples)


class TarReader:
    """Random access to the samples of one tar file: a map of the file and one of its index.

    Args:
        file: The file as it was when the dataset was made.
        options: How contents are decoded.
        dataset: The dataset's name, for messages.
        num_samples: Number of samples when the dataset was made.

    Raises:
        DatasetError: The file is gone or changed, or its index does not fit.
    """

    def __init__(self, file: StoredFile, options: Options, dataset: str, num_samples: int) -> None:
        self._file = file
        self._url = file.url
        self._shard = f"dataset {dataset!r}, file {self._url!r}"
        self._decode = (
            None if options.decode is False else make_decode(options.decode, options.allow_pickle)
        )
        self._ranges = open_ranges(file)
        try:
            self._offsets = index.load(file, INDEXER, num_samples)
        except BaseException:
            self._ranges.close()
            raise

    def read(self, samples: npt.NDArray[np.int64]) -> list[Any]:
        """Samples by number; see `Reader.read`."""
        samples = np.asarray(samples, dtype=np.int64)
        if not len(samples):
            return []
        check_bounds(samples, len(self._offsets) - 1, self._shard)
        starts, stops = self._offsets[samples], self._offsets[samples + 1]
        contents = self._ranges.read(starts, stops)
        return [
            self._sample(number, content)
            for number, content in zip(samples.tolist(), contents, strict=True)
        ]

    def close(self) -> None:
        """Unmap the file."""
        self._ranges.close()

    def _sample(self, number: int, content: bytes) -> dict[str, Any]:
        is_last = number == len(self._offsets) - 2
        try:
            key, fields = parse_sample(content, int(self._offsets[number]), is_last)
        except TarError as error:
            self._refuse_index(number, error)
        sample: dict[str, Any] = {"__key__": key, "__url__": self._url}
        if self._decode is None:
            return sample | fields
        for extension, value in fields.items():
            try:
                sample[extension] = self._decode(extension, value)
            except Exception as error:
                self._fail(number, key, extension, error)
        return sample

    def _fail(self, number: int, key: str, extension: str, error: Exception) -> NoReturn:
        where = f"{self._shard}, record {number} (key {key!r}): {extension!r}"
        if isinstance(error, PickleRefused):
            raise ConfigurationError(
                f"{where} is a pickle, or holds one; {REMEDY}, decode= a function for it, or "
                "decode=False for bytes"
            ) from error
        if isinstance(error, ConfigurationError):
            raise ConfigurationError(f"{where} is not decoded: {error}") from None
        if isinstance(error, ModuleNotFoundError):
            raise ConfigurationError(
                f"decoding {extension!r} in {self._shard} needs a package: {error}; install it, or "
                "give decode= a function for this extension, or False"
            ) from error
        raise RecordError(f"{where} cannot be decoded: {type(error).__name__}: {error}") from error

    def _refuse_index(self, number: int, error: TarError) -> NoReturn:
        paths = " or ".join(map(repr, index.sidecar_paths(self._file)))
        raise DatasetError(
            f"{self._shard}: the index does not fit the file, record {number}, {error}; delete "
            f"{paths} and make the dataset anew"
        ) from None
