"""Where files are: on this machine (``local.py``) or anywhere fsspec reaches. Only user of fsspec.

`connect` turns what a user writes (a path, a ``file://`` URL, any other URL) into a `Storage`.
fsspec file systems are looked up anew for every call: fsspec itself keeps one per process, and one
made before a fork must not be used after it.

What may pass (``retries.py``) is tried again, unless the store's own package does so. What remains
is raised as a `DatasetError` that names the URL, in place of the package's own error, which may
hold credentials. Nothing but the bytes asked for is ever returned: stores that ignore ranges are
refused.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import threading
import time
import urllib.parse
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import ConfigurationError, DatasetError, ZephonError
from zephon_torch.io import retries
from zephon_torch.io.files import FileInfo, Kind, Storage, is_ignored, split_at_wildcard
from zephon_torch.io.local import LocalStorage

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.:-]*)://(?P<root>.*)", re.DOTALL)
_USER_INFO = re.compile(r"://[^/@]*@")
# Two ranges closer than this are one request: a request costs more than the bytes between them.
_MERGE_GAP_BYTES = 64 << 10
_WEB = ("http", "https")

_T = TypeVar("_T")

# A fork waits until no other thread is just making a file system: the child would inherit fsspec's
# own lock in its locked state, and wait for ever.
_resolving = threading.RLock()
os.register_at_fork(
    before=_resolving.acquire,
    after_in_parent=_resolving.release,
    after_in_child=_resolving.release,
)


class _Resolved(NamedTuple):
    """What fsspec made of a path, for the process that asked: some file systems cross no fork."""

    pid: int
    storage: weakref.ref[RemoteStorage]
    fs: Any
    full: str


# By storage and path. fsspec takes longer to look these up than a store nearby takes to answer.
_resolved: dict[tuple[int, str], _Resolved] = {}
_RESOLVED_KEPT = 1 << 16


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
    cut = root.find("?") if scheme.rpartition("::")[2] in _WEB else root.find("::")
    root, tail = (root, "") if cut < 0 else (root[:cut], root[cut:])
    return RemoteStorage(root.rstrip("/"), scheme, tail, dict(storage_options or {}))


@dataclass(frozen=True, slots=True)
class RemoteStorage(Storage):
    """A prefix of anything that fsspec reaches: ``scheme://root`` + tail."""

    root: str
    scheme: str
    tail: str
    options: dict[str, Any]

    def __repr__(self) -> str:
        return f"RemoteStorage({self.url()!r})"  # without credentials

    def kind(self) -> Kind | None:
        """Return what stands at the root, or None."""
        try:
            is_folder = self._ask("", _fresh_info)["type"] == "directory"
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
        files = self._ask("", lambda fs, base: self._files(fs.find(base, detail=True), base))
        return [file for file in files if not any(map(is_ignored, file.path.split("/")))]

    def glob(self, pattern: str) -> list[FileInfo]:
        """List files that match."""

        def find(fs: Any, base: str) -> list[FileInfo]:
            return self._files(fs.glob(f"{base.rstrip('/')}/{pattern}", detail=True), base)

        return self._ask("", find)

    def info(self, path: str) -> FileInfo:
        """Return size and stamp as they are now."""
        told = self._ask(path, _fresh_info)
        if told.get("size") is None:
            raise DatasetError(f"the store does not tell the size of {self.url(path)!r}")
        return FileInfo(path, int(told["size"]), _stamp(told))

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Read one range."""
        return self._read_exactly(path, np.array([start]), np.array([stop]))[0]

    def read_ranges(
        self, path: str, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]
    ) -> list[bytes]:
        """Read several ranges."""
        firsts, lasts, owner = merge_ranges(starts, stops, _MERGE_GAP_BYTES)
        merged = self._read_exactly(path, firsts, lasts)
        ranges = zip(
            owner.tolist(),
            (starts - firsts[owner]).tolist(),
            (stops - starts).tolist(),
            strict=True,
        )
        return [merged[at][start : start + size] for at, start, size in ranges]

    def write(self, path: str, parts: Sequence[Any]) -> None:
        """Write in one request."""
        content = b"".join(parts)
        self._ask(path, lambda fs, full: fs.pipe_file(full, content))

    def url(self, path: str = "") -> str:
        """Return the path without credentials."""
        tail = "::".join(part.partition("?")[0] for part in self.tail.split("::"))
        return _USER_INFO.sub("://", f"{self.scheme}://{self._join(path)}{tail}")

    def identity(self, path: str) -> str:
        """Return what cache names derive from."""
        return _USER_INFO.sub("://", f"{self.scheme}://{self._join(path)}{self.tail}")

    def _join(self, path: str) -> str:
        return f"{self.root}/{path}" if self.root and path else self.root or path

    def _resolve(self, path: str) -> tuple[Any, str]:
        """Return the file system of this process and the path in its own spelling."""
        known = _resolved.get((id(self), path))
        if known is not None and known.pid == os.getpid() and known.storage() is self:
            return known.fs, known.full
        fs, full = self._look_up(path)
        if len(_resolved) >= _RESOLVED_KEPT:
            _resolved.clear()
        _resolved[id(self), path] = _Resolved(os.getpid(), weakref.ref(self), fs, full)
        return fs, full

    def _look_up(self, path: str) -> tuple[Any, str]:
        import fsspec.core

        url, options = f"{self.scheme}://{self._join(path)}{self.tail}", self.options
        if self.scheme in _WEB:  # ranges are those of the file itself, never of a compressed form
            plain = {"Accept-Encoding": "identity"}
            options = options | {"headers": plain | dict(options.get("headers", {}))}
        try:
            with _resolving:
                fs, full = fsspec.core.url_to_fs(url, **options)
        except ImportError as error:
            extra = retries.extra_of(url)
            remedy = f": pip install 'zephon-torch[{extra}]'" if extra else ""
            raise ConfigurationError(f"cannot open {self.url(path)!r}: {error}{remedy}") from error
        except ValueError as error:  # an unknown protocol, or an option that cannot be
            told = retries.without_credentials(str(error), self.options)
            raise ConfigurationError(f"cannot open {self.url(path)!r}: {told}") from None
        return fs, str(full)

    def _ask(self, path: str, ask: Callable[[Any, str], _T]) -> _T:
        """Call with the file system and the path in its spelling; again if that may help.

        Raises:
            FileNotFoundError: There is no such file, folder or bucket.
            DatasetError: It failed for good.
        """
        is_tried_there = retries.retries_itself(f"{self.scheme}://{self.tail}")
        for tries, delay in enumerate((*retries.DELAYS, None), 1):
            try:
                return ask(*self._resolve(path))
            except ZephonError:
                raise
            except Exception as raised:
                error = retries.behind(raised)
                if isinstance(error, FileNotFoundError):
                    raise FileNotFoundError(errno.ENOENT, "no such file", self.url(path)) from None
                is_ours = not is_tried_there or isinstance(error, retries.ShortReadError)
                if delay is None or not is_ours or not retries.is_passing(error):
                    raise retries.failure(self.url(path), error, tries, self.options) from None
            time.sleep(delay)
        raise AssertionError("the last try returns or raises")

    def _read_exactly(
        self, path: str, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]
    ) -> list[bytes]:
        """One request a range; shorter than asked for only where the file ends before."""
        # Empty ranges cannot be said in a request: stores answer with an error, or with everything.
        read = dict.fromkeys(np.flatnonzero(starts == stops).tolist(), b"")
        sizes = (stops - starts).tolist()

        def request(fs: Any, full: str) -> None:
            # a later try asks for what is missing only
            left = [at for at in range(len(starts)) if at not in read]
            ranges = starts[left].tolist(), stops[left].tolist()
            got = _cat_ranges(fs)([full] * len(left), *ranges, on_error="return")
            failed: BaseException | None = None
            for at, part in zip(left, got, strict=True):
                if type(part) is bytes and len(part) == sizes[at]:
                    read[at] = part
                    continue
                try:
                    read[at] = self._checked(path, part, int(starts[at]), int(stops[at]))
                except Exception as error:
                    failed = failed or error
            if failed is not None:
                raise failed

        try:
            if len(read) < len(starts):
                self._ask(path, request)
        except FileNotFoundError:
            raise DatasetError(
                f"{self.url(path)!r} is gone since the dataset was made; restore it or make the "
                "dataset anew"
            ) from None
        return [read[at] for at in range(len(starts))]

    def _checked(self, path: str, part: bytes | BaseException, start: int, stop: int) -> bytes:
        """Return what came if it is what was asked for, or all that there is."""
        if isinstance(part, BaseException):
            if not retries.is_past_the_end(part):
                raise part
            part = b""
        if len(part) > stop - start:
            raise DatasetError(
                f"the store of {self.url(path)!r} sent {len(part):,} bytes where {stop - start:,} "
                "were asked for: it does not serve ranges of files. Use one that does, or put "
                "simplecache:: before the URL to keep whole files on this machine"
            )
        if len(part) < stop - start and self.info(path).num_bytes >= stop:
            raise retries.ShortReadError(f"{len(part):,} bytes instead of {stop - start:,}")
        return bytes(part)

    def _files(self, found: Mapping[str, Mapping[str, Any]], base: str) -> list[FileInfo]:
        """Return those that are files; a listing of web pages does not tell their sizes."""
        files = []
        for name, told in found.items():
            if told["type"] != "file":
                continue
            path = name[len(base) :].lstrip("/")
            if told.get("size") is None:
                files.append(self.info(path))
            else:
                files.append(FileInfo(path, int(told["size"]), _stamp(told)))
        return files


def _cat_ranges(fs: Any) -> Callable[..., Any]:
    """What reads ranges; fsspec's simplecache (2026.2) cannot, of files that it has not copied."""
    import fsspec

    is_broken = "simplecache" in fs.protocol
    return partial(fsspec.AbstractFileSystem.cat_ranges, fs) if is_broken else fs.cat_ranges


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


def _fresh_info(fs: Any, path: str) -> Mapping[str, Any]:
    fs.invalidate_cache()  # a listing that fsspec remembers may be older than the newest shard
    told: Mapping[str, Any] = fs.info(path)
    return told


def _stamp(info: Mapping[str, Any]) -> int:
    """Stamp of what a store tells about a version of a file, as `FileInfo` describes."""
    for key in ("ETag", "etag"):
        if tag := info.get(key):
            # Listings and single look-ups differ in quotes.
            digest = hashlib.sha256(str(tag).removeprefix("W/").strip('"').encode()).digest()
            return -1 - (int.from_bytes(digest[:8]) >> 1)
    for key in ("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "created"):
        if time := info.get(key):
            return _microseconds(time) * 1000
    return 0


def _microseconds(time: datetime | float | str) -> int:
    """Since 1970. One store gives the same time as number, object or text in different calls."""
    if isinstance(time, str):
        is_iso = time[:1].isdecimal()
        time = datetime.fromisoformat(time) if is_iso else parsedate_to_datetime(time)
    return round((time.timestamp() if isinstance(time, datetime) else time) * 1e6)
