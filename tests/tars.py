"""Makes tar files byte by byte, and says what Python's tarfile finds in them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Mapping
from typing import Any

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def tar(
    members: Iterable[tuple[str, bytes] | tarfile.TarInfo],
    format: int = tarfile.PAX_FORMAT,
    pax_headers: Mapping[str, str] | None = None,
) -> bytes:
    """An archive of files, and of what else comes as a TarInfo."""
    buffer = io.BytesIO()
    with tarfile.open(
        fileobj=buffer, mode="w", format=format, pax_headers=pax_headers and dict(pax_headers)
    ) as archive:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                archive.addfile(member)
                continue
            name, content = member
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def special(name: str, type: bytes, **fields: Any) -> tarfile.TarInfo:
    """A member without content: a folder, link or device."""
    info = tarfile.TarInfo(name)
    info.type = type
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def header(name: bytes, type: bytes = b"0", size: bytes = b"0", magic: bytes = b"") -> bytes:
    """One header, with the sum that it must have. `size` as it is written."""
    block = bytearray(512)
    block[: len(name)] = name
    block[124 : 124 + len(size)] = size
    block[156:157] = type
    block[257 : 257 + len(magic)] = magic
    return summed(block)


def summed(block: bytes | bytearray) -> bytes:
    """A header with its sum made right."""
    others = bytes(block[:148]) + b" " * 8 + bytes(block[156:])
    return others[:148] + b"%06o\0 " % sum(others) + others[156:]


def padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 512)


END = bytes(1024)


def files_of_tarfile(content: bytes) -> list[tuple[str, bytes]]:
    """Names and contents of regular files."""
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
        return [
            (member.name, archive.extractfile(member).read())  # type: ignore[union-attr]
            for member in archive
            if member.isreg()
        ]
