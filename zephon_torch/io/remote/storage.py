"""Where files are: on this machine (``local.py``) or anywhere fsspec reaches. Only user of fsspec.

`connect` turns what a user writes (a path, a ``file://`` URL, any other URL) into a `Storage`.
fsspec file systems are looked up anew for every call: fsspec itself keeps one per process, and one
made before a fork must not be used after it.

What may pass (``retries.py``) is tried again, unless the store's own package does so. What remains
is raised as a `StorageError` that names the URL, in place of the package's own error, which may
hold credentials. Nothing but the bytes asked for is ever returned: stores that ignore ranges are
refused (``web.py``, ``s3.py``).
"""

from __future__ import annotations

import os
import re
import threading
import urllib.parse
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import ConfigurationError, DatasetError
from zephon_torch.io.remote import retries, s3, web
from zephon_torch.io.remote.clients import Client
from zephon_torch.io.remote.merging import merge_ranges
from zephon_torch.io.remote.options import HiddenPath, StorageOptions
from zephon_torch.io.remote.stamps import stamp_of
from zephon_torch.io.remote.urls import as_named, fault_of, spelled, split_url, without_queries
from zephon_torch.io.storage.files import FileInfo, Kind, Storage, is_ignored, split_at_wildcard
from zephon_torch.io.storage.local import LocalStorage

_USER_INFO = re.compile(r"://[^/@]*@")
# Two ranges closer than this are one request: a request costs more than the bytes between them.
_MERGE_GAP_BYTES = 64 << 10
# Listing or writing may take so many times as long as a read: a bucket may have many pages.
_LONG = 10

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
    """A path resolved by fsspec, for the process that asked: some file systems cross no fork."""

    pid: int
    storage: weakref.ref[RemoteStorage]
    fs: Any
    full: str


# By storage and path. fsspec takes longer to look these up than a store nearby takes to answer.
_resolved: dict[tuple[int, str], _Resolved] = {}
_RESOLVED_KEPT = 1 << 16


def connect(
    path: str, storage_options: Mapping[str, Any] | StorageOptions | None = None
) -> Storage:
    """Return the storage whose root is a path or URL.

    Args:
        path: A local path, a ``file://`` URL, or any URL that fsspec knows; may hold wildcards.
        storage_options: Passed on to fsspec. Kept out of every message and of the `repr`.
    """
    url = split_url(path)
    if url is None:
        return LocalStorage(os.path.abspath(os.path.expanduser(path)))
    scheme, root, tail = url
    if scheme in ("file", "local"):
        # pathlib's as_uri() quotes, fsspec does not unquote: what exists as written wins.
        literal = os.path.exists(root)
        return LocalStorage(os.path.abspath(root if literal else urllib.parse.unquote(root)))
    return RemoteStorage(root.rstrip("/"), scheme, tail, StorageOptions(storage_options))


@dataclass(frozen=True, slots=True)
class RemoteStorage(Storage):
    """A prefix of anything that fsspec reaches: ``scheme://root`` + tail."""

    root: str
    scheme: str
    tail: str
    options: StorageOptions

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

        def find(client: Client, base: str) -> list[FileInfo]:
            return self._files(client.call("find", base, detail=True), base)

        files = self._ask("", find, times=_LONG)
        return [file for file in files if not any(map(is_ignored, file.path.split("/")))]

    def glob(self, pattern: str) -> list[FileInfo]:
        """List files that match."""

        def find(client: Client, base: str) -> list[FileInfo]:
            found = client.call("glob", f"{base.rstrip('/')}/{pattern}", detail=True)
            return self._files(found, base)

        return self._ask("", find, times=_LONG)

    def info(self, path: str) -> FileInfo:
        """Return size and stamp as they are now."""
        told = self._ask(path, _fresh_info)
        if told.get("size") is None:
            raise DatasetError(f"the store does not tell the size of {self.url(path)!r}")
        return FileInfo(path, int(told["size"]), stamp_of(told))

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
        self._ask(path, lambda client, full: client.call("pipe_file", full, content), times=_LONG)

    def url(self, path: str = "") -> str:
        """Return the path without credentials."""
        tail = without_queries(self.tail)
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

        if failed := fault_of(self.tail):
            raise ConfigurationError(f"cannot open {self.url(path)!r}: {failed}")
        url = HiddenPath(spelled(self.scheme, self._join(path), self.tail))
        names = retries.protocols(url.text())
        options = StorageOptions(web.with_checks(self.options.plain(), names))
        options = StorageOptions(s3.with_checks(options.plain(), names))
        try:
            with _resolving:
                fs, full = fsspec.core.url_to_fs(url.text(), **options.plain())
        except ImportError as error:
            extra = retries.extra_of(url.text())
            remedy = f": pip install 'zephon-torch[{extra}]'" if extra else ""
            failed = f"{error}{remedy}"
        except ValueError as error:  # an unknown protocol, or an option that cannot be
            failed = retries.without_credentials(str(error), self.options)
        if failed:  # without what was raised: its frames hold the options as they are
            raise ConfigurationError(f"cannot open {self.url(path)!r}: {failed}")
        return fs, as_named(str(full))

    def _ask(self, path: str, ask: Callable[[Client, str], _T], *, times: int = 1) -> _T:
        """Call with the file system and the path in its spelling; again if that may help.

        Args:
            path: Of the file.
            ask: Asks.
            times: As long as a read it may take so many times.

        Raises:
            FileNotFoundError: There is no such file, folder or bucket.
            StorageError: It failed for good.
        """

        def attempt(until: float) -> _T:
            fs, full = self._resolve(path)
            return ask(Client(fs, until, is_web=self.scheme in web.WEB), full)

        is_ours = not retries.retries_itself(f"{self.scheme}://{self.tail}")
        seconds = retries.seconds_allowed() * times
        return retries.until_answered(
            attempt, self.url(path), self.options, is_ours=is_ours, seconds=seconds
        )

    def _read_exactly(
        self, path: str, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]
    ) -> list[bytes]:
        """One request a range; shorter than asked for only where the file ends before."""
        # Empty ranges cannot be said in a request: stores answer with an error, or with everything.
        read = dict.fromkeys(np.flatnonzero(starts == stops).tolist(), b"")
        sizes = (stops - starts).tolist()

        def request(client: Client, full: str) -> None:
            # a later try asks for what is missing only
            left = [at for at in range(len(starts)) if at not in read]
            got = client.read_ranges(full, starts[left].tolist(), stops[left].tolist())
            failed: BaseException | None = None
            for at, part in zip(left, got, strict=True):
                if type(part) is bytes and len(part) == sizes[at]:
                    read[at] = part
                    continue
                try:
                    read[at] = _checked(client, full, part, int(starts[at]), int(stops[at]))
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
                files.append(FileInfo(path, int(told["size"]), stamp_of(told)))
        return files


def _checked(
    client: Client, full: str, part: bytes | BaseException, start: int, stop: int
) -> bytes:
    """Return what came if it is what was asked for, or all that there is."""
    if isinstance(part, BaseException):
        if not retries.is_past_the_end(part):
            raise part
        part = b""
    if len(part) > stop - start:
        raise retries.AnswerError(
            f"sent {len(part):,} bytes where {stop - start:,} were asked for: it does not serve "
            "ranges of files. Use one that does, or put simplecache:: before the URL to keep whole "
            "files on this machine"
        )
    if len(part) < stop - start and (_fresh_info(client, full).get("size") or 0) >= stop:
        raise retries.ShortReadError(f"{len(part):,} bytes instead of {stop - start:,}")
    return bytes(part)


def _fresh_info(client: Client, path: str) -> Mapping[str, Any]:
    client.fs.invalidate_cache()  # a remembered listing may be older than the newest shard
    told: Mapping[str, Any] = client.call("info", path)
    return told
