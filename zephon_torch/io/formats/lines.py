r"""Where the lines of a text file are: found in numpy, block by block.

Lines end at ``\n`` and nowhere else. Lines of spaces, tabs and carriage returns are blank and not
counted; blank lines belong to the line before them. A UTF-8 byte order mark at the start of the
file is no part of its first line.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from zephon_torch.io.files import BLOCK_BYTES, StoredFile
from zephon_torch.io.index import Advance

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
    scanner = None
    for block in file.blocks(max(block_bytes, len(BOM))):
        skip = len(BOM) if scanner is None and block.startswith(BOM) else 0
        scanner = scanner or LineScanner(skip)
        scanner.feed(np.frombuffer(block, np.uint8)[skip:])
        advance(len(block))
    return (scanner or LineScanner(0)).finish()


def line_number(file: StoredFile, start: int) -> int:
    """Number of the line (blank ones count, the first is 1) that starts at a byte."""
    before = replace(file, num_bytes=start)
    return 1 + sum(block.count(b"\n") for block in before.blocks())


class LineScanner:
    """Finds where lines that are not blank start, in bytes that come block by block.

    Args:
        position: Byte position of the first block in its file.
    """

    def __init__(self, position: int) -> None:
        self._position = position
        self._line_start = position  # of the line that the last block left unfinished
        self._line_is_filled = False
        self._found: list[npt.NDArray[np.int64]] = []

    def feed(self, block: npt.NDArray[np.uint8]) -> None:
        """Take the next bytes, uint8[n]."""
        if not len(block):
            return
        newlines = np.flatnonzero(block == NEWLINE)
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
        """Return the starts found, then the position after the last byte."""
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
