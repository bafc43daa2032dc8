"""Blocks of a compressed file: members, or runs of small ones, that are decoded without the others.

Whoever wants a record decodes the blocks it lies in, so blocks should be small; but a table of
members that hold one record each would be as large as the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from zephon_torch.io.codecs import Compressed, open_decoder
from zephon_torch.io.index.sidecar import Blocks
from zephon_torch.io.storage.files import BLOCK_BYTES

_MIN_BLOCK_BYTES = 32 << 10  # decoded; a block of bgzip, 64 KiB, stays one
_STEP_BYTES = 256 << 10


def decode(
    codec: str, read: Callable[[int, int], bytes], num_bytes: int
) -> Iterator[tuple[bytes, int]]:
    """Decode a whole file in bounded steps.

    Args:
        codec: Its compression.
        read: Returns bytes [start, stop) of it.
        num_bytes: Its size.

    Yields:
        Some decoded bytes of one member, and the position of that member in the file.

    Raises:
        CodecError: The file is cut short, damaged or not of this codec.
    """
    decoder = open_decoder(codec, Compressed(read, 0, num_bytes, BLOCK_BYTES))
    while part := decoder.read(_STEP_BYTES):
        yield part, decoder.start


class BlockTable:
    """Collects the blocks of a file that is decoded from its start.

    Attributes:
        member: position in the file of the member that the last bytes came from.
    """

    def __init__(self) -> None:
        self.member = 0
        self._num_decoded = 0
        self._blocks = [(0, 0)]

    def add(self, member: int, num_bytes: int) -> bool:
        """Take note of decoded bytes of the member that starts at a position in the file.

        Returns:
            Whether the member is another than before, so that those before are whole.
        """
        is_new = member != self.member
        if is_new and self._num_decoded - self._blocks[-1][1] >= _MIN_BLOCK_BYTES:
            self._blocks.append((member, self._num_decoded))
        self.member = member
        self._num_decoded += num_bytes
        return is_new

    def finish(self, num_bytes: int) -> Blocks:
        """Return int64[num_blocks + 1, 2] as ``sidecar.py`` describes, of a file of this size."""
        return np.array([*self._blocks, (num_bytes, self._num_decoded)], dtype=np.int64)
