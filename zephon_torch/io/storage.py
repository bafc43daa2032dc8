"""Where files are: on this machine (``local.py``) or anywhere fsspec reaches. Only user of fsspec.

`connect` turns what a user writes (a path, a ``file://`` URL, any other URL) into a `Storage`.
fsspec file systems are looked up anew for every call: fsspec itself keeps one per process, and one
made before a fork must not be used after it.
"""

from __future__ import annotations

import hashlib
import os
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import ConfigurationError
from zephon_torch.io.files import FileInfo, Kind, Storage, is_ignored, split_at_wildcard
from zephon_torch.io.local import LocalStorage

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.:-]*)://(?P<root>.*)", re.DOTALL)
_USER_INFO = re.compile(r"://[^/@]*@")
# Two ranges closer than this are one request: a request costs more than the bytes between them.
_MERGE_GAP_BYTES = 64 << 10


def connect(path: str, storage_options: Mapping[str, Any] | None = None) -> Storage:
    """Return the storage whose root is a path or URL.

    Args:
        path: A local path, a ``file://`` URL, or any URL that fsspec knows; may hold wildcards.
        storage_options: Passed on to fsspec. Kept out of every message and of the `repr`.
    """
    url = _URL.fullmatch(path)
    if url is None:
        return LocalStorage(os.path.abspath(os.path.expanduser(path)))
    scheme, root = url["scheme"], url["root"]
    if scheme in ("file", "local"):
        # pathlib's as_uri() quotes, fsspec does not unquote: what exists as written wins.
        literal = os.path.exists(root)
        return LocalStorage(os.path.abspath(root if literal else urllib.parse.unquote(root)))
    # What follows the path (a query, the rest of a chained URL) stays behind every path below it.
    cut = root.find("?") if scheme in ("http", "https") else root.find("::")
    root, tail = (root, "") if cut < 0 else (root[:cut], root[cut:])
    return RemoteStorage(root.rstrip("/"), scheme, tail, dict(storage_options or {}))


@dataclass(frozen=True, slots=True)
class RemoteStorage(Storage):
    """A prefix of anything that fsspec reaches: ``scheme://root`` + tail."""

    root: str
    scheme: str
    tail: str = field(repr=False)
    options: dict[str, Any] = field(repr=False)

    def kind(self) -> Kind | None:
        """Return what stands at the root, or None."""
        fs, path = self._resolve()
        fs.invalidate_cache()  # a listing that fsspec remembers may be older than the newest shard
        try:
            is_folder = fs.info(path)["type"] == "directory"
        except FileNotFoundError:
            return None
        return "folder" if is_folder else "file"

    def split(self) -> tuple[Storage, str]:
        """Return the parent folder and the root's name in it."""
        folder, _, name = self.root.rpartition("/")
        return replace(self, root=folder), name

    def split_glob(self) -> tuple[Storage, str] | None:
        """Split before the first part with a wildcard."""
        parts = split_at_wildcard(self.root, lambda _: False)
        return parts and (replace(self, root=parts[0]), parts[1])

    def list_files(self) -> list[FileInfo]:
        """List files at any depth."""
        fs, path = self._resolve()
        files = self._relative(fs.find(path, detail=True), path)
        return [file for file in files if not any(map(is_ignored, file.path.split("/")))]

    def glob(self, pattern: str) -> list[FileInfo]:
        """List files that match."""
        fs, path = self._resolve()
        found = fs.glob(f"{path.rstrip('/')}/{pattern}", detail=True)
        return self._relative(found, path)

    def info(self, path: str) -> FileInfo:
        """Return size and stamp as they are now."""
        fs, full = self._resolve(path)
        fs.invalidate_cache()
        return _file_info(path, fs.info(full))

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Read one range."""
        fs, full = self._resolve(path)
        return bytes(fs.cat_file(full, start=start, end=stop))

    def read_ranges(
        self, path: str, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]
    ) -> list[bytes]:
        """Read several ranges."""
        fs, full = self._resolve(path)
        firsts, lasts, owner = merge_ranges(starts, stops, _MERGE_GAP_BYTES)
        paths = [full] * len(firsts)
        merged = fs.cat_ranges(paths, firsts.tolist(), lasts.tolist(), on_error="raise")
        for part in merged:
            if isinstance(part, BaseException):  # asynchronous file systems return errors
                raise part
        ranges = zip(
            owner.tolist(),
            (starts - firsts[owner]).tolist(),
            (stops - starts).tolist(),
            strict=True,
        )
        return [bytes(merged[at][start : start + size]) for at, start, size in ranges]

    def write(self, path: str, parts: Sequence[Any]) -> None:
        """Write in one request."""
        fs, full = self._resolve(path)
        fs.pipe_file(full, b"".join(parts))

    def url(self, path: str = "") -> str:
        """Return the path without credentials."""
        tail = "" if self.tail.startswith("?") else self.tail
        return _USER_INFO.sub("://", f"{self.scheme}://{self._join(path)}{tail}")

    def identity(self, path: str) -> str:
        """Return what cache names derive from."""
        return _USER_INFO.sub("://", f"{self.scheme}://{self._join(path)}{self.tail}")

    def _join(self, path: str) -> str:
        return f"{self.root}/{path}" if self.root and path else self.root or path

    def _resolve(self, path: str = "") -> tuple[Any, str]:
        """Return the file system of this process and the path in its own spelling."""
        import fsspec.core

        try:
            fs, full = fsspec.core.url_to_fs(
                f"{self.scheme}://{self._join(path)}{self.tail}", **self.options
            )
        except (ImportError, ValueError) as error:  # protocol without its package, or unknown
            raise ConfigurationError(f"cannot open {self.url(path)!r}: {error}") from error
        return fs, str(full)

    def _relative(self, found: Mapping[str, Mapping[str, Any]], base: str) -> list[FileInfo]:
        return [
            _file_info(path[len(base) :].lstrip("/"), info)
            for path, info in found.items()
            if info["type"] == "file"
        ]


def merge_ranges(
    starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64], gap: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Join ranges that touch, overlap or lie at most `gap` bytes apart. Pure.

    Args:
        starts: int64[n], in any order.
        stops: int64[n].
        gap: Bytes that may be read in vain between two ranges.

    Returns:
        Starts and stops of the joined ranges, and int64[n]: which of them holds range i.
    """
    order = np.argsort(starts, kind="stable")
    reach = np.maximum.accumulate(stops[order])
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = starts[order][1:] > reach[:-1] + gap
    owner = np.empty(len(order), dtype=np.int64)
    owner[order] = np.cumsum(is_first) - 1
    is_last = np.roll(is_first, -1)
    return starts[order][is_first], reach[is_last], owner


def _file_info(path: str, info: Mapping[str, Any]) -> FileInfo:
    return FileInfo(path, int(info.get("size") or 0), _stamp(info))


def _stamp(info: Mapping[str, Any]) -> int:
    """Stamp of what a store tells about a version of a file, as `FileInfo` describes."""
    for key in ("ETag", "etag"):
        if tag := info.get(key):
            # Listings and single look-ups differ in quotes.
            digest = hashlib.sha256(str(tag).removeprefix("W/").strip('"').encode()).digest()
            return -1 - (int.from_bytes(digest[:8]) >> 1)
    for key in ("mtime", "LastModified", "last_modified", "updated", "created"):
        if time := info.get(key):
            return _microseconds(time) * 1000
    return 0


def _microseconds(time: datetime | float | str) -> int:
    """Since 1970. One store gives the same time as number, object or text in different calls."""
    if isinstance(time, str):
        time = datetime.fromisoformat(time)
    return round((time.timestamp() if isinstance(time, datetime) else time) * 1e6)
