r"""Token sequences of Megatron-LM: a ``.bin`` file of values with its ``.idx`` file beside it.

The ``.idx`` file, as ``megatron.core.datasets.indexed_dataset`` defines it; all little endian::

    0    9 bytes    magic  b"MMIDIDX\0\0"
    9    uint64     version, 1
    17   uint8      code of the values' type, see `_DTYPES`
    18   uint64     number of sequences, n
    26   uint64     number of document marks, d + 1
    34   int32[n]   values of each sequence
         int64[n]   byte of the .bin file at which each starts
         int64[d+1] document k is the sequences [mark[k], mark[k + 1]); mark[0] is 0, mark[d] is n
         int8[n]    modes, of multimodal datasets only; not read

Opening costs a few small reads whatever the size. Each sequence's entries are read with it, and
must agree with each other: the .bin file is the sequences one after another, from its first byte to
its last.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import ConfigurationError, DatasetError, RecordError
from zephon_torch.io.formats.rows.layout import RowLayout
from zephon_torch.io.formats.rows.row_reader import RowReader
from zephon_torch.io.formats.rows.tokens import check_row_length
from zephon_torch.io.storage.files import StoredFile
from zephon_torch.io.storage.ranges import Ranges, RequestedFile, open_ranges
from zephon_torch.io.storage.reader import Reader, check_bounds

UNITS = ("sequence", "document")

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_LEGACY_MAGIC = b"TNTIDX\x00\x00"
_DTYPES = dict(enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), start=1))

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Options:
    """Keywords of Megatron's files.

    Attributes:
        unit: What a sample is: "sequence" (what was added at once, mostly a document, too) or
            "document" (the sequences up to an end of document, joined).
        row_length: If given, samples are rows of this many values of the whole .bin file instead.

    Raises:
        ConfigurationError: An unknown unit, a bad length, or both given.
    """

    unit: str = "sequence"
    row_length: int | None = None

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ConfigurationError(f"unit must be one of {UNITS}, got {self.unit!r}")
        if self.row_length is None:
            return
        object.__setattr__(self, "row_length", check_row_length(self.row_length))
        if self.unit != "sequence":
            raise ConfigurationError(
                f"unit={self.unit!r} and row_length= exclude each other: rows are cut from the "
                "whole file"
            )

    @property
    def identity(self) -> str:
        """The unit of a sample."""
        return self.unit if self.row_length is None else f"row_length={self.row_length}"


def count(file: StoredFile, options: Options) -> int:
    """Count the samples by the header of the .idx file, which must fit both files."""
    index = _read_index(file)
    if options.row_length is not None:
        return _layout(file, index, options.row_length).num_rows
    return index.num_sequences if options.unit == "sequence" else index.num_documents


def scan(file: StoredFile, options: Options, advance: Callable[[int], object]) -> int:
    """Count the samples, as `count` does."""
    return count(file, options)


def open_reader(file: StoredFile, options: Options, dataset: str, num_samples: int) -> Reader:
    """Open a file that must be, as its .idx file, as it was when counted."""
    file.check_unchanged()
    index = _read_index(file)
    shard = f"dataset {dataset!r}, file {file.url!r}"
    if options.row_length is not None:
        return RowReader(file, _layout(file, index, options.row_length), shard)
    return SequenceReader(file, index, options.unit == "document", shard)


@dataclass(frozen=True, slots=True)
class Index:
    """The header of a sound .idx file.

    Attributes:
        file: the .idx file.
        dtype: of the values.
        num_sequences, num_documents: how many there are.
    """

    file: StoredFile
    dtype: np.dtype[Any]
    num_sequences: int
    num_documents: int

    @property
    def pointers_start(self) -> int:
        """Byte at which the starts of the sequences stand."""
        return _HEADER.size + 4 * self.num_sequences

    @property
    def marks_start(self) -> int:
        """Byte at which the marks of documents stand."""
        return self.pointers_start + 8 * self.num_sequences

    @property
    def num_bytes(self) -> int:
        """Size of the file, without modes."""
        return self.marks_start + 8 * (self.num_documents + 1)


class SequenceReader:
    """Random access to the sequences, or the documents, of one .bin file.

    Args:
        file: The .bin file as it was when the dataset was made.
        index: Of its .idx file.
        reads_documents: Whether samples are documents.
        shard: Dataset and file in words, for messages.
    """

    def __init__(self, file: StoredFile, index: Index, reads_documents: bool, shard: str) -> None:
        self._file = file
        self._index = index
        self._reads_documents = reads_documents
        self._shard = shard
        self._num_samples = index.num_documents if reads_documents else index.num_sequences
        self._ranges = open_ranges(index.file)
        self._values = open_ranges(file)

    def read(self, samples: Int64Array) -> list[Any]:
        """Sequences by number, each int64[its length] (or of its float type); see `Reader.read`."""
        check_bounds(samples, self._num_samples, self._shard)
        if not len(samples):
            return []
        starts, stops = self._places(samples)
        parts = [b""] * len(samples)
        if self._file.num_bytes:  # an empty file has no ranges
            parts = self._values.read(starts, stops)
        dtype = self._index.dtype
        kind = np.int64 if dtype.kind in "iu" else dtype.newbyteorder("=")
        return [np.frombuffer(part, dtype).astype(kind) for part in parts]

    def close(self) -> None:
        """Let go of both files."""
        self._ranges.close()
        self._values.close()

    def _places(self, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        """First byte of each sample and the one behind its last, checked."""
        first, behind, index = samples, samples + 1, self._index
        if self._reads_documents:
            marks = np.concatenate((samples, samples + 1))
            first, behind = self._entries(index.marks_start, marks, "<i8").reshape(2, -1)
            fits = (first >= 0) & (first <= behind) & (behind <= index.num_sequences)
            self._refuse_unless(fits, samples)
        starts, stops = self._pointers(np.concatenate((first, behind))).reshape(2, -1)
        size = index.dtype.itemsize
        fits = (starts >= 0) & (starts <= stops) & (stops <= self._file.num_bytes)
        fits &= (starts % size == 0) & (stops % size == 0)
        if not self._reads_documents:
            fits &= stops - starts == size * self._entries(_HEADER.size, samples, "<i4")
        self._refuse_unless(fits, samples)
        return starts, stops

    def _pointers(self, sequences: Int64Array) -> Int64Array:
        """Where sequences start; the one behind the last would at the end of the file."""
        pointers = np.full(len(sequences), self._file.num_bytes)
        is_there = sequences < self._index.num_sequences
        pointers[is_there] = self._entries(self._index.pointers_start, sequences[is_there], "<i8")
        return pointers

    def _entries(self, start: int, numbers: Int64Array, dtype: str) -> Int64Array:
        return _read_entries(self._ranges, start, numbers, dtype)

    def _refuse_unless(self, fits: npt.NDArray[np.bool_], samples: Int64Array) -> None:
        if not fits.all():
            raise RecordError(
                f"{self._shard}, record {samples[~fits][0]}: its entry in {self._index.file.url!r} "
                "does not agree with its neighbours or with the .bin file; make both anew"
            )


def _read_entries(ranges: Ranges, start: int, numbers: Int64Array, dtype: str) -> Int64Array:
    """Entries by number of a column of an .idx file that starts at a byte."""
    size = np.dtype(dtype).itemsize
    starts = start + size * numbers
    content = b"".join(ranges.read(starts, starts + size))
    return np.frombuffer(content, dtype).astype(np.int64)


def _layout(file: StoredFile, index: Index, row_length: int) -> RowLayout:
    return RowLayout(
        index.dtype, row_length, 0, file.num_bytes // (row_length * index.dtype.itemsize)
    )


def _read_index(file: StoredFile) -> Index:
    """Header of the .idx file beside a .bin file, checked against the sizes of both."""
    assert file.beside is not None  # by the entry in FORMATS
    index = _parse_header(file.beside)
    num_bytes = file.beside.num_bytes
    if num_bytes not in (index.num_bytes, index.num_bytes + index.num_sequences):
        _refuse(
            index.file,
            f"has {num_bytes:,} bytes, {index.num_bytes:,} expected for {index.num_sequences:,} "
            f"sequences and {index.num_documents:,} documents: it was cut short or damaged",
        )
    _check_ends(file, index)
    return index


def _parse_header(file: StoredFile) -> Index:
    header = file.storage.read(file.path, 0, _HEADER.size)
    if header.startswith(_LEGACY_MAGIC):
        _refuse(
            file,
            "is of Megatron's and fairseq's old kind (TNTIDX), which is not read: write the "
            "data anew with the mmap kind",
        )
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        _refuse(file, "is not an index of Megatron's: it does not begin with MMIDIDX and a header")
    _, version, code, num_sequences, num_marks = _HEADER.unpack(header)
    if version != 1:
        _refuse(file, f"has version {version} of its layout, 1 expected")
    if code not in _DTYPES:
        _refuse(file, f"has the unknown code {code} for the type of its values")
    if not num_marks:
        _refuse(file, "has no mark of a document, 1 expected at least")
    return Index(file, np.dtype(_DTYPES[code]), num_sequences, num_marks - 1)


def _check_ends(file: StoredFile, index: Index) -> None:
    """Compare the first and last entries with each other and with the .bin file."""
    ranges = RequestedFile(index.file)  # the file was looked at just now: not again
    ends = np.array([0, index.num_documents])
    marks = _read_entries(ranges, index.marks_start, ends, "<i8")
    if marks.tolist() != [0, index.num_sequences]:
        _refuse(
            index.file,
            f"marks documents from sequence {marks[0]} to {marks[1]}, but has "
            f"{index.num_sequences:,} sequences",
        )
    num_bytes = 0
    if index.num_sequences:
        last = np.array([index.num_sequences - 1])
        pointer = _read_entries(ranges, index.pointers_start, last, "<i8")
        length = _read_entries(ranges, _HEADER.size, last, "<i4")
        num_bytes = int(pointer[0]) + int(length[0]) * index.dtype.itemsize
    if num_bytes != file.num_bytes:
        raise DatasetError(
            f"{file.url!r} has {file.num_bytes:,} bytes, {num_bytes:,} by {index.file.url!r}: one "
            "of them was cut short or belongs to another dataset"
        )


def _refuse(file: StoredFile, reason: str) -> NoReturn:
    raise DatasetError(f"{file.url!r} {reason}")
