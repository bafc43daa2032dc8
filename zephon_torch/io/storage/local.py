"""Files of the local file system."""

from __future__ import annotations

import errno
import glob as globbing
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import DatasetError
from zephon_torch.io.storage.files import FileInfo, Kind, Storage, is_ignored, split_at_wildcard


@dataclass(frozen=True, slots=True)
class LocalStorage(Storage):
    """A folder (or file) of the local file system, by absolute path."""

    root: str

    def kind(self) -> Kind | None:
        """Return what stands at the root, or None."""
        if os.path.isdir(self.root):
            return "folder"
        if not os.path.exists(self.root):
            return None
        _check_regular(self.root, os.stat(self.root))
        return "file"

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
        found = sorted(_expand(self.root, "", pattern.split("/")))
        files = [path for path in found if not os.path.isdir(self.url(path))]
        return [self.info(path) for path in files if os.path.exists(self.url(path))]

    def info(self, path: str) -> FileInfo:
        """Return size and stamp as they are now."""
        status = os.stat(self.url(path))
        if stat.S_ISDIR(status.st_mode):
            raise FileNotFoundError(errno.ENOENT, "no regular file", self.url(path))
        _check_regular(self.url(path), status)
        return FileInfo(path, status.st_size, _stamp(status))

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Read one range."""
        with open(open_regular(self.url(path)), "rb", buffering=0) as file:
            return os.pread(file.fileno(), stop - start, start)

    def read_ranges(
        self, path: str, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]
    ) -> list[bytes]:
        """Read several ranges."""
        with open(open_regular(self.url(path)), "rb", buffering=0) as file:
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


def open_regular(path: str) -> int:
    """Open a file for reading; a named pipe in its place is not waited for.

    Returns:
        Its descriptor.

    Raises:
        DatasetError: A named pipe, a socket or a device is in its place.
        OSError: It is missing, a folder, or cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV):  # a socket, a device
            _check_regular(path, os.stat(path))
        raise
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        _check_regular(path, status)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_regular(path: str, status: os.stat_result) -> None:
    mode = status.st_mode
    if not stat.S_ISREG(mode):
        kind = "a named pipe" if stat.S_ISFIFO(mode) else "a socket or a device"
        raise DatasetError(f"{path!r} is {kind}, not a file: move it away")


def write_atomically(path: str, parts: Iterable[Any], mode: int = 0o644) -> None:
    """Write a file that is seen whole or not at all: a temporary one beside it, then a rename.

    Args:
        path: Where to; what is there is replaced.
        parts: Bytes or buffers, one after the other.
        mode: Permissions.

    Raises:
        OSError: The folder cannot be written.
    """
    # Named before it is there: a signal at any moment, which raises, leaves nothing behind.
    temporary = os.path.join(os.path.dirname(path), f".zidx-{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb", opener=_open_private) as stream:
            for part in parts:
                stream.write(part)
            os.fchmod(stream.fileno(), mode)
        os.replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):  # it names the temporary file
            raise OSError(error.errno, error.strerror, path) from error
        raise


def make_own_folder(folder: str) -> None:
    """Make a folder, and those above it, where they are missing: for this user alone.

    Raises:
        OSError: It cannot be made, or something else is in its place.
    """
    if not os.path.isdir(folder):
        if (above := os.path.dirname(folder)) != folder:
            make_own_folder(above)
        try:
            os.mkdir(folder, 0o700)
        except FileExistsError:  # somebody else was first
            if not os.path.isdir(folder):
                raise


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _walk(folder: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[FileInfo]:
    """Files below a folder, through symbolic links; `above` are the folders it lies in."""
    here = _identity(folder)
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


def _expand(root: str, folder: str, parts: Sequence[str]) -> set[str]:
    """Paths below the root that match a pattern in a folder: ``**`` never goes in circles."""
    if "**" not in parts:
        return set(globbing.glob(os.path.join(folder, *parts), root_dir=root))
    at = parts.index("**")
    pattern, behind = os.path.join(folder, *parts[:at]), parts[at + 1 :] or ["*"]
    found = set()
    for start in globbing.glob(pattern, root_dir=root) if pattern else [""]:
        names = [name for name in start.split("/") if name]
        above = [os.path.join(root, *names[:depth]) for depth in range(len(names))]
        if os.path.isdir(os.path.join(root, start)):
            for inner in _folders(os.path.join(root, start), "", tuple(map(_identity, above))):
                found |= _expand(root, os.path.join(globbing.escape(start), inner), behind)
    return found


def _folders(folder: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """Folders at any depth that are not hidden, the folder itself first; as in `_walk`."""
    here = _identity(folder)
    if here in above:
        return
    yield globbing.escape(prefix)
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.name.startswith(".") and _is_folder(entry):
                yield from _folders(entry.path, f"{prefix}{entry.name}/", (*above, here))


def _identity(folder: str) -> tuple[int, int]:
    status = os.stat(folder)
    return status.st_dev, status.st_ino


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
    size = status.st_size if stat.S_ISREG(status.st_mode) else -1
    yield FileInfo(path, size, _stamp(status))


def _stamp(status: os.stat_result) -> int:
    """Modification time in ns, at least 1: anything below means that a store tells none."""
    return max(1, status.st_mtime_ns)
