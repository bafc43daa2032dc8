r"""Where the lines of a text file are: found in numpy, part by part.

Lines end at ``\n`` and nowhere else. Lines of spaces, tabs and carriage returns are blank and not
counted; blank lines belong to the line before them. A UTF-8 byte order mark at the start of the
file is no part of its first line. Of a compressed file all this is said of the decoded bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import DatasetError
from zephon_torch.io.codecs import CodecError, codec_in
from zephon_torch.io.codecs.blocks import BlockTable, decode
from zephon_torch.io.index.index import Advance, Index
from zephon_torch.io.storage.files import BLOCK_BYTES, StoredFile
from zephon_torch.io.storage.ranges import Ranges

BOM = b"\xef\xbb\xbf"
BLANKS = b" \t\r\n"
NEWLINE = ord("\n")
_IS_BLANK = np.isin(np.arange(256), list(BLANKS))


def find_lines(
    file: StoredFile, advance: Advance, block_bytes: int = BLOCK_BYTES
) -> npt.NDArray[np.int64]:
    """Read a file once and find its lines that are not blank.

    Args:
        file: The file.
        advance: Called with the size of each block that is done.
        block_bytes: Size of the blocks; memory is a few times as much, however long a line is.

    Returns:
        int64[num_lines + 1]: where each starts, then the size of the file.
    """
    scanner = LineScanner()
    for number, block in enumerate(file.blocks(block_bytes)):
        if not number and (codec := codec_in(block)) is not None:
            raise DatasetError(f"{file.url!r} is compressed: give it the extension {codec!r}")
        scanner.feed(np.frombuffer(block, np.uint8))
        advance(len(block))
    return scanner.finish()


def find_decoded_lines(file: StoredFile, codec: str, advance: Advance) -> Index:
    """Decode a file once and find its lines that are not blank, and its blocks.

    Args:
        file: The file.
        codec: Its compression.
        advance: Called with the size of each part that was read.

    Raises:
        DatasetError: The file is cut short, damaged or not of this codec.
    """

    def read(start: int, stop: int) -> bytes:
        advance(stop - start)
        return file.read(start, stop)

    scanner, blocks, num_sound = LineScanner(), BlockTable(), 0
    try:
        for part, start in decode(codec, read, file.num_bytes):
            if blocks.add(start, len(part)):
                num_sound = scanner.num_found
            scanner.feed(np.frombuffer(part, np.uint8))
    except CodecError as error:
        all_is_good = error.is_cut or error.start != blocks.member
        num_good = scanner.num_found if all_is_good else num_sound
        good = f"the last good record is {num_good - 1}" if num_good else "no record before is good"
        raise DatasetError(
            f"{file.url!r} cannot be decoded: {error}; {good}. Restore the file or move it away"
        ) from None
    return Index(scanner.finish(), blocks.finish(file.num_bytes))


def windows(ranges: Ranges, stop: int) -> Iterator[bytes]:
    """Bytes [0, stop) in parts of bounded size."""
    for start in range(0, stop, BLOCK_BYTES):
        end = min(start + BLOCK_BYTES, stop)
        yield from ranges.read(np.array([start], np.int64), np.array([end], np.int64))


def line_number(ranges: Ranges, start: int) -> int:
    """Number of the line (blank ones count, the first is 1) that starts at a byte."""
    return 1 + sum(part.count(b"\n") for part in windows(ranges, start))


class LineScanner:
    """Finds where lines that are not blank start, in the bytes of a file that come part by part.

    Attributes:
        num_found: lines found so far that end with a newline.
    """

    def __init__(self) -> None:
        self.num_found = 0
        self._head: npt.NDArray[np.uint8] | None = np.empty(0, np.uint8)  # may be a part of a mark
        self._position = 0
        self._line_start = 0  # of the line that the last part left unfinished
        self._line_is_filled = False
        self._found: list[npt.NDArray[np.int64]] = []

    def feed(self, part: npt.NDArray[np.uint8]) -> None:
        """Take the next bytes, uint8[n]."""
        if self._head is not None:
            part = np.concatenate((self._head, part)) if len(self._head) else part
            if len(part) < len(BOM) and BOM.startswith(bytes(part)):
                self._head = part
                return
            part = self._without_mark(part)
        if len(part):
            self._scan(part)

    def _without_mark(self, part: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """The first bytes of the file, but for a mark."""
        self._head = None
        if bytes(part[: len(BOM)]) != BOM:
            return part
        self._position = self._line_start = len(BOM)
        return part[len(BOM) :]

    def _scan(self, block: npt.NDArray[np.uint8]) -> None:
        newlines = np.flatnonzero(block == NEWLINE)
        # Line k of this block is block[cuts[k] : cuts[k + 1]]; the first continues an earlier one,
        # the last may be unfinished, or empty when the block ends with a newline.
        cuts = np.concatenate(([0], newlines + 1))
        is_filled = _are_filled(block, cuts)
        is_filled[0] |= self._line_is_filled
        starts = cuts + self._position
        starts[0] = self._line_start
        self._found.append(starts[:-1][is_filled[:-1]])
        self.num_found += len(self._found[-1])
        self._line_start, self._line_is_filled = int(starts[-1]), bool(is_filled[-1])
        self._position += len(block)

    def finish(self) -> npt.NDArray[np.int64]:
        """Return the starts found, then the position after the last byte."""
        if self._head is not None and len(self._head):
            self._scan(self._without_mark(self._head))
        last = [self._line_start] if self._line_is_filled else []
        return np.concatenate([*self._found, np.array([*last, self._position], dtype=np.int64)])


def _are_filled(block: npt.NDArray[np.uint8], cuts: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """For each line of a block, whether it holds anything but blanks."""
    ends_with_newline = cuts[-1] == len(block)  # the last line is empty
    starts = cuts[:-1] if ends_with_newline else cuts
    is_filled = ~_IS_BLANK[block[starts]]
    if not is_filled.all():  # rare: look into lines that begin with a blank, all at once
        is_filled = np.logical_or.reduceat(~_IS_BLANK[block], starts)
    return np.append(is_filled, False) if ends_with_newline else is_filled
