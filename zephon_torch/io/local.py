"""Files of the local file system."""

from __future__ import annotations

import errno
import glob as globbing
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from zephon_torch.io.files import FileInfo, Kind, Storage, is_ignored, split_at_wildcard


@dataclass(frozen=True, slots=True)
class LocalStorage(Storage):
    """A folder (or file) of the local file system, by absolute path."""

    root: str

    def kind(self) -> Kind | None:
        """Return what stands at the root, or None."""
        if os.path.isdir(self.root):
            return "folder"
        return "file" if os.path.isfile(self.root) else None

    def split(self) -> tuple[Storage, str]:
        """Return the parent folder and the root's name in it."""
        folder, name = os.path.split(self.root)
        return LocalStorage(folder), name

    def split_glob(self) -> tuple[Storage, str] | None:
        """Split before the first part with a wildcard."""
        parts = split_at_wildcard(self.root, os.path.exists)
        return parts and (LocalStorage(parts[0] or "/"), parts[1])

    def list_files(self) -> list[FileInfo]:
        """List files at any depth."""
        return list(_walk(self.root, "", ()))

    def glob(self, pattern: str) -> list[FileInfo]:
        """List files that match."""
        found = globbing.glob(pattern, root_dir=self.root, recursive=True)
        return [self.info(path) for path in found if os.path.isfile(self.url(path))]

    def info(self, path: str) -> FileInfo:
        """Return size and stamp as they are now."""
        status = os.stat(self.url(path))
        return FileInfo(path, status.st_size, _stamp(status))

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Read one range."""
        with open(self.url(path), "rb", buffering=0) as file:
            return os.pread(file.fileno(), stop - start, start)

    def read_ranges(
        self, path: str, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]
    ) -> list[bytes]:
        """Read several ranges."""
        with open(self.url(path), "rb", buffering=0) as file:
            ranges = zip(starts.tolist(), stops.tolist(), strict=True)
            return [os.pread(file.fileno(), stop - start, start) for start, stop in ranges]

    def write(self, path: str, parts: Sequence[Any]) -> None:
        """Write beside, then rename."""
        write_atomically(self.url(path), parts)

    def url(self, path: str = "") -> str:
        """Return the path without credentials."""
        return os.path.join(self.root, path) if path else self.root

    def identity(self, path: str) -> str:
        """Return what cache names derive from."""
        return self.url(path)

    def local_path(self, path: str) -> str | None:
        """Return the path itself."""
        return self.url(path)


def write_atomically(path: str, parts: Iterable[Any], mode: int = 0o644) -> None:
    """Write a file that is seen whole or not at all: a temporary one beside it, then a rename.

    Args:
        path: Where to; what is there is replaced.
        parts: Bytes or buffers, one after the other.
        mode: Permissions.

    Raises:
        OSError: The folder cannot be written.
    """
    descriptor, temporary = tempfile.mkstemp(".tmp", ".zidx-", os.path.dirname(path))
    try:
        with os.fdopen(descriptor, "wb") as stream:
            for part in parts:
                stream.write(part)
            os.fchmod(stream.fileno(), mode)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _walk(folder: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[FileInfo]:
    """Files below a folder, through symbolic links; `above` are the folders it lies in."""
    status = os.stat(folder)
    here = (status.st_dev, status.st_ino)
    if here in above:  # a link to a folder that it lies in
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_ignored(entry.name):
                continue
            if _is_folder(entry):
                yield from _walk(entry.path, f"{prefix}{entry.name}/", (*above, here))
            else:
                yield from _stat_entry(entry, prefix + entry.name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _stat_entry(entry: os.DirEntry[str], path: str) -> Iterator[FileInfo]:
    try:
        status = entry.stat()
    except OSError as error:
        if not isinstance(error, FileNotFoundError) and error.errno != errno.ELOOP:
            raise
        if entry.is_symlink():  # else: deleted since it was listed
            yield FileInfo(path, -1, 0)
        return
    if stat.S_ISREG(status.st_mode):
        yield FileInfo(path, status.st_size, _stamp(status))


def _stamp(status: os.stat_result) -> int:
    """Modification time in ns, at least 1: anything below means that a store tells none."""
    return max(1, status.st_mtime_ns)
