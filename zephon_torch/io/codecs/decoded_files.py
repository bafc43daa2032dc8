"""Compressed files of large blocks, decoded as a whole once per machine, within a limit of bytes.

A plain gzip file of 1 GB is one block: any record takes decoding all that lies before it. What is
decoded is kept in ``decoded`` in the cache folder (see ``index.py``) and mapped from there by all
processes. ``$ZEPHON_DECODED_LIMIT`` is the number of bytes that it may take, 16 GiB by default; 0
keeps nothing. Files that readers have open stay; where all the room is theirs the next file is not
kept, and a `SlowDecodingWarning` says so.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import ConfigurationError, DatasetError
from zephon_torch.io.cache.shard_cache import Held, ShardCache
from zephon_torch.io.codecs.blocks import decode
from zephon_torch.io.index.index import Blocks, cache_folder
from zephon_torch.io.storage.files import StoredFile
from zephon_torch.io.storage.local import LocalStorage
from zephon_torch.io.storage.ranges import MappedFile, Ranges

LIMIT_VARIABLE = "ZEPHON_DECODED_LIMIT"
_DEFAULT_LIMIT_BYTES = 16 << 30
LARGE_BLOCK_BYTES = 8 << 20  # decoded


class SlowDecodingWarning(UserWarning):
    """A file of large blocks is not kept decoded: reading it out of order decodes it many times."""


class WholeFile:
    """A decoded file, mapped and held."""

    def __init__(self, held: Held, num_bytes: int) -> None:
        folder, name = os.path.split(held.path)
        self._held = held
        self._mapped = MappedFile(StoredFile(LocalStorage(folder), name, num_bytes, 0), held.path)

    def read(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> list[bytes]:
        """Slices of the map."""
        return self._mapped.read(starts, stops)

    def close(self) -> None:
        """Unmap the file and let it go."""
        self._mapped.close()
        self._held.close()


def open_whole(file: StoredFile, codec: str, compressed: Ranges, blocks: Blocks) -> Ranges | None:
    """Decode a file as a whole, if its blocks are large and there is room for it.

    Args:
        file: The file.
        codec: Its compression.
        compressed: Its own bytes, read to decode them.
        blocks: Of its index.

    Returns:
        Ranges of the decoded bytes; None where the blocks should be decoded as they are needed.

    Raises:
        CodecError: The file is damaged.
        ConfigurationError: The limit is not a number.
    """
    if int(np.diff(blocks[:, 1]).max()) <= LARGE_BLOCK_BYTES:
        return None
    limit_bytes = _limit_bytes()
    num_bytes = int(blocks[-1, 1])
    held, reason = None, f"{limit_bytes:,} bytes are the limit"
    try:
        if num_bytes <= limit_bytes:
            held = _hold(file, codec, compressed, num_bytes, limit_bytes)
            reason += ", and readers have all of them open"
    except (ConfigurationError, OSError) as error:
        reason = str(error)
    if held is not None:
        return WholeFile(held, num_bytes)
    _warn_once(file.url, num_bytes, reason)
    return None


def _hold(
    file: StoredFile, codec: str, compressed: Ranges, num_bytes: int, limit_bytes: int
) -> Held | None:
    def read(start: int, stop: int) -> bytes:
        (part,) = compressed.read(np.array([start], np.int64), np.array([stop], np.int64))
        return part

    def make(stream: BinaryIO) -> None:
        for part, _ in decode(codec, read, file.num_bytes):
            stream.write(part)
        file.check_unchanged()  # the key says what it was

    folder = os.path.join(cache_folder(), "decoded")
    identity = file.storage.identity(file.path)
    key = f"{codec} {file.num_bytes} {file.stamp} {identity}"
    try:
        return _open_cache(folder, limit_bytes).hold(key, num_bytes, make, file.url)
    except DatasetError as error:
        if isinstance(error.__cause__, OSError):  # the disk is full
            raise error.__cause__ from error
        raise


def _limit_bytes() -> int:
    text = os.environ.get(LIMIT_VARIABLE, "").strip()
    if text and not text.isdecimal():
        raise ConfigurationError(f"{LIMIT_VARIABLE} must be a number of bytes, got {text!r}")
    return int(text) if text else _DEFAULT_LIMIT_BYTES


@cache
def _open_cache(folder: str, limit_bytes: int) -> ShardCache:
    return ShardCache(folder, limit_bytes)


_warned = False


def _warn_once(url: str, num_bytes: int, reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"{url!r}, {num_bytes:,} bytes decoded, is not kept decoded ({reason}): records out of "
            f"order are slow. Set {LIMIT_VARIABLE} to more bytes and ZEPHON_CACHE_DIR to a disk of "
            "this machine, or compress in blocks (bgzip, pzstd)",
            SlowDecodingWarning,
            stacklevel=2,
        )
