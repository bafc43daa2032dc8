"""MDS: the shards of MosaicML Streaming, with the ``index.json`` of their folder. Read-only.

A shard (all numbers little endian)::

    uint32       number of records, n
    uint32[n+1]  byte at which each record starts, then the size of the shard
    ...          a copy of what index.json says of the shard; not read
    records      uint32 for each column whose size varies, then the values, column by column

A shard that is there both as it is and compressed is read as it is. One that is only there
compressed is unpacked whole, in memory (``unpacked.py``): any order but one shard after the other
unpacks it many times.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import ConfigurationError, DatasetError, RecordError
from zephon_torch.io.codecs.unpacked import CODECS, UnpackedFile, check_codec
from zephon_torch.io.formats import FORMATS
from zephon_torch.io.formats.mds.columns import Decode, decoder_of
from zephon_torch.io.formats.mds.folder import MARKER, Column, MdsFile, load_index
from zephon_torch.io.formats.pickles import AllowPickle, check_allow_pickle
from zephon_torch.io.storage.files import FileInfo, Storage, StoredFile
from zephon_torch.io.storage.ranges import Ranges, open_ranges
from zephon_torch.io.storage.reader import Reader, check_bounds


@dataclass(frozen=True, slots=True)
class Options:
    """Keywords of MDS folders.

    Attributes:
        keep_bytes: How many bytes of compressed shards each reading thread keeps unpacked; the one
            it read last is kept always.
        allow_pickle: Whether columns of pickles are loaded, which runs whatever code they hold.
            False: they raise. None: a note of their size stands in their place.

    Raises:
        ConfigurationError: Not a number of bytes, or neither True nor False.
    """

    keep_bytes: int = 256 << 20
    allow_pickle: AllowPickle = False

    def __post_init__(self) -> None:
        check_allow_pickle(self.allow_pickle)
        if type(self.keep_bytes) is not int or self.keep_bytes < 0:
            raise ConfigurationError(f"keep_bytes must be 0 or more, got {self.keep_bytes!r}")

    def without_pickles(self) -> Options:
        """The same, but for pickles, which are only named."""
        return replace(self, allow_pickle=None)

    @property
    def identity(self) -> None:
        """Nothing."""


def choose(storage: Storage, listed: Sequence[FileInfo]) -> list[FileInfo]:
    """Return the file of each shard that the index lists.

    Raises:
        DatasetError: The index is not one, or files and index do not agree.
    """
    there = {file.path: file for file in listed}
    marker = StoredFile(storage, *there[MARKER])
    index = load_index(marker, anew=True)
    chosen = [_file_of(shard, there, marker) for shard in index.shards]
    for path in there:
        if FORMATS["mds"].has(path, ()) and path not in index.files:
            raise DatasetError(
                f"{storage.url(path)!r} is not listed in {marker.url!r}: move it away, or merge "
                "the indexes"
            )
    return chosen


def count(file: StoredFile, options: Options) -> int:
    """Count the records: as the index says, which the shard must agree with when it is opened."""
    known = _known(file)
    for column in known.columns:
        _decoder_of(column, file, options)
    return known.num_samples


def scan(file: StoredFile, options: Options, advance: Callable[[int], object]) -> int:
    """Count the records, as `count` does."""
    return count(file, options)


def open_reader(file: StoredFile, options: Options, dataset: str, num_samples: int) -> Reader:
    """Open a shard that must be, as its index, as it was when the dataset was made."""
    return MdsReader(file, _known(file), options, f"dataset {dataset!r}, file {file.url!r}")


class MdsReader:
    """Random access to the records of one shard, as dicts of their columns.

    Args:
        file: The shard as it was when the dataset was made.
        known: What the index says of it.
        options: Of the format.
        shard: Dataset and file in words, for messages.

    Raises:
        DatasetError: The file is gone or changed, or does not agree with the index.
    """

    def __init__(self, file: StoredFile, known: MdsFile, options: Options, shard: str) -> None:
        self._known = known
        self._shard = shard
        self._decoders = [(c.name, c.size, _decoder_of(c, file, options)) for c in known.columns]
        self._sizes = struct.Struct(f"<{sum(c.size is None for c in known.columns)}I")
        self._ranges: Ranges = (
            open_ranges(file)
            if known.codec is None
            else UnpackedFile(file, known.codec, known.shard_bytes, options.keep_bytes)
        )
        try:
            self._offsets = self._read_offsets()
        except BaseException:
            self._ranges.close()
            raise

    def read(self, samples: npt.NDArray[np.int64]) -> list[dict[str, Any]]:
        """Records by number; see `Reader.read`."""
        check_bounds(samples, self._known.num_samples, self._shard)
        if not len(samples):
            return []
        records = self._ranges.read(self._offsets[samples], self._offsets[samples + 1])
        return [
            self._decode(number, record)
            for number, record in zip(samples.tolist(), records, strict=True)
        ]

    def close(self) -> None:
        """Let go of the file."""
        self._ranges.close()

    def _decode(self, number: int, record: bytes) -> dict[str, Any]:
        at = self._sizes.size
        if len(record) < at:
            self._refuse(number, f"it has {len(record)} bytes, its head alone {at}")
        varying = iter(self._sizes.unpack_from(record))
        sample = {}
        for name, size, decode in self._decoders:
            stop = at + (next(varying) if size is None else size)
            if stop > len(record):
                self._refuse(number, f"column {name!r} reaches to byte {stop:,} of {len(record):,}")
            try:
                sample[name] = decode(record[at:stop])
            except Exception as error:  # decoders of images raise anything
                self._refuse(number, f"column {name!r} cannot be decoded: {error}", error)
            at = stop
        if at != len(record):
            self._refuse(number, f"it has {len(record):,} bytes, its columns {at:,}")
        return sample

    def _read_offsets(self) -> npt.NDArray[np.int64]:
        """int64[num_samples + 1], checked in full."""
        num_samples, num_bytes = self._known.num_samples, self._known.shard_bytes
        head_bytes = 4 * (num_samples + 2)  # the index was refused if the shard is smaller
        (head,) = self._ranges.read(np.zeros(1, np.int64), np.array([head_bytes]))
        numbers = np.frombuffer(head, "<u4").astype(np.int64)
        if numbers[0] != num_samples:
            self._refuse_shard(f"it holds {numbers[0]:,} records, not the {num_samples:,}")
        offsets = numbers[1:]
        if offsets[0] < head_bytes or offsets[-1] != num_bytes or (np.diff(offsets) < 0).any():
            self._refuse_shard("its records do not end where it ends, not as the file")
        return offsets

    def _refuse(self, number: int, reason: str, cause: Exception | None = None) -> NoReturn:
        raise RecordError(f"{self._shard}, record {number}: {reason}") from cause

    def _refuse_shard(self, reason: str) -> NoReturn:
        raise DatasetError(
            f"{self._shard}: {reason} that {MARKER} lists; one of the two is damaged or old"
        )


def _file_of(shard: list[MdsFile], there: dict[str, FileInfo], marker: StoredFile) -> FileInfo:
    """Return the best file of a shard that is there."""
    known = next((file for file in shard if file.path in there), None)
    if known is None:
        names = " or ".join(repr(file.path) for file in shard)
        raise DatasetError(
            f"{marker.url!r} lists {names}, which is not there (hidden names do not count): "
            "restore it"
        )
    found = there[known.path]
    if found.num_bytes != known.num_bytes:
        raise DatasetError(
            f"{marker.storage.url(known.path)!r} has {found.num_bytes:,} bytes, "
            f"{known.num_bytes:,} by {marker.url!r}: one of the two is damaged or old"
        )
    if known.codec is not None:
        if known.codec not in CODECS:
            raise DatasetError(
                f"{marker.storage.url(known.path)!r} is compressed with {known.codec!r}, which is "
                f"not read (only {' and '.join(CODECS)} are): decompress it"
            )
        check_codec(known.codec)
    return found


def _known(file: StoredFile) -> MdsFile:
    """Entry of a shard in the index."""
    if file.beside is None:
        raise DatasetError(
            f"{file.url!r} is read through the {MARKER} of its folder: name the folder that holds "
            f"{MARKER} as the dataset's path"
        )
    return load_index(file.beside).files[file.path]


def _decoder_of(column: Column, file: StoredFile, options: Options) -> Decode:
    try:
        return decoder_of(column.encoding, options.allow_pickle)
    except DatasetError as error:
        raise DatasetError(f"{file.url!r}, column {column.name!r}: {error}") from None
