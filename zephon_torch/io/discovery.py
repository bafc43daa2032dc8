"""From what a user names (a folder, a file, a pattern) to counted shards of one format."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import ConfigurationError, DatasetError
from zephon_torch.io.bar import byte_bar
from zephon_torch.io.files import FileInfo, Storage, StoredFile, is_ignored
from zephon_torch.io.formats import (
    FORMATS,
    FolderFormat,
    FormatOptions,
    describe_formats,
    detect_format,
    load_format,
    marked_format,
)
from zephon_torch.io.storage import connect

_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4")
_NUM_NAMED = 5


@dataclass(frozen=True, slots=True)
class Found:
    """The data files of a dataset, ordered by path."""

    storage: Storage
    format: str
    files: Sequence[FileInfo]


def find_shards(
    path: str | os.PathLike[str], format: str | None, storage_options: Mapping[str, Any] | None
) -> Found:
    """List the data files that a path stands for.

    Args:
        path: A folder (read to any depth), one file, or a pattern with wildcards. What exists under
            the very name is never taken for a pattern.
        format: Name of a format; None to tell it from the extensions.
        storage_options: For fsspec.

    Raises:
        ConfigurationError: Not a path, or an unknown format.
        DatasetError: Nothing there, no data there, or more than one format.
    """
    if format is not None:
        load_format(format)
    storage = connect(path_text(path), storage_options)
    kind = storage.kind()
    if kind == "folder":
        files, found_format = _choose_in_folder(storage, format)
    else:
        storage, files, names = _single(storage) if kind == "file" else _match(storage)
        found_format = format or _common_format(storage, files, names)
    _refuse_broken_links(storage, files)
    return Found(storage, found_format, sorted(files))


def count_samples(dataset: str, found: Found, options: FormatOptions) -> npt.NDArray[np.int64]:
    """Count the records of every file, int64[num_files]; builds the indexes that are missing."""
    module = load_format(found.format)
    counts = np.zeros(len(found.files), dtype=np.int64)
    missing: list[int] = []
    for at, file in enumerate(found.files):
        known = module.count(StoredFile(found.storage, *file), options)
        if known is None:
            missing.append(at)
        else:
            counts[at] = known
    num_bytes = sum(found.files[at].num_bytes for at in missing)
    title = f"indexing {dataset!r}"
    if len(missing) > 1:
        title += " (zephon-torch index does it in parallel)"
    with byte_bar(title, num_bytes) as advance:
        for at in missing:
            file = found.files[at]
            counts[at] = module.scan(StoredFile(found.storage, *file), options, advance)
    return counts


def path_text(path: str | os.PathLike[str]) -> str:
    """Return a path that a user gave as text.

    Raises:
        ConfigurationError: It is none.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text:
        raise ConfigurationError(
            f"path must be a folder, a file or a pattern as str or os.PathLike, got {path!r}"
        )
    return text


def _single(storage: Storage) -> tuple[Storage, list[FileInfo], set[str]]:
    folder, name = storage.split()
    files = [folder.info(name)]
    return folder, files, _names_beside(folder, files)


def _names_beside(folder: Storage, files: Sequence[FileInfo]) -> set[str]:
    """Names of files that were not asked for, but say what those are that were."""
    names = {
        file.path.removesuffix(extension) + entry.beside
        for entry in FORMATS.values()
        if entry.beside is not None
        for extension in entry.extensions
        for file in files
        if file.path.endswith(extension)
    }
    return {name for name in names if _is_there(folder, name)}


def _is_there(folder: Storage, name: str) -> bool:
    try:
        folder.info(name)
    except FileNotFoundError:
        return False
    return True


def _match(storage: Storage) -> tuple[Storage, list[FileInfo], set[str]]:
    parts = storage.split_glob()
    if parts is None:
        raise DatasetError(f"no file or folder {storage.url()!r}")
    folder, pattern = parts
    asked = [part for part in pattern.split("/") if part.startswith("_")]
    files = [
        file
        for file in folder.glob(pattern)
        if not any(_is_left_out(part, asked) for part in file.path.split("/"))
    ]
    if not files:
        raise DatasetError(f"no file matches {storage.url()!r}")
    return folder, files, _names_beside(folder, files)


def _is_left_out(name: str, asked: Sequence[str]) -> bool:
    """Whether a file or folder that a wildcard found is no data; "_*" asks for such, "*" not."""
    is_asked = any(fnmatch.fnmatchcase(name, part) for part in asked)
    return is_ignored(name.lstrip("_") if is_asked else name)


def _choose_in_folder(storage: Storage, format: str | None) -> tuple[list[FileInfo], str]:
    """Pick the data files of a folder; others (a README) may lie beside them."""
    listed = sorted(storage.list_files())
    names = {file.path for file in listed}
    marked = marked_format(names)
    if marked is not None and format in (None, marked):
        return list(cast(FolderFormat, load_format(marked)).choose(storage, listed)), marked
    by_format: dict[str, list[FileInfo]] = {}
    for file in listed:
        if (name := detect_format(file.path, names)) is not None and format in (None, name):
            by_format.setdefault(name, []).append(file)
    _refuse_compressed(storage, listed)
    if len(by_format) > 1:
        _refuse_mixed(storage, {name: files[0].path for name, files in by_format.items()})
    if not by_format:
        _refuse_empty(storage, listed, format)
    ((name, files),) = by_format.items()
    return files, name


def _common_format(storage: Storage, files: Sequence[FileInfo], names: Collection[str]) -> str:
    """Return the one format of files that were asked for by name or pattern."""
    _refuse_compressed(storage, files)
    examples: dict[str, str] = {}
    for file in sorted(files):
        name = detect_format(file.path, names)
        if name is None:
            raise DatasetError(
                f"cannot tell the format of {storage.url(file.path)!r} from its extension; known "
                f"are {describe_formats()}: name one with format="
            )
        examples.setdefault(name, file.path)
    if len(examples) > 1:
        _refuse_mixed(storage, examples)
    return next(iter(examples))


def _refuse_compressed(storage: Storage, files: Sequence[FileInfo]) -> None:
    """Leaving out compressed shards that lie among others would lose data without a word."""
    for file in files:
        if not file.path.lower().endswith(_COMPRESSED):
            continue
        stem, extension = os.path.splitext(file.path)
        is_unknown = extension.lower() in _COMPRESSED and detect_format(file.path) is None
        if is_unknown and detect_format(stem):
            raise DatasetError(
                f"{storage.url(file.path)!r} is compressed, which is not supported: decompress it "
                "or move it out of the dataset"
            )


def _refuse_mixed(storage: Storage, examples: Mapping[str, str]) -> None:
    named = ", ".join(f"{path!r} is {name}" for name, path in examples.items())
    raise DatasetError(
        f"{storage.url()!r} holds files of more than one format: {named}; pick one with format=, "
        "or make one dataset of each"
    )


def _refuse_empty(storage: Storage, listed: Sequence[FileInfo], format: str | None) -> None:
    paths = [file.path for file in listed]
    content = ", ".join(map(repr, paths[:_NUM_NAMED])) or "nothing"
    if len(paths) > _NUM_NAMED:
        content += f" and {len(paths) - _NUM_NAMED:,} more"
    wanted = f"{format!r} ({FORMATS[format]})" if format else describe_formats()
    raise DatasetError(
        f"folder {storage.url()!r} holds no data files: found {content}, expected {wanted}; hidden "
        "names and names that begin with '_' or end with '.tmp' do not count"
    )


def _refuse_broken_links(storage: Storage, files: Sequence[FileInfo]) -> None:
    for file in files:
        if file.num_bytes < 0:
            raise DatasetError(f"{storage.url(file.path)!r} is a symbolic link to nothing")
