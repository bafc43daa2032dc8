"""WebDataset tar shards: members that share a key are one sample.

A sample is the dict that ``webdataset.WebDataset(url).decode(...)`` gives: ``__key__``, ``__url__``
and one entry for each extension, decoded by webdataset's own decoders. The grouping rule is that of
``tar_samples.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import ConfigurationError, DatasetError, RecordError
from zephon_torch.extras import require
from zephon_torch.io import index
from zephon_torch.io.files import StoredFile
from zephon_torch.io.formats.reader import Reader, check_bounds
from zephon_torch.io.formats.tar import TarError
from zephon_torch.io.formats.tar_samples import find_samples, parse_sample
from zephon_torch.io.ranges import open_ranges

INDEXER = index.Indexer("webdataset", 1, find_samples)

# Called with "." and the extension, and the content; None passes both on to the next.
Handler = Callable[[str, bytes], Any]
Decode = bool | str | Handler | Sequence[str | Handler]


@dataclass(frozen=True, slots=True)
class Options:
    """How contents are decoded.

    Attributes:
        decode: True for webdataset's basic decoders, which know json, txt, cls, npy, pkl, pth and
            others by the last extension, and leave what they do not know as bytes. False for
            bytes. Or what comes before these, in order: names of webdataset's image decoders
            (``"pil"``, ``"rgb8"``, ``"torchrgb"`` ...) and functions of an extension with its dot
            and the content, which return None for what is not theirs.

    Raises:
        ConfigurationError: None of these, or a package for images is missing.
    """

    decode: Decode = True

    def __post_init__(self) -> None:
        for handler in _handlers(self.decode):
            if isinstance(handler, str):
                _check_image_decoder(handler)
            elif not callable(handler):
                raise ConfigurationError(
                    "decode must be True, False, the name of an image decoder, a function, or a "
                    f"sequence of names and functions, got {handler!r}"
                )

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
        self._decode = None if options.decode is False else _make_decode(options.decode)
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
        if isinstance(error, ModuleNotFoundError):
            raise ConfigurationError(
                f"decoding {extension!r} in {self._shard} needs a package: {error}; install it, or "
                "give decode= a function for this extension, or False"
            ) from error
        raise RecordError(
            f"{self._shard}, record {number} (key {key!r}): {extension!r} cannot be decoded: "
            f"{type(error).__name__}: {error}"
        ) from error

    def _refuse_index(self, number: int, error: TarError) -> NoReturn:
        paths = " or ".join(map(repr, index.sidecar_paths(self._file)))
        raise DatasetError(
            f"{self._shard}: the index does not fit the file, record {number}, {error}; delete "
            f"{paths} and make the dataset anew"
        ) from None


def _handlers(decode: Any) -> Sequence[Any]:
    """What comes before the basic decoders; holds what `decode` must not be, too."""
    if isinstance(decode, bool):
        return ()
    is_several = isinstance(decode, Sequence) and not isinstance(decode, str | bytes)
    return decode if is_several else (decode,)


def _check_image_decoder(name: str) -> None:
    import webdataset

    try:
        webdataset.imagehandler(name)
    except ValueError:
        raise ConfigurationError(
            f"webdataset has no image decoder {name!r}: decode= takes 'pil', 'rgb8', 'torchrgb' "
            "and the others of webdataset.imagehandler"
        ) from None
    require("PIL", "images", f"decode={name!r}")


def _make_decode(decode: Decode) -> Callable[[str, bytes], Any]:
    """What decodes one content by its extension."""
    import webdataset

    decoder = webdataset.Decoder(
        [
            webdataset.imagehandler(handler) if isinstance(handler, str) else handler
            for handler in _handlers(decode)
        ]
    )

    def decode_one(extension: str, content: bytes) -> Any:
        if not extension.startswith("__"):
            return decoder.decode1(extension, content)
        try:  # what webdataset takes for notes about a sample
            return content.decode()
        except UnicodeDecodeError:
            return content

    return decode_one
