"""Byte ranges of what a compressed file holds: only the blocks that are needed are decoded.

No byte of a block is given out before the block was decoded to its end, where its checksums are:
what a damaged block decodes to before its first error may look like data. A block of up to 1 MiB is
decoded to its end each time. A larger one is so once by each reader, before its first byte is used;
later it goes on where it stopped, and only what lies before that needs the block decoded from
its start again. (Decoding 8 MiB each time would be slow where many readers take turns: what a
thread keeps does not hold a block of each.) After an error a file counts as never verified.

What was decoded lately is kept for each thread, in pieces, within limits that all readers of the
thread share.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import DatasetError
from zephon_torch.io.codecs import CodecError, Compressed, Decoder, codec_of, open_decoder
from zephon_torch.io.codecs.decoded_files import LARGE_BLOCK_BYTES, open_whole
from zephon_torch.io.index.index import Blocks
from zephon_torch.io.storage.files import StoredFile
from zephon_torch.io.storage.ranges import Ranges
from zephon_torch.support.lru import Recent

# Small, so that a thread keeps one for each of the readers that it may have open.
PIECE_BYTES = 256 << 10
_MAX_PIECES_BYTES = 64 << 20  # per thread
_MAX_DECODERS_BYTES = 128 << 20  # per thread
_ALWAYS_WHOLE_BYTES = 1 << 20  # of a block, decoded
_STEP_BYTES = 1 << 20  # of a large block that are read at once
_MAX_AHEAD_BYTES = 16 << 20  # of small blocks that are requested at once

_tokens = itertools.count()

_pieces: Recent[bytes] = Recent()
_decoders: Recent[tuple[int, int, Decoder]] = Recent()


def open_decoded(file: StoredFile, compressed: Ranges, blocks: Blocks) -> Ranges:
    """Ranges of what a compressed file holds.

    Args:
        file: The file, with an extension of compression.
        compressed: Its own bytes; closed with what is returned.
        blocks: Of its index.
    """
    codec = codec_of(file.path)
    assert codec is not None
    try:
        whole = open_whole(file, codec, compressed, blocks)
    except CodecError as error:
        _refuse(file, str(error))
    if whole is None:
        return DecodedRanges(file, codec, compressed, blocks)
    compressed.close()
    return whole


class DecodedRanges:
    """Random access to the decoded bytes of one file.

    Args:
        file: The compressed file.
        codec: Its compression.
        compressed: Its own bytes; closed with this object.
        blocks: As ``sidecar.py`` describes.
    """

    def __init__(self, file: StoredFile, codec: str, compressed: Ranges, blocks: Blocks) -> None:
        self._file = file
        self._codec = codec
        self._compressed = compressed
        self._blocks = blocks
        self._starts = np.ascontiguousarray(blocks[:-1, 1])
        self._token = next(_tokens)
        self._verified: set[int] = set()  # larger blocks that were sound to their end
        self._wanted: npt.NDArray[np.int64] = np.empty(0, np.int64)  # blocks of this read
        self._ahead: dict[int, bytes] = {}  # compressed bytes of some of them
        self._ahead_stop = 0  # the block behind the last one that was requested

    def read(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> list[bytes]:
        """Decoded bytes [starts[i], stops[i]), touched in the order of the file."""
        is_filled = stops > starts
        order = np.flatnonzero(is_filled)[starts[is_filled].argsort(kind="stable")]
        self._wanted = self._blocks_of(starts[order], stops[order])
        parts = [b""] * len(starts)
        try:
            self._fill(parts, order, starts[order], stops[order])
        except CodecError as error:
            self._verified.clear()
            _refuse(self._file, str(error))
        finally:
            self._ahead, self._ahead_stop = {}, 0
        return parts

    def close(self) -> None:
        """Let go of the file and of what was decoded of it."""
        self._compressed.close()
        _pieces.drop(self._token)
        _decoders.drop(self._token)

    def _blocks_of(
        self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.int64]:
        """Numbers of the blocks that ranges touch, ascending."""
        first = self._starts.searchsorted(starts, "right") - 1
        last = self._starts.searchsorted(stops, "left") - 1
        marks = np.zeros(len(self._starts) + 1, np.int64)
        np.add.at(marks, first, 1)
        np.add.at(marks, last + 1, -1)
        return np.flatnonzero(marks.cumsum())

    def _fill(
        self,
        parts: list[bytes],
        places: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        stops: npt.NDArray[np.int64],
    ) -> None:
        """Put the bytes of ranges, in the order of the file, where `places` says."""
        blocks = self._starts.searchsorted(starts, "right") - 1
        numbers, skips = np.divmod(starts - self._starts[blocks], PIECE_BYTES)
        piece, at = b"", (-1, -1)
        columns = (places, blocks, numbers, skips, stops - starts)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for place, block, number, skip, size in rows:
            if at != (block, number):
                piece, at = self._piece(block, number), (block, number)
            part = piece[skip : skip + size]
            parts[place] = part if len(part) == size else self._longer(part, at, size)

    def _longer(self, part: bytes, at: tuple[int, int], size: int) -> bytes:
        """The rest of a range that begins with the last bytes of a piece."""
        parts, (block, number) = [part], at
        while (left := size - len(part)) > 0:
            number += 1
            if number * PIECE_BYTES >= self._blocks[block + 1, 1] - self._blocks[block, 1]:
                block, number = block + 1, 0
            part = self._piece(block, number)[:left]
            parts.append(part)
            size = left
        return b"".join(parts)

    def _piece(self, block: int, number: int) -> bytes:
        """Bytes [number * PIECE_BYTES, ...) of a block."""
        piece = _pieces.get((self._token, block, number))
        if piece is not None:
            return piece
        size = self._size(block)
        if size > _ALWAYS_WHOLE_BYTES and block in self._verified:
            return self._decode_up_to(block, number)
        if size <= LARGE_BLOCK_BYTES:
            return self._decode_block(block)[number]
        self._verify(block)
        return self._decode_up_to(block, number)

    def _size(self, block: int) -> int:
        """Decoded bytes of a block."""
        return int(self._blocks[block + 1, 1] - self._blocks[block, 1])

    def _decode_block(self, block: int) -> list[bytes]:
        """All pieces of a block; none is kept before all are known to be right."""
        pieces = list(self._pieces_of(block))
        for number, piece in enumerate(pieces):
            self._keep(block, number, piece)
        if self._size(block) > _ALWAYS_WHOLE_BYTES:
            self._verified.add(block)
        return pieces

    def _verify(self, block: int) -> None:
        """Decode a block that is too large to be kept, for its checksums alone."""
        for _ in self._pieces_of(block):
            pass
        self._verified.add(block)

    def _pieces_of(self, block: int) -> Iterator[bytes]:
        """Decode a block to its end; all of it is right only when this ends."""
        size, decoder = self._size(block), self._open(block)
        for at in range(0, size, PIECE_BYTES):
            yield self._next_piece(decoder, min(PIECE_BYTES, size - at))
        self._finish(decoder)

    def _decode_up_to(self, block: int, number: int) -> bytes:
        """A piece of a verified block; the pieces before it are decoded on the way."""
        decoder, at = self._decoder(block, number)
        size, piece = self._size(block), b""
        while at <= number:
            piece = self._next_piece(decoder, min(PIECE_BYTES, size - at * PIECE_BYTES))
            self._keep(block, at, piece)
            at += 1
        if at * PIECE_BYTES < size:
            kept = block, at, decoder
            _decoders.put((self._token,), kept, decoder.num_bytes, _MAX_DECODERS_BYTES)
        else:
            self._finish(decoder)
        return piece

    def _keep(self, block: int, number: int, piece: bytes) -> None:
        _pieces.put((self._token, block, number), piece, len(piece), _MAX_PIECES_BYTES)

    def _finish(self, decoder: Decoder) -> None:
        """Go behind the end of a block: only there its last checksum is compared."""
        if decoder.read(1):
            _refuse(self._file, "the index does not fit")

    def _next_piece(self, decoder: Decoder, num_bytes: int) -> bytes:
        parts, left = [], num_bytes
        while left and (part := decoder.read(left)):
            parts.append(part)
            left -= len(part)
        if left:
            _refuse(self._file, "the index does not fit")
        return b"".join(parts)

    def _decoder(self, block: int, number: int) -> tuple[Decoder, int]:
        """A decoder of a block, and the number of the piece that it gives next."""
        kept = _decoders.pop((self._token,))
        if kept is not None and kept[0] == block and kept[1] <= number:
            return kept[2], kept[1]
        return self._open(block), 0

    def _open(self, block: int) -> Decoder:
        """A decoder that begins a block."""
        start, stop = self._blocks[block : block + 2, 0].tolist()
        if block >= self._ahead_stop:
            self._request(block)
        source = Compressed(self._part, start, stop, _STEP_BYTES, self._ahead.get(block, b""))
        return open_decoder(self._codec, source)

    def _part(self, start: int, stop: int) -> bytes:
        (part,) = self._compressed.read(np.array([start], np.int64), np.array([stop], np.int64))
        return part

    def _request(self, block: int) -> None:
        """Ask for this and the next wanted blocks at once, but for large ones and those decoded."""
        blocks = self._wanted[self._wanted.searchsorted(block) :]
        sizes = self._blocks[blocks + 1, 0] - self._blocks[blocks, 0]
        count = max(1, int(sizes.cumsum().searchsorted(_MAX_AHEAD_BYTES, "right")))
        blocks, sizes = blocks[:count], sizes[:count]
        is_new = [(self._token, number, 0) not in _pieces for number in blocks.tolist()]
        chosen = blocks[(sizes <= _STEP_BYTES) & np.array(is_new, np.bool_)]
        self._ahead_stop = int(blocks[-1]) + 1
        self._ahead = {}
        if len(chosen):
            parts = self._compressed.read(self._blocks[chosen, 0], self._blocks[chosen + 1, 0])
            self._ahead = dict(zip(chosen.tolist(), parts, strict=True))


def _refuse(file: StoredFile, reason: str) -> NoReturn:
    raise DatasetError(
        f"{file.url!r} cannot be decoded: {reason}; it was sound when its index was built: restore "
        "the file, or delete its index and make the dataset anew"
    ) from None
