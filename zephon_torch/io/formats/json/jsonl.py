r"""JSON lines: one JSON value per line, in UTF-8.

Lines are those of ``lines.py``: they end at ``\n`` only (U+2028 and U+0085 may stand inside
strings), ``\r\n`` is fine, blank lines and a byte order mark are skipped, the last line needs no
newline. Values are what `json.loads` makes of them. Files may be compressed (``.gz``, ``.zst``).
Lines of mapped files are read through ``mapped_lines.py``; others, and all that are not as they
should be, one by one, which says what is wrong.
"""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import repeat
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import DatasetError, RecordError
from zephon_torch.io.codecs import check_codec, codec_of
from zephon_torch.io.codecs.decoded import open_decoded
from zephon_torch.io.formats import NoOptions
from zephon_torch.io.formats.json.lines import (
    BLANKS,
    BOM,
    NEWLINE,
    find_decoded_lines,
    find_lines,
    line_number,
    windows,
)
from zephon_torch.io.formats.json.mapped_lines import LineGroupKind, MappedLines, read_lines
from zephon_torch.io.formats.json.values import parse_lines
from zephon_torch.io.index import index
from zephon_torch.io.storage.files import StoredFile
from zephon_torch.io.storage.ranges import FileMap, MappedFile, Ranges, open_ranges
from zephon_torch.io.storage.reader import Reader, check_bounds


def _build_index(file: StoredFile, advance: index.Advance) -> index.Index:
    codec = codec_of(file.path)
    if codec is None:
        return index.Index(find_lines(file, advance))
    return find_decoded_lines(file, codec, advance)


INDEXER = index.Indexer("jsonl", 1, _build_index, lambda name: codec_of(name) is not None)

# The line number of a bad record takes reading the file up to it; over a network only this much.
_MAX_REMOTE_BYTES_FOR_LINE = 64 << 20
_MAX_DECODED_BYTES = 1 << 30  # of one record: a small file may claim any number

Options = NoOptions


def count(file: StoredFile, options: NoOptions) -> int | None:
    """Count the records where an index exists already, else return None."""
    if (codec := codec_of(file.path)) is not None:
        check_codec(codec)
    return index.stored_count(file, INDEXER)


def scan(file: StoredFile, options: NoOptions, advance: index.Advance) -> int:
    """Count the records; reads the whole file and writes its index."""
    return len(index.build(file, INDEXER, advance)) - 1


def open_reader(file: StoredFile, options: NoOptions, dataset: str, num_samples: int) -> Reader:
    """Open a file that must be as it was when counted."""
    return JsonlReader(file, dataset, num_samples)


class JsonlReader:
    """Random access to the lines of one file: a map of the file and a map of its index.

    Of a compressed file only those blocks are decoded that hold the lines; see ``decoded.py``.

    Args:
        file: The file as it was when the dataset was made.
        dataset: The dataset's name, for messages.
        num_samples: Number of records when the dataset was made.

    Raises:
        DatasetError: The file is gone or changed, or its index does not fit.
    """

    def __init__(self, file: StoredFile, dataset: str, num_samples: int) -> None:
        self._file = file
        self._shard = f"dataset {dataset!r}, file {file.url!r}"
        self._mapped: tuple[FileMap, MappedLines] | None = None
        self._ranges: Ranges = open_ranges(file)
        try:
            found = index.load_index(file, INDEXER, num_samples)
            self._offsets = found.offsets
            self._is_decoded = found.blocks is not None
            if found.blocks is not None:
                self._ranges = open_decoded(file, self._ranges, found.blocks)
            self._check_head()
            if isinstance(self._ranges, MappedFile) and (content := self._ranges.map) is not None:
                self._mapped = content, MappedLines.of(content, self._offsets)
        except BaseException:
            self._ranges.close()
            raise
        self.group_kind = None if self._mapped is None else LineGroupKind()

    @property
    def mapped(self) -> tuple[FileMap, MappedLines]:
        """The part of a reader that a group uses."""
        assert self._mapped is not None
        return self._mapped

    def read(self, samples: npt.NDArray[np.int64]) -> list[Any]:
        """Parse lines by number; see `Reader.read`."""
        samples = np.asarray(samples, dtype=np.int64)
        if not len(samples):
            return []
        check_bounds(samples, len(self._offsets) - 1, self._shard)
        if self._mapped is not None:
            content, lines = self._mapped
            content.content()  # checks it
            with suppress(ValueError, RecursionError):  # said below, of the line that is to blame
                return read_lines(repeat(lines, len(samples)), samples)
        return self._read_one_by_one(samples)

    def close(self) -> None:
        """Unmap the file."""
        self._mapped = None  # a map that views look into cannot be closed
        self._ranges.close()

    def _read_one_by_one(self, samples: npt.NDArray[np.int64]) -> list[Any]:
        # One byte more in front, which must be a newline: a wrong index would otherwise give wrong
        # data without a word. Record 0 has none; what is before it was checked when opening.
        starts, stops = self._offsets[samples] - (samples > 0), self._offsets[samples + 1]
        if self._is_decoded:
            self._check_lengths(samples, stops - starts)
        values = []
        lines = self._ranges.read(starts, stops)
        for sample, line in zip(samples.tolist(), lines, strict=True):
            whole = line if sample else b"\n" + line
            try:
                values += parse_lines([whole])
            except (ValueError, RecursionError) as error:
                self._fail(sample, whole, error)
        return values

    def _check_head(self) -> None:
        """Refuse an index with anything but blank lines before its first record."""
        start, head = int(self._offsets[0]), b"\n"
        for number, head in enumerate(windows(self._ranges, start)):
            if (head if number else head.removeprefix(BOM)).strip(BLANKS):
                self._refuse_index("there is more than blank lines before its first record")
        # Without any record the file may end in the middle of a blank line.
        if head[-1] != NEWLINE and head != BOM and len(self._offsets) > 1:
            self._refuse_index("there is more than blank lines before its first record")

    def _check_lengths(
        self, samples: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
    ) -> None:
        if int(lengths.max()) > _MAX_DECODED_BYTES:
            at = int(lengths.argmax())
            raise RecordError(
                f"{self._shard}, record {samples[at]}: {lengths[at]:,} bytes when decoded, more "
                f"than {_MAX_DECODED_BYTES:,}; leave it out or decompress the file"
            )

    def _fail(self, sample: int, line: bytes, error: Exception) -> NoReturn:
        """Blame the index if its line is none, else the line."""
        if line[0] != NEWLINE:
            self._refuse_index(f"record {sample} does not begin at the start of a line")
        if b"\n" in line[1:].strip(BLANKS):
            self._refuse_index(f"record {sample} spans several lines")
        message = f"{self._shard}, {self._place(sample)}: {_describe(error)}"
        raise RecordError(message) from None  # the error's own line number counts in the record

    def _place(self, sample: int) -> str:
        start = int(self._offsets[sample])
        if self._file.local_path is None and start > _MAX_REMOTE_BYTES_FOR_LINE:
            return f"byte {start:,} (record {sample})"
        return f"line {line_number(self._ranges, start)} (record {sample})"

    def _refuse_index(self, reason: str) -> NoReturn:
        paths = " or ".join(map(repr, index.sidecar_paths(self._file)))
        raise DatasetError(
            f"{self._shard}: the index does not fit the file, {reason}; delete {paths} and make "
            "the dataset anew"
        )


def _describe(error: Exception) -> str:
    """Say what is wrong with a line that has a newline in front."""
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} at character {error.pos}"
    if isinstance(error, UnicodeDecodeError):
        return f"not valid UTF-8: {error.reason} at byte {error.start}"
    return f"not valid JSON: {error}"
