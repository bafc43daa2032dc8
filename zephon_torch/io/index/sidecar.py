r"""The bytes of an index sidecar: where every record of one shard starts.

Of a compressed shard the offsets count decoded bytes, and a second table says which blocks of the
file can be decoded without the others.

::

    0    8 bytes   magic  b"ZEPHIDX\n"
    8    uint32    version of this layout, little endian like all numbers here
    12   uint32    length h of the header
    16   h bytes   header: one JSON object, padded with spaces so that 16 + h is a multiple of 64
                     format, format_version   which indexer made it
                     file                     name of the shard, without folders
                     num_bytes, stamp         size and modification stamp of the shard
                     num_samples              n
                     num_blocks               m, null for a shard that is not compressed
                     crc32                    of all that follows
    ...  int64[n + 1]  offsets: record i starts at offsets[i] and ends before offsets[i + 1];
                       offsets[n] is the size of the shard, decoded
    ...  int64[m + 1, 2]  blocks: block i starts at blocks[i, 0] in the file and at blocks[i, 1]
                       in what is decoded of it; blocks[m] holds both sizes

The tables are used through a read-only memory map, so processes on one node share their pages.
This module reads and encodes; only ``index.py`` writes files.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from zephon_torch.io.storage.local import open_regular
from zephon_torch.support import checks

MAGIC = b"ZEPHIDX\n"
VERSION = 2
_PREFIX = struct.Struct("<8sII")
_ALIGNMENT = 64
_MAX_HEADER_BYTES = 1 << 16
_MOST = (checks.MAX_SAMPLES, checks.MAX_SAMPLES, (1 << 32) - 1)  # samples, blocks, crc32


Offsets = npt.NDArray[np.int64]
Blocks = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Index:
    """Index of a shard, as a sidecar holds it.

    Attributes:
        offsets: int64[num_samples + 1].
        blocks: int64[num_blocks + 1, 2]; None for a shard that is not compressed.
    """

    offsets: Offsets
    blocks: Blocks | None = None

    @property
    def tables(self) -> list[npt.NDArray[np.int64]]:
        """In the order in which they are written."""
        return [self.offsets] if self.blocks is None else [self.offsets, self.blocks]


class SidecarError(Exception):
    """Why a sidecar cannot be used, in words; never leaves this package."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The file that a sidecar must have been made from."""

    format: str
    format_version: int
    file: str
    num_bytes: int
    stamp: int


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a sound sidecar."""

    origin: Origin
    num_samples: int
    num_blocks: int | None
    crc32: int
    num_bytes: int  # of the header itself

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the tables that follow."""
        offsets = (self.num_samples + 1,)
        return [offsets] if self.num_blocks is None else [offsets, (self.num_blocks + 1, 2)]


def encode_header(origin: Origin, index: Index) -> bytes:
    """Everything before the tables. Pure."""
    content = asdict(origin) | {
        "num_samples": len(index.offsets) - 1,
        "num_blocks": None if index.blocks is None else len(index.blocks) - 1,
        "crc32": _checksum(index),
    }
    text = json.dumps(content).encode()
    text += b" " * (-(_PREFIX.size + len(text)) % _ALIGNMENT)
    return _PREFIX.pack(MAGIC, VERSION, len(text)) + text


def read_header(path: str, expected: Origin, has_blocks: bool | None = None) -> Header:
    """Read and check everything but the tables themselves.

    Args:
        path: Of the sidecar.
        expected: What it must have been made from.
        has_blocks: Whether it must have a table of blocks; None: it may.

    Raises:
        SidecarError: It is damaged, foreign, or was made from something else than `expected`.
        DatasetError: Something that is no file is in its place.
        OSError: It is not there or cannot be read.
    """
    with open(open_regular(path), "rb", buffering=0) as file:
        start = file.read(_PREFIX.size + 1024)
        size = os.fstat(file.fileno()).st_size
        length = _header_length(start)
        if len(start) < _PREFIX.size + length:
            start += file.read(_PREFIX.size + length - len(start))
    header = _parse_header(start[_PREFIX.size : _PREFIX.size + length], _PREFIX.size + length)
    _compare(header.origin, expected)
    if has_blocks is not None and has_blocks != (header.num_blocks is not None):
        raise SidecarError(
            f"it has {'no' if has_blocks else 'a'} table of blocks, and {expected.file!r} is "
            f"{'compressed' if has_blocks else 'not compressed'}"
        )
    wanted = header.num_bytes + sum(8 * math.prod(shape) for shape in header.shapes)
    if size != wanted:
        raise SidecarError(f"it has {size:,} bytes, {wanted:,} expected")
    return header


def read_index(path: str, expected: Origin, has_blocks: bool | None = None) -> Index:
    """Map the tables, checked in full.

    Returns:
        Arrays that are read-only and backed by a memory map of the sidecar.

    Raises:
        SidecarError: As for `read_header`, or the tables are damaged.
        OSError: It is not there or cannot be read.
    """
    header = read_header(path, expected, has_blocks)
    mapped = np.memmap(path, dtype="<i8", mode="r", offset=header.num_bytes)
    content = mapped.view(np.ndarray)  # indexing the subclass costs microseconds
    cut = header.num_samples + 1
    blocks = None if header.num_blocks is None else content[cut:].reshape(-1, 2)
    index = Index(content[:cut], blocks)
    if _checksum(index) != header.crc32:
        raise SidecarError("the checksum of its tables does not match")
    if fault := find_fault(index, expected.num_bytes):
        raise SidecarError(fault)
    return index


def find_fault(index: Index, num_bytes: int) -> str:
    """Find a fault in an index of a file of this size; "" where there is none. Pure."""
    offsets, blocks = index.offsets, index.blocks
    if blocks is not None:
        before, behind = blocks[:-1], blocks[1:]  # compared, for differences may wrap around
        ascend = bool((behind[:, 0] > before[:, 0]).all() and (behind[:, 1] >= before[:, 1]).all())
        if not ascend or len(blocks) < 2 or blocks[0].any() or blocks[-1, 0] != num_bytes:
            return "its blocks are not ascending from 0 up to the size of the file"
        num_bytes = int(blocks[-1, 1])
    ascend = bool((offsets[1:] > offsets[:-1]).all())
    if not ascend or offsets[0] < 0 or offsets[-1] != num_bytes:
        return "its offsets are not ascending up to the size of the file"
    return ""


def _checksum(index: Index) -> int:
    crc32 = 0
    for table in index.tables:
        crc32 = zlib.crc32(table.astype("<i8", copy=False).data, crc32)
    return crc32


def _header_length(start: bytes) -> int:
    if len(start) < _PREFIX.size:
        raise SidecarError(f"it has only {len(start)} bytes")
    magic, version, length = _PREFIX.unpack_from(start)
    if magic != MAGIC:
        raise SidecarError("it is not an index of this package")
    if version != VERSION:
        raise SidecarError(f"its layout has version {version}, {VERSION} expected")
    if length > _MAX_HEADER_BYTES:
        raise SidecarError(f"its header claims {length:,} bytes")
    return int(length)


def _parse_header(text: bytes, num_bytes: int) -> Header:
    try:
        content = json.loads(text)
        origin = Origin(*(content[name] for name in Origin.__slots__))
        found = {name: content[name] for name in ("num_samples", "num_blocks", "crc32")}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SidecarError("its header cannot be parsed") from error
    counts = {
        name: checks.integer(f"its {name}", value, minimum=0, maximum=most, error=SidecarError)
        for (name, value), most in zip(found.items(), _MOST, strict=True)
        if value is not None or name != "num_blocks"
    }
    return Header(
        origin, counts["num_samples"], counts.get("num_blocks"), counts["crc32"], num_bytes
    )


def _compare(found: Origin, expected: Origin) -> None:
    for name, wanted in asdict(expected).items():
        value = getattr(found, name)
        if value != wanted or type(value) is not type(wanted):
            raise SidecarError(
                f"it was made from {name} {checks.shown(value)}, now {name} is {wanted!r}"
            )
