"""gzip (RFC 1952): any number of members; also bgzip's, which are small.

Zeros behind a member are padding, as for gzip itself.
"""

from __future__ import annotations

import zlib
from typing import Any, NoReturn

from zephon_torch.io.codecs import MAGICS, CodecError, Compressed

_MAGIC = MAGICS[".gz"]
_WITH_GZIP_HEADER = 16 + zlib.MAX_WBITS
_INPUT_BYTES = 64 << 10


def check() -> None:
    """Nothing is missing: zlib comes with Python."""


class Decoder:
    """See `codecs.Decoder`. zlib compares checksum and length at the end of each member."""

    num_bytes = 64 << 10  # a window of 32 KiB and tables

    def __init__(self, source: Compressed) -> None:
        self._source = source
        self._first = self.start = source.position
        self._member: Any = None

    def read(self, limit: int) -> bytes:
        """Decode a part of a member; empty ones are passed over."""
        while self._member is not None or self._begin():
            if decoded := self._decode(limit):
                return decoded
        return b""

    def _begin(self) -> bool:
        """Go to the next member; False at the end."""
        is_first = self._source.position == self._first
        magic = self._peek()
        if magic != _MAGIC and not is_first:
            self._skip_padding()
            magic = self._peek()
        self.start = self._source.position
        if not magic and not is_first:
            return False
        if not magic or not _MAGIC.startswith(magic):
            self._refuse(magic, is_first)
        self._member = zlib.decompressobj(_WITH_GZIP_HEADER)
        return True

    def _peek(self) -> bytes:
        magic = self._source.take(len(_MAGIC))
        self._source.position -= len(magic)
        return magic

    def _skip_padding(self) -> None:
        rest = b""
        while not rest and (padding := self._source.take(_INPUT_BYTES)):
            rest = padding.lstrip(b"\0")
            self._source.position -= len(rest)

    def _refuse(self, magic: bytes, is_first: bool) -> NoReturn:
        if not is_first:
            raise CodecError(f"what follows at byte {self.start:,} is not gzip", self.start)
        found = f"it begins with {magic!r}" if magic else "it is empty"
        raise CodecError(f"{found}, which is not gzip", self.start)

    def _where(self) -> str:
        return f"the gzip member that begins at byte {self.start:,}"

    def _decode(self, limit: int) -> bytes:
        data = self._source.take(_INPUT_BYTES)
        try:
            decoded: bytes = self._member.decompress(data, limit)
        except zlib.error as error:
            reason = str(error).partition(": ")[2] or str(error)
            raise CodecError(f"{self._where()} is damaged ({reason})", self.start) from None
        # At the end of a member either or both hold the rest.
        is_end = self._member.eof
        rest = self._member.unused_data if is_end else self._member.unconsumed_tail
        self._source.position -= len(rest)
        if is_end:
            self._member = None
        elif not data and not decoded:
            raise CodecError(f"it ends inside {self._where()}", self.start, is_cut=True)
        return decoded
