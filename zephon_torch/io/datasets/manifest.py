r"""A file that describes a dataset of files: a million shards without a listing, a look or an open.

::

    0    8 bytes   magic  b"ZEPHMAN\n"
    8    uint32    version of this layout, little endian like all numbers here
    12   uint32    length h of the header
    16   uint32    crc32 of everything behind these 20 bytes
    20   h bytes   header: one JSON object
                     format      name of the format
                     options     of the format, as an object
                     num_shards  n
                     beside      "" for most formats; name of the file that says what is in all
                                 shards; "*" where each has such a file beside it
    ...  int64[n]  numbers of samples
         int64[n]  sizes in bytes
         int64[n]  stamps, as ``files.py`` describes them
         int64[n]  sizes of the files beside, if there are any
         int64[n]  their stamps
         bytes     paths relative to the root in UTF-8, in ascending order, a NUL behind each

Neither the dataset's name nor its root nor anything that opens a storage is in it, nor leave to
load pickles: that is the reader's to give. Paths that lead out of the root are refused.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import ConfigurationError, DatasetError
from zephon_torch.io.datasets.content import FileContent
from zephon_torch.io.datasets.paths import Paths
from zephon_torch.io.datasets.shards import ShardTable
from zephon_torch.io.formats import FORMATS, FormatOptions, detect_format, make_options
from zephon_torch.io.remote.options import HiddenPath, StorageOptions
from zephon_torch.io.remote.storage import connect
from zephon_torch.io.storage.files import FileInfo, Storage
from zephon_torch.support import checks

MAGIC = b"ZEPHMAN\n"
VERSION = 1
_PREFIX = struct.Struct("<8sIII")
_MAX_HEADER_BYTES = 1 << 20
_EACH = "*"
_NOT_KEPT = "allow_pickle"  # whoever wrote a manifest must not decide it for whoever reads it
# Absolute, with an empty part, or with a part "." or ".."; paths end with NUL.
_LEADS_ELSEWHERE = re.compile(rb"(?:\A|\0|/)(?:\.{0,2})(?:/|\0)")


class _Unsound(Exception):
    """Why a manifest cannot be used, in words."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a manifest: everything about a dataset's files but their root."""

    format: str
    options: FormatOptions
    shards: ShardTable
    stamps: npt.NDArray[np.int64]
    beside: Sequence[FileInfo] = ()


def save(path: HiddenPath, storage_options: StorageOptions, manifest: Manifest) -> None:
    """Write a manifest, whole or not at all.

    Raises:
        ConfigurationError: Options that JSON cannot hold.
    """
    paths = manifest.shards.paths
    assert paths is not None
    header = {
        "format": manifest.format,
        "options": _plain_options(manifest),
        "num_shards": len(paths),
        "beside": _name_beside(manifest),
    }
    text = json.dumps(header).encode()
    columns = [manifest.shards.num_samples, manifest.shards.num_bytes, manifest.stamps]
    if manifest.beside:
        columns += [np.array([file.num_bytes for file in manifest.beside], np.int64)]
        columns += [np.array([file.stamp for file in manifest.beside], np.int64)]
    body: list[bytes | memoryview] = [text]
    body += [column.astype("<i8", copy=False).data for column in columns]
    body.append(paths.content)
    checksum = 0
    for part in body:
        checksum = zlib.crc32(part, checksum)
    folder, name = connect(path.text(), storage_options).split()
    if (format := detect_format(name)) is not None:
        raise ConfigurationError(
            f"a manifest called {name!r} would be taken for data of format {format!r}: call it "
            f"{name + '.zman'!r}"
        )
    folder.write(name, [_PREFIX.pack(MAGIC, VERSION, len(text), checksum), *body])


def load(
    path: HiddenPath,
    root: HiddenPath | None,
    storage_options: StorageOptions,
    options: Mapping[str, Any],
) -> tuple[Manifest, FileContent]:
    """Read a manifest, and make the content that lies below a root or beside it.

    Args:
        path: Of the manifest.
        root: Of the files; None where they lie beside it.
        storage_options: For fsspec.
        options: Of the format, those that a manifest does not keep.

    Raises:
        ConfigurationError: Its format or an option is not known here.
        DatasetError: It is not there, damaged, foreign, or names paths outside of the root.
    """
    folder, name = connect(path.text(), storage_options).split()
    raw = _read(folder, name)
    try:
        manifest = _parse(raw, options)
    except _Unsound as error:
        raise DatasetError(
            f"manifest {folder.url(name)!r} cannot be used: {error}; save it anew with "
            "Dataset.save_manifest"
        ) from None
    storage = folder if root is None else connect(root.text(), storage_options)
    content = FileContent(
        storage, manifest.format, manifest.options, manifest.stamps, manifest.beside
    )
    return manifest, content


def _name_beside(manifest: Manifest) -> str:
    if not manifest.beside:
        return ""
    if FORMATS[manifest.format].beside is not None:
        return _EACH
    (name,) = {file.path for file in manifest.beside}
    return name


def _read(folder: Storage, name: str) -> bytes:
    try:
        num_bytes = folder.info(name).num_bytes
        raw = folder.read(name, 0, num_bytes)
    except (FileNotFoundError, IsADirectoryError):
        raise DatasetError(f"no manifest {folder.url(name)!r}") from None
    if len(raw) != num_bytes:
        raise DatasetError(f"manifest {folder.url(name)!r} changed while it was read")
    return raw


def _plain_options(manifest: Manifest) -> dict[str, Any]:
    """Options as JSON gives them back."""
    options = asdict(manifest.options)  # type: ignore[call-overload]
    given = {name: options.pop(name) for name in (_NOT_KEPT,) if name in options}
    try:
        plain: dict[str, Any] = json.loads(json.dumps(options))
        is_same = make_options(manifest.format, plain | given) == manifest.options
    except (TypeError, ValueError):
        is_same = False
    if not is_same:
        raise ConfigurationError(
            f"options {options!r} cannot be kept in a manifest: give numbers, texts or lists"
        )
    return plain


def _parse(raw: bytes, given: Mapping[str, Any]) -> Manifest:
    if len(raw) < _PREFIX.size:
        raise _Unsound(f"it has only {len(raw)} bytes")
    magic, version, length, checksum = _PREFIX.unpack_from(raw)
    if magic != MAGIC:
        raise _Unsound("it is not a manifest of this package")
    if version != VERSION:
        raise _Unsound(f"its layout has version {version}, {VERSION} expected")
    content = memoryview(raw)[_PREFIX.size :]
    if length > min(len(content), _MAX_HEADER_BYTES):
        raise _Unsound(f"its header claims {length:,} bytes")
    if zlib.crc32(content) != checksum:
        raise _Unsound("its checksum does not match, it was cut short or damaged")
    format, options, num_shards, beside = _parse_header(bytes(content[:length]))
    if _NOT_KEPT in options:
        raise _Unsound(f"it says {_NOT_KEPT!r}, which only Dataset.from_manifest may")
    num_columns = 5 if beside else 3
    stop = length + 8 * num_columns * num_shards
    if stop > len(content):
        raise _Unsound(f"it claims {num_shards:,} shards, which it has no room for")
    columns = np.frombuffer(content[length:stop], "<i8").astype(np.int64)
    num_samples, num_bytes, stamps, *others = columns.reshape(num_columns, num_shards).copy()
    checks.total("its numbers of samples", num_samples, error=_Unsound)
    for sizes in (num_bytes, *others[:1]):
        checks.total("its sizes in bytes", sizes, maximum=checks.MAX_BYTES, error=_Unsound)
    paths = _parse_paths(bytes(content[stop:]), num_shards)
    shards = ShardTable(num_samples, num_bytes, paths)
    return Manifest(
        format,
        make_options(format, options | dict(given)),
        shards,
        stamps,
        _beside(format, beside, paths, others),
    )


def _beside(
    format: str, name: str, paths: Paths, columns: Sequence[npt.NDArray[np.int64]]
) -> Sequence[FileInfo]:
    """Files beside the shards, from their sizes and stamps."""
    if not name:
        return ()
    entry = FORMATS[format]
    if (name == _EACH) != (entry.beside is not None) or name not in (_EACH, *entry.markers):
        raise _Unsound(f"{name!r} is no file of format {format!r}")
    sizes, stamps = (column.tolist() for column in columns)
    names = (entry.name_beside(path) or name for path in paths)
    return tuple(map(FileInfo, names, sizes, stamps))


def _parse_header(text: bytes) -> tuple[str, dict[str, Any], int, str]:
    try:
        header = json.loads(text)
        format, options, num_shards = header["format"], header["options"], header["num_shards"]
        beside = header["beside"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _Unsound("its header cannot be parsed") from None
    if not (isinstance(format, str) and isinstance(options, dict) and isinstance(beside, str)):
        raise _Unsound("its header cannot be parsed")
    checks.integer("its num_shards", num_shards, minimum=0, error=_Unsound)
    return format, options, num_shards, beside


def _parse_paths(content: bytes, num_shards: int) -> Paths:
    if content.count(b"\0") != num_shards or (content and content[-1]):
        raise _Unsound(f"it does not hold {num_shards:,} paths")
    if found := _LEADS_ELSEWHERE.search(content):
        start = content.rfind(b"\0", 0, found.end() - 1) + 1
        path = content[start : content.index(b"\0", start)]
        raise _Unsound(f"its path {path.decode(errors='replace')!r} leads out of the root")
    try:
        paths = Paths(content)
        if not all(a < b for a, b in pairwise(paths)):
            raise _Unsound("its paths are not in ascending order")
    except UnicodeDecodeError as error:
        raise _Unsound("its paths are not UTF-8") from error
    return paths
