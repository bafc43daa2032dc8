"""Which members of a tar file make one sample: webdataset's rule.

A name is cut at the first dot of its base name: what is before, folders included, is the key, the
rest, in lower case, the extension. Members of one key that follow each other are one sample. Left
out are folders, names without a key or dot (hidden files and AppleDouble's ``._`` files among
them), and what is named ``__x__`` or lies in such a folder at the top.

A sample is the range of bytes from its first member to the next sample's; the archive must end
with its mark, or it could have lost samples without a word.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import DatasetError
from zephon_torch.io.formats.tar.members import BLOCK, Member, TarError, TarWalk
from zephon_torch.io.index.index import Advance
from zephon_torch.io.storage.files import BLOCK_BYTES, StoredFile

# Locally a block is read for each header that does not lie in the one before, and a small one is
# as fast as the header alone. Remotely a request costs as much as megabytes do.
_LOCAL_BLOCK_BYTES = 64 << 10
# Blocks of zeros behind the mark are read with the last sample; programs fill up to 1 MiB.
_MAX_FILL_BYTES = 16 << 20
# What a sample has beside its members, and what webdataset takes for a sample to be dropped.
_RESERVED = ("__key__", "__url__", "__bad__")


def find_samples(
    file: StoredFile, advance: Advance, block_bytes: int | None = None
) -> npt.NDArray[np.int64]:
    """Read the headers of a tar file once and find its samples.

    Args:
        file: The file.
        advance: Called with the number of bytes that are done, read or skipped.
        block_bytes: How much is read at once.

    Returns:
        int64[num_samples + 1]: where each starts, then the size of the file.

    Raises:
        DatasetError: It is no tar file, is damaged or truncated, has a sample with one extension
            twice or a key that comes again, or changes meanwhile.
    """
    if block_bytes is None:
        block_bytes = BLOCK_BYTES if file.local_path is None else _LOCAL_BLOCK_BYTES
    window = _Window(file, advance, block_bytes)
    try:
        starts = _find_starts(window, file.num_bytes)
    except TarError as error:
        raise DatasetError(f"{file.url!r}, {error}") from None
    advance(file.num_bytes - window.stop)
    return np.array([*starts, file.num_bytes], dtype=np.int64)


def parse_sample(content: bytes, start: int, is_last: bool) -> tuple[str, dict[str, bytes]]:
    """Key and contents by extension of one sample. Pure.

    Args:
        content: The sample's bytes.
        start: Where they stand in the file.
        is_last: Whether the archive's end is among them.

    Raises:
        TarError: They are not just one sample.
    """
    walk = TarWalk(lambda a, b: content[a - start : b - start], start, start + len(content))
    key = ""
    fields: dict[str, bytes] = {}
    for member in walk:
        named = split_name(member.name)
        if named is None:
            continue
        _check_content(member)
        if not fields:
            key = named[0]
        elif named[0] != key:
            raise TarError(member.start, f"a sample has members of {key!r} and {named[0]!r}")
        _check_extension(named[1], fields, member)
        fields[named[1]] = content[member.content_start - start : member.content_stop - start]
    if not fields:
        raise TarError(start, "no member of a sample stands there")
    if walk.has_mark != is_last:
        raise TarError(walk.position, "the archive ends elsewhere")
    return key, fields


def split_name(name: str) -> tuple[str, str] | None:
    """Key and extension of a member, None for what belongs to no sample. Pure.

    >>> split_name("v1.0/dog.01.Seg.PNG")
    ('v1.0/dog', '01.seg.png')
    """
    folder, slash, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    if not stem or not dot:
        return None
    top = name.partition("/")[0]
    if len(top) >= 4 and top.startswith("__") and top.endswith("__"):
        return None
    return f"{folder}{slash}{stem}", extension.lower()


def _find_starts(window: _Window, num_bytes: int) -> list[int]:
    if not num_bytes:
        raise TarError(0, "the file is empty, which no tar file is; write it anew or remove it")
    starts: list[int] = []
    keys: set[str] = set()
    key: str | None = None
    extensions: set[str] = set()
    walk = TarWalk(window.read, 0, num_bytes)
    for member in walk:
        named = split_name(member.name)
        if named is None:
            continue
        _check_content(member)
        if named[0] != key:
            key, extensions = named[0], set()
            if key in keys:
                raise TarError(
                    member.start,
                    f"member {member.name!r} has a key that came before with others in between; "
                    "members of one sample must follow each other: write the tar sorted by name",
                )
            keys.add(key)
            starts.append(member.start)
        _check_extension(named[1], extensions, member)
        extensions.add(named[1])
    _check_end(window, walk, num_bytes)
    return starts


def _check_content(member: Member) -> None:
    if not member.is_file:
        raise TarError(
            member.start,
            f"member {member.name!r} is a link or a device, without content of its own; write the "
            "tar with --dereference --hard-dereference, or leave it out",
        )


def _check_extension(extension: str, before: set[str] | dict[str, bytes], member: Member) -> None:
    if extension in before:
        raise TarError(
            member.start, f"member {member.name!r} is the second of its sample with this extension"
        )
    if extension in _RESERVED:
        raise TarError(
            member.start, f"member {member.name!r} has an extension that is reserved; rename it"
        )


def _check_end(window: _Window, walk: TarWalk, num_bytes: int) -> None:
    """Refuse an archive without its mark, and anything but zeros behind it."""
    if not walk.has_mark:
        raise TarError(
            walk.position,
            "the file ends without the mark of an archive's end: it was truncated, or its writer "
            "was not closed. If you know that it is whole, append 1,024 zero bytes",
        )
    if num_bytes - walk.position > _MAX_FILL_BYTES:
        raise TarError(
            walk.position,
            f"{num_bytes - walk.position:,} bytes follow the archive's end; cut them off",
        )
    for start in range(walk.position, num_bytes, _LOCAL_BLOCK_BYTES):
        fill = window.read(start, min(start + _LOCAL_BLOCK_BYTES, num_bytes))
        if fill.count(0) != len(fill):
            raise TarError(
                walk.position,
                "the archive ends, but data follows, as in tars that were joined: unpack it with "
                "tar --ignore-zeros and write one tar",
            )


class _Window:
    """Reads a file forward, a block at a time, leaving out what nobody asks for."""

    def __init__(self, file: StoredFile, advance: Advance, block_bytes: int) -> None:
        self._file = file
        self._advance = advance
        self._block_bytes = max(block_bytes, BLOCK)
        self._start = 0
        self._content = b""
        self.stop = 0  # of what was read or skipped

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop), neither of them before those of the last call."""
        if stop > self.stop:
            self._load(start, stop)
        return self._content[start - self._start : stop - self._start]

    def _load(self, start: int, stop: int) -> None:
        stop = min(max(stop, start + self._block_bytes), self._file.num_bytes)
        self._content = self._file.read(start, stop)
        self._start = start
        self._advance(stop - self.stop)
        self.stop = stop
