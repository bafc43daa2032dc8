"""Compression by extension: decoders that give the bytes of a file in bounded steps.

A compressed file is a row of members (gzip's word; zstd says frames). Each is decoded without the
others, and what they hold together is one stream of bytes. A codec is one module here and one entry
of `CODECS`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

CODECS = {
    ".gz": "zephon_torch.io.codecs.gzip",
    ".zst": "zephon_torch.io.codecs.zstd",
}

MAGICS = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}


class CodecError(Exception):
    """Why bytes cannot be decoded, in words; never leaves this package.

    Attributes:
        start: position in the file of the member that is to blame; those before are right.
        is_cut: the file ends too early; what was decoded of this member is right, too.
    """

    def __init__(self, reason: str, start: int, *, is_cut: bool = False) -> None:
        super().__init__(reason)
        self.start, self.is_cut = start, is_cut


class Compressed:
    """Compressed bytes of one file, taken one after the other and read in larger steps.

    Args:
        read: returns bytes [start, stop) of the file.
        start: position in the file of the first byte.
        stop: position behind the last byte.
        step_bytes: how much is read at once.
        buffer: bytes from `start` on that were read already.

    Attributes:
        position: of the next byte; may be moved back over bytes that the last `take` gave, and
            forward to any place.
    """

    def __init__(
        self,
        read: Callable[[int, int], bytes],
        start: int,
        stop: int,
        step_bytes: int,
        buffer: bytes = b"",
    ) -> None:
        self.position = start
        self.stop = stop
        self._read = read
        self._step_bytes = step_bytes
        self._buffer, self._buffer_start = buffer, start

    def take(self, num_bytes: int) -> bytes:
        """Return the next bytes; fewer than asked for at the end only."""
        if self.position + num_bytes > self._buffer_start + len(self._buffer):
            self._fill(num_bytes)
        at = self.position - self._buffer_start
        part = self._buffer[at : at + num_bytes]
        self.position += len(part)
        return part

    def _fill(self, num_bytes: int) -> None:
        rest = self._buffer[self.position - self._buffer_start :]
        start = self.position + len(rest)
        stop = min(start + max(self._step_bytes, num_bytes), self.stop)
        self._buffer = rest + self._read(start, stop) if start < stop else rest
        self._buffer_start = self.position


class Decoder(Protocol):
    """Decodes consecutive members.

    Attributes:
        start: position in the compressed file of the member that the last bytes came from.
        num_bytes: memory that it needs, roughly.
    """

    start: int
    num_bytes: int

    def read(self, limit: int) -> bytes:
        """Return the next decoded bytes, of one member; at most `limit`, none at the end only.

        Raises:
            CodecError: The bytes are cut short, damaged or of something else.
        """
        ...


def codec_of(path: str) -> str | None:
    """Return the extension of compression that a path ends with, None without one. Pure."""
    lower = path.lower()
    return next((extension for extension in CODECS if lower.endswith(extension)), None)


def codec_in(head: bytes) -> str | None:
    """Return the extension of compression that the first bytes of a file tell of. Pure."""
    return next((codec for codec, magic in MAGICS.items() if head.startswith(magic)), None)


def check_codec(codec: str) -> None:
    """See whether files of a codec can be decoded here.

    Raises:
        ConfigurationError: A package is not installed.
    """
    import_module(CODECS[codec]).check()


def open_decoder(codec: str, source: Compressed) -> Decoder:
    """Decode members from the source's position on, which must be the start of one."""
    decoder: Any = import_module(CODECS[codec]).Decoder
    made: Decoder = decoder(source)
    return made
