r"""The bytes of an index sidecar: where every record of one shard starts.

::

    0    8 bytes   magic  b"ZEPHIDX\n"
    8    uint32    version of this layout, little endian like all numbers here
    12   uint32    length h of the header
    16   h bytes   header: one JSON object, padded with spaces so that 16 + h is a multiple of 64
                     format, format_version   which indexer made it
                     file                     name of the shard, without folders
                     num_bytes, stamp         size and modification stamp of the shard
                     num_samples              n
                     crc32                    of the offsets
    ...  int64[n + 1]  offsets: record i starts at offsets[i] and ends before offsets[i + 1];
                       offsets[n] is the size of the shard

The offsets are used through a read-only memory map, so processes on one node share their pages.
This module reads and encodes; only ``index.py`` writes files.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

MAGIC = b"ZEPHIDX\n"
VERSION = 1
_PREFIX = struct.Struct("<8sII")
_ALIGNMENT = 64
_MAX_HEADER_BYTES = 1 << 16


class SidecarError(Exception):
    """Why a sidecar cannot be used, in words; never leaves this package."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a sidecar must have been made from."""

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
    crc32: int
    offsets_start: int


def encode_header(origin: Origin, offsets: npt.NDArray[np.int64]) -> bytes:
    """Everything before the offsets. Pure."""
    content = asdict(origin) | {"num_samples": len(offsets) - 1, "crc32": _checksum(offsets)}
    text = json.dumps(content).encode()
    text += b" " * (-(_PREFIX.size + len(text)) % _ALIGNMENT)
    return _PREFIX.pack(MAGIC, VERSION, len(text)) + text


def read_header(path: str, expected: Origin) -> Header:
    """Read and check everything but the offsets themselves.

    Raises:
        SidecarError: It is damaged, foreign, or was made from something else than `expected`.
        OSError: It is not there or cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        start = file.read(_PREFIX.size + 1024)
        size = os.fstat(file.fileno()).st_size
        length = _header_length(start)
        if len(start) < _PREFIX.size + length:
            start += file.read(_PREFIX.size + length - len(start))
    header = _parse_header(start[_PREFIX.size : _PREFIX.size + length], _PREFIX.size + length)
    _compare(header.origin, expected)
    wanted = header.offsets_start + 8 * (header.num_samples + 1)
    if size != wanted:
        raise SidecarError(f"it has {size:,} bytes, {wanted:,} expected")
    return header


def read_offsets(path: str, expected: Origin) -> npt.NDArray[np.int64]:
    """Map the offsets, checked in full.

    Returns:
        int64[num_samples + 1], read-only, backed by a memory map of the sidecar.

    Raises:
        SidecarError: As for `read_header`, or the offsets are damaged.
        OSError: It is not there or cannot be read.
    """
    header = read_header(path, expected)
    mapped = np.memmap(
        path, dtype="<i8", mode="r", offset=header.offsets_start, shape=(header.num_samples + 1,)
    )
    offsets = mapped.view(np.ndarray)  # indexing the subclass costs microseconds
    if _checksum(offsets) != header.crc32:
        raise SidecarError("the checksum of its offsets does not match")
    if not are_sound(offsets, expected.num_bytes):
        raise SidecarError("its offsets are not ascending up to the size of the file")
    return offsets


def are_sound(offsets: npt.NDArray[np.int64], num_bytes: int) -> bool:
    """Whether offsets ascend from 0 or more to exactly the size of the file. Pure."""
    ascend = bool((offsets[1:] > offsets[:-1]).all())
    return ascend and offsets[0] >= 0 and offsets[-1] == num_bytes


def _checksum(offsets: npt.NDArray[np.int64]) -> int:
    return zlib.crc32(offsets.astype("<i8", copy=False).data)


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


def _parse_header(text: bytes, offsets_start: int) -> Header:
    try:
        content = json.loads(text)
        origin = Origin(*(content[name] for name in Origin.__slots__))
        num_samples, crc32 = int(content["num_samples"]), int(content["crc32"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise SidecarError("its header cannot be parsed") from error
    if num_samples < 0:
        raise SidecarError(f"its header claims {num_samples} records")
    return Header(origin, num_samples, crc32, offsets_start)


def _compare(found: Origin, expected: Origin) -> None:
    if found == expected:
        return
    for name, wanted in asdict(expected).items():
        if (value := getattr(found, name)) != wanted:
            raise SidecarError(f"it was made from {name} {value!r}, now {name} is {wanted!r}")
