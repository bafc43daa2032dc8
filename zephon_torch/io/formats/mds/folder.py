"""The ``index.json`` of a folder of MDS shards: which files there are and what is in them.

Source: ``streaming/base/format`` of mosaicml-streaming 0.13, version 2 of the layout.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from zephon_torch.errors import DatasetError
from zephon_torch.io.storage.files import StoredFile
from zephon_torch.support import checks

MARKER = "index.json"
_MAX_SHARD_BYTES = (1 << 32) - 1  # offsets in a shard have 32 bits
_MAX_LOADED = 8

_T = TypeVar("_T")

# What other index.json files look like: keys that tell them, and whose they are.
_STRANGERS = {
    frozenset({"chunks", "config"}): "litData's, of optimized chunks",
    frozenset({"shardlist"}): "webdataset's (wids), of tar files",
    frozenset({"weight_map"}): "of a model's weights",
}


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        name: key of it in samples.
        encoding: how its values are stored.
        size: bytes of each value; None where each record says it.
    """

    name: str
    encoding: str
    size: int | None


@dataclass(frozen=True, slots=True)
class MdsFile:
    """One file that holds a shard.

    Attributes:
        path: relative to the folder of the index.
        num_bytes: its size.
        codec: how it is compressed; None for the shard as it is.
        shard_bytes: size of the shard when it is not compressed.
        num_samples: records.
        columns: in the order in which records have them.
    """

    path: str
    num_bytes: int
    codec: str | None
    shard_bytes: int
    num_samples: int
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """Content of an ``index.json``.

    Attributes:
        shards: for each the files that may hold it, best first.
        files: all of them by path.
    """

    shards: list[list[MdsFile]]
    files: dict[str, MdsFile]


# The last ones, for readers: an index of many shards takes a while to parse.
_loaded: dict[tuple[str, int, int], Index] = {}


def load_index(file: StoredFile, *, anew: bool = False) -> Index:
    """Read an index.json, or find it among those read last.

    Raises:
        DatasetError: It is not one of MDS shards, or is damaged.
    """
    key = (file.storage.identity(file.path), file.num_bytes, file.stamp)
    index = None if anew else _loaded.get(key)
    if index is None:
        index = _Parser(file).parse(b"".join(file.blocks()))
        _loaded[key] = index
        for old in list(_loaded)[:-_MAX_LOADED]:  # a copy: other threads may be here, too
            _loaded.pop(old, None)
    return index


class _Parser:
    """Checks every field that is used, and names the shard whose field is wrong."""

    def __init__(self, file: StoredFile) -> None:
        self._url = file.url
        self._columns: dict[tuple[Column, ...], tuple[Column, ...]] = {}

    def parse(self, content: bytes) -> Index:
        try:
            found = json.loads(content)
        except (ValueError, RecursionError) as error:
            self._refuse(
                f"is not valid JSON: {error}; if other files of this folder are meant, name their "
                "format with format="
            )
        if not isinstance(found, dict) or not isinstance(found.get("shards"), list):
            self._refuse_stranger(found)
        if found.get("version") != 2:
            self._refuse(
                f"has version {checks.shown(found.get('version'))} of the MDS layout, 2 expected"
            )
        if not found["shards"]:
            self._refuse("lists no shards")
        shards = [self._shard(number, shard) for number, shard in enumerate(found["shards"])]
        files: dict[str, MdsFile] = {}
        for file in (file for shard in shards for file in shard):
            if file.path in files:
                self._refuse(f"lists {file.path!r} twice")
            files[file.path] = file
        return Index(shards, files)

    def _shard(self, number: int, shard: Any) -> list[MdsFile]:
        where = f"shard {number}"
        if not isinstance(shard, dict):
            self._refuse(f"{where} is {type(shard).__name__}, not an object")
        if (format := shard.get("format")) != "mds":
            self._refuse(
                f"{where} is of Streaming's format {checks.shown(format)}, only 'mds' is read: "
                "write the data as MDS, or read the files themselves in a format of this package"
            )
        if shard.get("version") != 2:
            self._refuse(f"{where} has version {checks.shown(shard.get('version'))}, 2 expected")
        num_samples = self._number(shard, "samples", where)
        columns = self._columns_of(shard, where)
        path, num_bytes = self._file(shard, "raw_data", where)
        if num_bytes < 4 * (num_samples + 2):
            self._refuse(f"{where} has {num_bytes:,} bytes, too few for {num_samples:,} samples")
        files = [MdsFile(path, num_bytes, None, num_bytes, num_samples, columns)]
        if shard.get("zip_data"):
            path, packed = self._file(shard, "zip_data", where)
            codec = self._field(shard, "compression", str, where).partition(":")[0]
            files.append(MdsFile(path, packed, codec, num_bytes, num_samples, columns))
        return files

    def _columns_of(self, shard: Mapping[str, Any], where: str) -> tuple[Column, ...]:
        names, encodings, sizes = (
            self._field(shard, f"column_{kind}", list, where)
            for kind in ("names", "encodings", "sizes")
        )
        if not len(names) == len(encodings) == len(sizes) or len(set(map(str, names))) < len(names):
            told = tuple(map(checks.shown, (names, encodings, sizes)))
            self._refuse("{} has columns {}, encodings {}, sizes {}".format(where, *told))
        columns = []
        for name, encoding, size in zip(names, encodings, sizes, strict=True):
            is_size = size is None or (type(size) is int and 0 <= size <= _MAX_SHARD_BYTES)
            if not isinstance(name, str) or not isinstance(encoding, str) or not is_size:
                column = checks.shown((name, encoding, size))
                self._refuse(f"{where} has a column of name, encoding and size {column}")
            columns.append(Column(name, encoding, size or None))
        return self._columns.setdefault(tuple(columns), tuple(columns))

    def _file(self, shard: Mapping[str, Any], key: str, where: str) -> tuple[str, int]:
        file = self._field(shard, key, dict, where)
        path = self._field(file, "basename", str, f"{where}, {key}")
        is_below = path and posixpath.normpath(path) == path and path.split("/")[0] != ".."
        if not is_below or path.startswith("/"):
            self._refuse(f"{where} is in {path!r}, which is no plain path below the folder")
        return path, self._number(file, "bytes", f"{where}, {key}")

    def _number(self, found: Mapping[str, Any], key: str, where: str) -> int:
        name = f"{self._url!r}, {where}: {key}"
        return checks.integer(
            name, found.get(key), minimum=0, maximum=_MAX_SHARD_BYTES, error=DatasetError
        )

    def _field(self, found: Mapping[str, Any], key: str, kind: type[_T], where: str) -> _T:
        value = found.get(key)
        if not isinstance(value, kind):
            self._refuse(f"{where} has {key} {checks.shown(value)}, {kind.__name__} expected")
        return value

    def _refuse_stranger(self, found: Any) -> NoReturn:
        keys = set(found) if isinstance(found, dict) else set()
        owner = next((owner for mark, owner in _STRANGERS.items() if mark <= keys), None)
        seems = f"seems to be {owner}" if owner else f"has the keys {sorted(keys)[:5]}"
        self._refuse(
            f"is not an index of MDS shards, it {seems}: if other files of this folder are meant, "
            "name their format with format="
        )

    def _refuse(self, reason: str) -> NoReturn:
        raise DatasetError(f"{self._url!r} {reason}")
