r"""The members of a tar file, found by its headers; contents are skipped over, never read.

Read are the headers of v7, ustar (POSIX.1-1988), pax (POSIX.1-2001) and GNU tar, with long names
and binary sizes. Refused, because reading on would give wrong bytes or none: sparse members, parts
of multi-volume archives, unknown types, and pax headers that move all members that follow.

::

    0    100  name                     156  1    type
    124   12  size, octal or binary    257  6    "ustar\0" where there is a prefix
    148    8  sum of the header        345  155  prefix: folders of the name
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

BLOCK = 512
_ZEROS = bytes(BLOCK)
_MAX_DESCRIPTION_BYTES = 1 << 20  # of a long name or of pax records

_FILES = (b"0", b"\0", b"7")
_FOLDERS = (b"5", b"V")  # and names of volumes; neither has content
_LISTING = b"D"  # of a folder, as content, in GNU's incremental archives
_SPECIAL = (b"1", b"2", b"3", b"4", b"6")  # links and devices
_LONG_NAME, _LONG_LINK = b"L", b"K"
_PAX, _PAX_FOR_ALL = (b"x", b"X"), b"g"
_DESCRIPTIONS = (_LONG_NAME, _LONG_LINK, _PAX_FOR_ALL, *_PAX)

_FOREIGN = {
    b"\x1f\x8b": "compressed with gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ\0": "compressed with xz",
    b"PK": "a zip archive",
}


class TarError(Exception):
    """A fault and its byte, in words; never leaves this package."""

    def __init__(self, position: int, reason: str) -> None:
        super().__init__(f"at byte {position:,}: {reason}")


class Member(NamedTuple):
    """A file, link or device.

    Attributes:
        start: Where the first of its headers begins.
        name: As it is stored; bytes that are not UTF-8 are surrogates.
        is_file: False for links and devices, which have no content of their own.
        content_start: First byte of the content.
        content_stop: Byte after the content.
    """

    start: int
    name: str
    is_file: bool
    content_start: int
    content_stop: int


@dataclass(slots=True)
class _Description:
    """Entries of the headers that stand before a member's own."""

    name: bytes | None = None
    size: int | None = None
    is_there: bool = False


class TarWalk:
    """Iterates once over the members of an archive, or of a part of it, folders left out.

    Args:
        read: Returns bytes [start, stop) of the archive.
        start: Where a header begins.
        stop: Where the archive, or the part, ends.

    Attributes:
        position: Up to where it got.
        has_mark: Whether it ended at the block of zeros that ends an archive, not at `stop`.

    Raises:
        TarError: While iterating.
    """

    def __init__(self, read: Callable[[int, int], bytes], start: int, stop: int) -> None:
        self._read = read
        self._stop = stop
        self.position = start
        self.has_mark = False

    def __iter__(self) -> Iterator[Member]:
        start, description = self.position, _Description()
        while self.position < self._stop:
            at = self.position
            block = self._take(BLOCK, "a header")
            if block == _ZEROS:
                self.position, self.has_mark = at, True
                break
            name, kind, size = _parse(block, at)
            if kind in _DESCRIPTIONS:
                self._describe(description, kind, size, at)
                continue
            name = name if description.name is None else description.name
            size = size if description.size is None else description.size
            if kind == b"\0" and name.endswith(b"/"):  # how v7 stored folders
                kind = _FOLDERS[0]
            content = self.position
            self._skip(kind, name, size, at)
            if kind in _FILES:
                yield Member(start, _text(name), True, content, content + size)
            elif kind in _SPECIAL:
                yield Member(start, _text(name), False, content, content)
            start = self.position
            if description.is_there:
                description = _Description()
        if description.is_there:
            raise TarError(start, "headers that describe a member are followed by none")

    def _take(self, num_bytes: int, what: str) -> bytes:
        """Read what stands next, and go behind it."""
        start, stop = self.position, self.position + num_bytes
        if stop > self._stop:
            if start == 0:
                _refuse_foreign(self._read(0, self._stop))
            raise TarError(start, f"{what} is cut off by the end of the file, which was truncated")
        self.position = stop
        return self._read(start, stop)

    def _skip(self, kind: bytes, name: bytes, size: int, at: int) -> None:
        """Go behind the content of a member and what fills its last block."""
        if kind in _FILES or kind == _LISTING:
            stop = self.position + size + -size % BLOCK
            if stop > self._stop:
                raise TarError(
                    at,
                    f"member {_text(name)!r} has {size:,} bytes, which reach beyond the end of the "
                    "file: it was truncated",
                )
            self.position = stop
        elif kind == b"S":
            _refuse_sparse(at)
        elif kind not in _FOLDERS and kind not in _SPECIAL:
            raise TarError(
                at, f"member {_text(name)!r} is of type {kind!r}, which is not supported"
            )

    def _describe(self, description: _Description, kind: bytes, size: int, at: int) -> None:
        """Take in a header whose content describes the member that comes next."""
        if size > _MAX_DESCRIPTION_BYTES:
            raise TarError(at, f"a name or pax header claims to have {size:,} bytes")
        blocks = self._take(size + -size % BLOCK, "a name or pax header")
        content = blocks[:size]
        if kind == _PAX_FOR_ALL:
            _check_pax_for_all(content, at)
            return
        description.is_there = True
        if kind == _LONG_LINK:
            return
        before = description.name, description.size
        if kind == _LONG_NAME:
            description.name = blocks.partition(b"\0")[0]
            if len(description.name) > size:
                raise TarError(at, "a long name is longer than its header says")
        else:
            _apply_pax(description, content, at)
        if before != (None, None):
            raise TarError(at, "two headers describe one member")


def _parse(block: bytes, at: int) -> tuple[bytes, bytes, int]:
    """Name, type and size in a header."""
    try:
        stored, size = _number(block[148:156]), _number(block[124:136])
    except ValueError:
        stored = -1
    if not _sums_up(block, stored):
        if at == 0:
            _refuse_foreign(block)
        raise TarError(at, "no sound header stands there; the file is damaged or no tar file")
    name = block[:100].partition(b"\0")[0]
    if block[345] and block[257:263] == b"ustar\0":
        name = block[345:500].partition(b"\0")[0] + b"/" + name
    return name, block[156:157], size


def _sums_up(block: bytes, stored: int) -> bool:
    """Whether a header's bytes have the sum that it says, in which the sum's are spaces."""
    others = block[:148] + b" " * 8 + block[156:]
    total = sum(others)
    # Some old programs added signed bytes.
    return stored == total or stored == total - 256 * sum(byte > 127 for byte in others)


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # GNU's way to write numbers that are too large for octal digits
        if field[0] & 0x40:
            raise ValueError("negative")
        return int.from_bytes(field) - (0x80 << 8 * (len(field) - 1))
    digits = field.partition(b"\0")[0].strip(b" ")
    if digits and not digits.isdigit():
        raise ValueError(digits)
    return int(digits or b"0", 8)


def _apply_pax(description: _Description, content: bytes, at: int) -> None:
    for key, value in _pax_records(content, at):
        if key.startswith(b"GNU.sparse."):
            _refuse_sparse(at)
        if key == b"path" and value:
            description.name = value
        elif key == b"size" and value:
            if not value.isdigit() or len(value) > 20:
                raise TarError(at, f"a pax header gives a size of {value[:30]!r}")
            description.size = int(value)


def _check_pax_for_all(content: bytes, at: int) -> None:
    """Refuse what would change members that are read without this header."""
    for key, _ in _pax_records(content, at):
        if key in (b"path", b"size") or key.startswith(b"GNU.sparse."):
            raise TarError(at, f"a global pax header gives a {_text(key)} for all members")


def _pax_records(content: bytes, at: int) -> Iterator[tuple[bytes, bytes]]:
    r"""Keys and values: each record is ``length key=value\n``, its length that of all of it."""
    position = 0
    while position < len(content):
        digits = content[position : position + 20].partition(b" ")[0]
        stop = position + int(digits) if digits.isdigit() else position
        key, equals, value = content[position + len(digits) + 1 : stop].partition(b"=")
        if stop > len(content) or not equals or not value.endswith(b"\n"):
            raise TarError(at, "a pax header is damaged")
        yield key, value[:-1]
        position = stop


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def _refuse_sparse(at: int) -> None:
    raise TarError(at, "a member is stored sparse, which is not supported; write it without holes")


def _refuse_foreign(head: bytes) -> None:
    for magic, what in _FOREIGN.items():
        if head.startswith(magic):
            raise TarError(0, f"the file is {what}, no plain tar file; unpack it")
