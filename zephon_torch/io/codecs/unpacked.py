"""Compressed files of which any part is wanted: unpacked whole, in memory, the last few kept.

Each thread keeps at most as many bytes as it is told to, and always the file that it read last.
"""

from __future__ import annotations

import gzip
import io
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import DatasetError
from zephon_torch.io.storage.files import StoredFile
from zephon_torch.support.extras import require
from zephon_torch.support.lru import Recent

CODECS = ("zstd", "gz")


def check_codec(codec: str) -> None:
    """Make sure that a codec of `CODECS` can be used here.

    Raises:
        ConfigurationError: Its package is not installed.
    """
    if codec == "zstd":
        _zstandard()


_kept: Recent[bytes] = Recent()


class UnpackedFile:
    """`Ranges` of the content of a compressed file.

    Args:
        file: The file as it was when its dataset was made.
        codec: One of `CODECS`.
        num_bytes: Size of the content; a file with another is refused, and no more is unpacked.
        keep_bytes: How much this thread may keep unpacked, over all files.
    """

    def __init__(self, file: StoredFile, codec: str, num_bytes: int, keep_bytes: int) -> None:
        file.check_unchanged()
        self._file = file
        self._codec = codec
        self._num_bytes = num_bytes
        self._keep_bytes = keep_bytes
        self._is_closed = False

    def read(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> list[bytes]:
        """Bytes [starts[i], stops[i]) of the content for every i, in that order."""
        if self._is_closed:
            raise DatasetError(f"the reader of {self._file.url!r} is closed")
        content = self._content()
        return [content[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]

    def close(self) -> None:
        """Refuse further reads; what is unpacked stays for other readers until it makes room."""
        self._is_closed = True

    def _content(self) -> bytes:
        file = self._file
        key = (file.storage.identity(file.path), file.num_bytes, file.stamp)
        content = _kept.get(key)
        if content is None:
            content = self._unpack()
            _kept.put(key, content, len(content), self._keep_bytes)
        return content

    def _unpack(self) -> bytes:
        self._file.check_unchanged()
        packed = io.BytesIO(b"".join(self._file.blocks()))
        try:
            with _open_codec(self._codec, packed) as stream:
                content = bytes(stream.read(self._num_bytes + 1))
        except Exception as error:
            if not isinstance(error, _errors_of(self._codec)):
                raise
            raise DatasetError(
                f"{self._file.url!r} cannot be unpacked ({self._codec}): {error}; restore it"
            ) from error
        if len(content) != self._num_bytes:
            more = " or more" if len(content) > self._num_bytes else ""
            raise DatasetError(
                f"{self._file.url!r} unpacks to {len(content):,} bytes{more}, {self._num_bytes:,} "
                "expected: it was cut short or does not belong to its index"
            )
        return content


def _open_codec(codec: str, packed: io.BytesIO) -> Any:
    if codec == "gz":
        return gzip.GzipFile(fileobj=packed)
    return _zstandard().ZstdDecompressor().stream_reader(packed, read_across_frames=True)


def _errors_of(codec: str) -> tuple[type[Exception], ...]:
    if codec == "gz":
        return (OSError, EOFError, zlib.error)
    return (_zstandard().ZstdError,)


def _zstandard() -> Any:
    return require("zstandard", "zstd", "reading files compressed with zstd")
