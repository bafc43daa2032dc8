r"""JSON lines: one JSON value per line, in UTF-8.

Lines end at ``\n`` and nowhere else (U+2028 and U+0085 may stand inside strings), ``\r\n`` is
fine. A byte order mark at the start is skipped, so are lines of spaces, tabs and carriage returns:
they are no records. The last line needs no newline. Values are what `json.loads` makes of them.

A record begins where its line does and ends where the next record begins, so blank lines belong to
the record before them.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import DatasetError, RecordError
from zephon_torch.io import index
from zephon_torch.io.files import BLOCK_BYTES, StoredFile
from zephon_torch.io.formats.reader import Reader, check_bounds
from zephon_torch.io.ranges import open_ranges

_BOM = b"\xef\xbb\xbf"
_BLANK = " \t\r\n"
_NEWLINE = ord("\n")
_IS_BLANK = np.isin(np.arange(256), list(_BLANK.encode()))
# Finding the line of a bad record reads the file up to it; over a network only this much.
_MAX_REMOTE_BYTES_FOR_LINE = 64 << 20

_raw_decode = json.JSONDecoder().raw_decode


def count(file: StoredFile) -> int | None:
    """Count the records where an index exists already, else return None."""
    return index.stored_count(file, INDEXER)


def scan(file: StoredFile, advance: index.Advance) -> int:
    """Count the records; reads the whole file and writes its index."""
    return len(index.build(file, INDEXER, advance)) - 1


def open_reader(file: StoredFile, dataset: str, num_samples: int) -> Reader:
    """Open a file that must be as it was when counted."""
    return JsonlReader(file, dataset, num_samples)


class JsonlReader:
    """Random access to the lines of one file; a map of the file and a map of its index."""

    def __init__(self, file: StoredFile, dataset: str, num_samples: int) -> None:
        self._file = file
        self._shard = f"dataset {dataset!r}, file {file.url!r}"
        self._ranges = open_ranges(file)
        try:
            self._offsets = index.load(file, INDEXER, num_samples)
            self._check_head()
        except BaseException:
            self._ranges.close()
            raise

    def read(self, samples: npt.NDArray[np.int64]) -> list[Any]:
        """Parse lines by number; see `Reader.read`."""
        samples = np.asarray(samples, dtype=np.int64)
        if not len(samples):
            return []
        check_bounds(samples, len(self._offsets) - 1, self._shard)
        # One byte more in front, which must be a newline: a wrong index would otherwise give wrong
        # data without a word. Record 0 has none; what is before it was checked when opening.
        num_before = np.minimum(samples, 1)
        starts, stops = self._offsets[samples] - num_before, self._offsets[samples + 1]
        values = []
        lines = self._ranges.read(starts, stops)
        for position, (line, before) in enumerate(zip(lines, num_before.tolist(), strict=True)):
            try:
                values.append(_parse(line, before))
            except (ValueError, RecursionError) as error:
                self._fail(int(samples[position]), line, before, error)
        return values

    def close(self) -> None:
        """Unmap the file."""
        self._ranges.close()

    def _check_head(self) -> None:
        """Refuse an index with anything but blank lines before its first record."""
        if not self._file.num_bytes:
            return
        (head,) = self._ranges.read(np.zeros(1, np.int64), self._offsets[:1])
        head = head.removeprefix(_BOM)
        if head.strip(_BLANK.encode()) or (head and len(self._offsets) > 1 and head[-1] != 10):
            self._refuse_index("its first record is not at the start of a line")

    def _fail(self, sample: int, line: bytes, before: int, error: Exception) -> NoReturn:
        if before and line[0] != _NEWLINE:
            self._refuse_index(f"record {sample} does not begin at the start of a line")
        if b"\n" in line[before:].rstrip(_BLANK.encode()):
            self._refuse_index(f"record {sample} spans several lines")
        where = self._place(sample)
        raise RecordError(f"{self._shard}, {where}: {_describe(error, before)}") from error

    def _place(self, sample: int) -> str:
        start = int(self._offsets[sample])
        if self._file.local_path is None and start > _MAX_REMOTE_BYTES_FOR_LINE:
            return f"byte {start:,} (record {sample})"
        before = StoredFile(self._file.storage, self._file.path, start, self._file.stamp)
        line = 1 + sum(block.count(b"\n") for block in before.blocks())
        return f"line {line} (record {sample})"

    def _refuse_index(self, reason: str) -> NoReturn:
        paths = " or ".join(map(repr, index.sidecar_paths(self._file)))
        raise DatasetError(
            f"{self._shard}: the index does not fit the file, {reason}; delete {paths} and make "
            "the dataset anew"
        )


class LineScanner:
    """Finds the starts of non-blank lines, fed block by block; memory of a few blocks."""

    def __init__(self, position: int) -> None:
        """Begin at a byte position that is the start of a line."""
        self._position = position
        self._line_start = position  # of the line that the last block left unfinished
        self._line_is_filled = False
        self._found: list[npt.NDArray[np.int64]] = []

    def feed(self, block: npt.NDArray[np.uint8]) -> None:
        """Take the next bytes."""
        if not len(block):
            return
        newlines = np.flatnonzero(block == _NEWLINE)
        # Line k of this block is block[cuts[k] : cuts[k + 1]]; the first continues an earlier one,
        # the last may be unfinished, or empty when the block ends with a newline.
        cuts = np.concatenate(([0], newlines + 1))
        is_filled = _are_filled(block, cuts)
        is_filled[0] |= self._line_is_filled
        starts = cuts + self._position
        starts[0] = self._line_start
        self._found.append(starts[:-1][is_filled[:-1]])
        self._line_start, self._line_is_filled = int(starts[-1]), bool(is_filled[-1])
        self._position += len(block)

    def finish(self) -> npt.NDArray[np.int64]:
        """Offsets: the starts found, then the position after the last byte."""
        last = [self._line_start] if self._line_is_filled else []
        return np.concatenate([*self._found, np.array([*last, self._position], dtype=np.int64)])


def build_offsets(
    file: StoredFile, advance: index.Advance, block_bytes: int = BLOCK_BYTES
) -> npt.NDArray[np.int64]:
    """Read a file once and find its records.

    Returns:
        int64[num_samples + 1] offsets as ``sidecar.py`` describes.
    """
    scanner = None
    for block in file.blocks(max(block_bytes, len(_BOM))):
        skip = len(_BOM) if scanner is None and block.startswith(_BOM) else 0
        scanner = scanner or LineScanner(skip)
        scanner.feed(np.frombuffer(block, np.uint8)[skip:])
        advance(len(block))
    return (scanner or LineScanner(0)).finish()


INDEXER = index.Indexer("jsonl", 1, build_offsets)


def _are_filled(block: npt.NDArray[np.uint8], cuts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """For each line of a block, whether it holds anything but blanks."""
    is_open = cuts[-1] == len(block)  # nothing after the last newline
    starts = cuts[:-1] if is_open else cuts
    is_filled = ~_IS_BLANK[block[starts]]
    if not is_filled.all():  # rare: look into lines that begin with a blank, all at once
        is_filled = np.logical_or.reduceat(~_IS_BLANK[block], starts)
    return np.append(is_filled, False) if is_open else is_filled


def _parse(line: bytes, before: int) -> Any:
    """Return the value of a line that has `before` newlines in front."""
    if before and line[0] != _NEWLINE:
        raise ValueError("not at the start of a line")
    text = line.decode()
    start = before
    if text[start] in _BLANK:  # indented: the scanner itself skips no blanks
        start = len(text) - len(text[before:].lstrip(_BLANK))
    value, stop = _raw_decode(text, start)
    if (rest := text[stop:]) != "\n" and rest.strip(_BLANK):
        raise json.JSONDecodeError("Extra data", text, stop)
    return value


def _describe(error: Exception, before: int) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} at character {error.pos - before + 1}"
    if isinstance(error, UnicodeDecodeError):
        return f"not valid UTF-8: {error.reason} at byte {error.start - before + 1}"
    return f"not valid JSON: {error}"
