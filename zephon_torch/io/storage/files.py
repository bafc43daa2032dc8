"""Stored files, and the storages that hold them.

A `Storage` is a root (a folder, a bucket prefix) and answers questions about paths relative to it;
a `StoredFile` is one file of it as it was listed. Nothing here opens anything for longer than one
call, so both can be pickled and can cross a fork. Storages are in ``local.py`` and in
``io/remote``.
"""

from __future__ import annotations

import glob as globbing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import DatasetError

Kind = Literal["file", "folder"]

BLOCK_BYTES = 8 << 20


class FileInfo(NamedTuple):
    """One listed file.

    Attributes:
        path: POSIX path relative to the storage's root.
        num_bytes: Size; -1 for what is no file: a symbolic link to nothing, a named pipe.
        stamp: Changes when the content does: modification time in nanoseconds; where the store has
            an ETag a negative number made of it; 0 when it tells neither.
    """

    path: str
    num_bytes: int
    stamp: int


class Storage(ABC):
    """A root below which files are listed and read. Immutable; holds no open handle."""

    @abstractmethod
    def kind(self) -> Kind | None:
        """Return what stands at the root itself; None when it is neither of the two."""

    @abstractmethod
    def split(self) -> tuple[Storage, str]:
        """Return the parent folder as a storage, and the root's own name in it."""

    @abstractmethod
    def split_glob(self) -> tuple[Storage, str] | None:
        """For a root with wildcards: the deepest folder without, and the pattern below it."""

    @abstractmethod
    def list_files(self) -> list[FileInfo]:
        """All files at any depth that `is_ignored` does not hide, in no particular order."""

    @abstractmethod
    def glob(self, pattern: str) -> list[FileInfo]:
        """Files (not folders) that match a pattern relative to the root."""

    @abstractmethod
    def info(self, path: str) -> FileInfo:
        """Size and stamp of a file as they are now; FileNotFoundError when it is gone."""

    @abstractmethod
    def read(self, path: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop); fewer when the file ends before."""

    @abstractmethod
    def read_ranges(
        self, path: str, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]
    ) -> list[bytes]:
        """Several ranges of one file in as few requests as is sensible, in the order given."""

    @abstractmethod
    def write(self, path: str, parts: Sequence[Any]) -> None:
        """Write a file of bytes or buffers, one after the other, seen whole or not at all."""

    @abstractmethod
    def url(self, path: str = "") -> str:
        """Full path or URL for people: without credentials."""

    @abstractmethod
    def identity(self, path: str) -> str:
        """Full path or URL that tells this file from any other, to derive cache names from."""

    def local_path(self, path: str) -> str | None:
        """Return a path in the local file system to read it by, None when there is none."""
        return None

    def own_path(self, path: str) -> str | None:
        """Return the same, but never that of a copy: where a sidecar may lie beside it."""
        return self.local_path(path)


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file as it was when its dataset was made.

    Attributes:
        storage: Where it is.
        path: POSIX path relative to the storage's root.
        num_bytes: Size.
        stamp: As in `FileInfo`.
        beside: The file that says what is in it, of formats that have such: the one that lies
            beside it, or the marker of its folder where that is there.
    """

    storage: Storage
    path: str
    num_bytes: int
    stamp: int
    beside: StoredFile | None = None

    @property
    def name(self) -> str:
        """The file's name without folders."""
        return self.path.rpartition("/")[2]

    @property
    def url(self) -> str:
        """Full path or URL for messages."""
        return self.storage.url(self.path)

    @property
    def local_path(self) -> str | None:
        """A path in the local file system to read it by, None when there is none."""
        return self.storage.local_path(self.path)

    def read(self, start: int, stop: int) -> bytes:
        """Bytes [start, stop).

        Raises:
            DatasetError: The file ends before.
        """
        content = self.storage.read(self.path, start, stop)
        if len(content) != stop - start:
            now = f"{start + len(content):,} bytes now, {self.num_bytes:,} when it was listed"
            raise DatasetError(f"{self.url!r} changed while it was read: {now}")
        return content

    def blocks(self, block_bytes: int = BLOCK_BYTES) -> Iterator[bytes]:
        """Read the content, block by block.

        Raises:
            DatasetError: The file ended early.
        """
        for start in range(0, self.num_bytes, block_bytes):
            yield self.read(start, min(start + block_bytes, self.num_bytes))

    def check_unchanged(self) -> None:
        """Compare size and stamp with the file as it is now; so of the file beside it.

        Raises:
            DatasetError: It is gone, or either differs.
        """
        if self.beside is not None:
            self.beside.check_unchanged()
        try:
            now = self.storage.info(self.path)
        except FileNotFoundError:
            raise DatasetError(
                f"{self.url!r} is gone since the dataset was made; restore it or make the dataset "
                "anew"
            ) from None
        if change := describe_change(self.num_bytes, self.stamp, now.num_bytes, now.stamp):
            raise DatasetError(
                f"{self.url!r} changed since the dataset was made: {change}; make the dataset anew"
            )


def describe_change(num_bytes: int, stamp: int, num_bytes_now: int, stamp_now: int) -> str:
    """Return the first difference in words, "" when there is none. Pure."""
    if num_bytes != num_bytes_now:
        return f"{num_bytes:,} bytes then, {num_bytes_now:,} now"
    # A store may tell the ETag in one call and only the time in another: these do not compare.
    is_comparable = np.sign(stamp) * np.sign(stamp_now) > 0
    if is_comparable and not _is_same(stamp, stamp_now):
        return "another ETag" if stamp < 0 else f"modified at {stamp} ns then, at {stamp_now} now"
    return ""


def _is_same(stamp: int, other: int) -> bool:
    """Whether two stamps of a kind are one; web servers and some disks tell only seconds."""
    if stamp == other or stamp < 0:
        return stamp == other
    (seconds, rest), (other_seconds, other_rest) = (divmod(s, 10**9) for s in (stamp, other))
    return seconds == other_seconds and 0 in (rest, other_rest)


def is_ignored(name: str) -> bool:
    """Whether a file or folder of this name is never data: hidden, ``_SUCCESS``, unfinished."""
    return name.startswith((".", "_")) or name.endswith(".tmp")


def split_at_wildcard(path: str, exists: Callable[[str], bool]) -> tuple[str, str] | None:
    """Split into the folder before the first part with a wildcard, and the rest.

    What `exists` is no pattern (a folder may really be called ``data[1]``). None without any.
    """
    parts = path.split("/")
    for at, part in enumerate(parts):
        if globbing.has_magic(part) and not exists("/".join(parts[: at + 1])):
            return "/".join(parts[:at]), "/".join(parts[at:])
    return None
