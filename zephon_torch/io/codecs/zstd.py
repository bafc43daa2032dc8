"""Zstandard (RFC 8878): any number of frames, and skippable frames anywhere.

The seekable format is that: its table is a skippable frame, which is not needed here. A frame is a
row of blocks of at most 128 KiB decoded. They are told apart here and given to the library one at a
time, so that no input, however dense, is decoded to more than that at once.
"""

from __future__ import annotations

from typing import Any, NoReturn

from zephon_torch.io.codecs import MAGICS, CodecError, Compressed
from zephon_torch.support.extras import require

_MAGIC = MAGICS[".zst"]
_SKIPPABLE_MAGICS = range(0x184D2A50, 0x184D2A60)
_MAX_HEADER_BYTES = 18
_BLOCK_HEADER_BYTES = 3
_RAW, _RLE, _COMPRESSED = 0, 1, 2
_CHECKSUM_BYTES = 4
_MAX_BLOCK_BYTES = 128 << 10
_MAX_WINDOW_BYTES = 128 << 20  # zstd's own limit, unless it is told otherwise


def check() -> None:
    """Raise ConfigurationError where the library is not installed."""
    _library()


class Decoder:
    """See `codecs.Decoder`. The library compares size and checksum where a frame has them."""

    def __init__(self, source: Compressed) -> None:
        self._zstd = _library()
        self._source = source
        self._first = self.start = source.position
        self._frame: Any = None
        self._has_checksum = False
        self._ready = b""  # decoded, not given out yet
        self.num_bytes = _MAX_BLOCK_BYTES

    def read(self, limit: int) -> bytes:
        """Decode a part of a frame; empty and skippable ones are passed over."""
        while not self._ready and (self._frame is not None or self._begin()):
            self._ready = self._decode_block()
        decoded, self._ready = self._ready[:limit], self._ready[limit:]
        return decoded

    def _begin(self) -> bool:
        """Go to the next frame that is not skippable; False at the end."""
        while True:
            self.start = self._source.position
            header = self._source.take(_MAX_HEADER_BYTES)
            if not header and self.start > self._first:
                return False
            if header.startswith(_MAGIC):
                self._open_frame(header)
                return True
            if int.from_bytes(header[:4], "little") not in _SKIPPABLE_MAGICS:
                self._refuse(header)
            self._source.position = self.start + 8 + int.from_bytes(header[4:8], "little")
            if len(header) < 8 or self._source.position > self._source.stop:
                self._say_cut()

    def _open_frame(self, header: bytes) -> None:
        try:
            parameters = self._zstd.get_frame_parameters(header)
            size = self._zstd.frame_header_size(header)
        except self._zstd.ZstdError as error:
            if len(header) < _MAX_HEADER_BYTES:
                self._say_cut()
            self._say_damaged(error)
        if parameters.dict_id:
            reason = f"it needs the zstd dictionary {parameters.dict_id}; compress without"
            raise CodecError(reason, self.start)
        if parameters.window_size > _MAX_WINDOW_BYTES:
            needs = f"decoding needs {parameters.window_size:,} bytes of memory"
            reason = f"{needs}, more than {_MAX_WINDOW_BYTES:,}; compress without --long"
            raise CodecError(reason, self.start)
        self._has_checksum = parameters.has_checksum
        self.num_bytes = _MAX_BLOCK_BYTES + parameters.window_size
        self._frame = self._zstd.ZstdDecompressor().decompressobj()
        self._source.position = self.start + size
        self._feed(header[:size])

    def _decode_block(self) -> bytes:
        """Decode the next block of the frame."""
        head = self._take(_BLOCK_HEADER_BYTES)
        fields = int.from_bytes(head, "little")
        is_last, kind, size = fields & 1, fields >> 1 & 3, fields >> 3
        if size > _MAX_BLOCK_BYTES or kind not in (_RAW, _RLE, _COMPRESSED):
            self._say_damaged("no block follows where one should")
        body = self._take(1 if kind == _RLE else size)
        end = self._take(_CHECKSUM_BYTES) if is_last and self._has_checksum else b""
        decoded = self._feed(head + body + end)
        if is_last:
            self._frame = None
        return decoded

    def _take(self, num_bytes: int) -> bytes:
        taken = self._source.take(num_bytes)
        if len(taken) < num_bytes:
            self._say_cut()
        return taken

    def _feed(self, data: bytes) -> bytes:
        try:
            decoded: bytes = self._frame.decompress(data)
        except self._zstd.ZstdError as error:
            self._say_damaged(error)
        return decoded

    def _refuse(self, header: bytes) -> NoReturn:
        magic = header[: len(_MAGIC)]
        if self.start == self._first:
            found = f"it begins with {magic!r}" if magic else "it is empty"
            raise CodecError(f"{found}, which is not zstd", self.start)
        if _MAGIC.startswith(magic):
            self._say_cut()
        raise CodecError(f"what follows at byte {self.start:,} is not zstd", self.start)

    def _say_cut(self) -> NoReturn:
        raise CodecError(f"it ends inside {self._where()}", self.start, is_cut=True)

    def _say_damaged(self, reason: object) -> NoReturn:
        text = str(reason).rpartition(": ")[2].lower()
        raise CodecError(f"{self._where()} is damaged ({text})", self.start) from None

    def _where(self) -> str:
        return f"the zstd frame that begins at byte {self.start:,}"


def _library() -> Any:
    return require("zstandard", "zstd", "Reading .zst files")
