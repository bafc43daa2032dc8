"""From what a user names (a folder, a file, a pattern) to counted shards of one format."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import DatasetError
from zephon_torch.io.formats import (
    FORMATS,
    AlikeFormat,
    FolderFormat,
    FormatOptions,
    describe_formats,
    detect_format,
    load_format,
    marked_format,
)
from zephon_torch.io.remote.options import HiddenPath, StorageOptions
from zephon_torch.io.remote.storage import connect
from zephon_torch.io.storage.files import FileInfo, Storage, StoredFile, is_ignored
from zephon_torch.support.progress_bar import byte_bar

_COMPRESSED = (".gz", ".zst", ".bz2", ".xz", ".lz4")
_COMPRESSED_TARS = (".tgz", ".tbz", ".tbz2", ".txz", ".tzst")
_NUM_NAMED = 5


@dataclass(frozen=True, slots=True)
class Found:
    """The data files of a dataset, ordered by path.

    Attributes:
        beside: for each the file that says what is in it; empty for formats without such files.
    """

    storage: Storage
    format: str
    files: Sequence[FileInfo]
    beside: Sequence[FileInfo]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, at: int) -> StoredFile:
        """A file as readers get it."""
        beside = StoredFile(self.storage, *self.beside[at]) if self.beside else None
        return StoredFile(self.storage, *self.files[at], beside)

    def part(self, start: int, stop: int) -> Found:
        """Some of the files."""
        return replace(self, files=self.files[start:stop], beside=self.beside[start:stop])


def find_shards(
    path: HiddenPath, format: str | None, storage_options: StorageOptions | None
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
    storage = connect(path.text(), storage_options)
    kind = storage.kind()
    if kind == "folder":
        files, known, found_format = _choose_in_folder(storage, format)
    else:
        storage, files, known = _single(storage) if kind == "file" else _match(storage)
        found_format = format or _common_format(storage, files, known)
    _refuse_broken_links(storage, files)
    files = sorted(files)
    return Found(storage, found_format, files, _beside(storage, found_format, files, known))


def count_samples(dataset: str, found: Found, options: FormatOptions) -> npt.NDArray[np.int64]:
    """Count the records of every file, int64[num_files]; builds the indexes that are missing."""
    module = load_format(found.format)
    if hasattr(module, "count_all"):
        with byte_bar(f"counting {dataset!r}", sum(f.num_bytes for f in found.files)) as advance:
            files = [found[at] for at in range(len(found))]
            together = cast(AlikeFormat, module).count_all(files, options, advance)
        return np.array(together, dtype=np.int64)
    counts = np.zeros(len(found.files), dtype=np.int64)
    missing: list[int] = []
    for at in range(len(found)):
        known = module.count(found[at], options)
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
            counts[at] = module.scan(found[at], options, advance)
    return counts


def _single(storage: Storage) -> tuple[Storage, list[FileInfo], dict[str, FileInfo]]:
    folder, name = storage.split()
    files = [folder.info(name)]
    return folder, files, _look_beside(folder, files)


def _look_beside(folder: Storage, files: Sequence[FileInfo]) -> dict[str, FileInfo]:
    """Files by name that were not asked for, but say what those are that were."""
    names = {
        str(entry.name_beside(file.path))
        for entry in FORMATS.values()
        if entry.beside is not None
        for file in files
        if file.path.lower().endswith(entry.extensions)
    }
    known = {}
    for name in names:
        with suppress(FileNotFoundError):
            known[name] = folder.info(name)
    return known


def _beside(
    storage: Storage, format: str, files: Sequence[FileInfo], known: Mapping[str, FileInfo]
) -> list[FileInfo]:
    """Return for each file the one that says what is in it, if the format has such files."""
    entry = FORMATS[format]
    marker = next((name for name in entry.markers if name in known), None)
    if entry.beside is None and marker is None:
        return []
    names = [entry.name_beside(file.path) or str(marker) for file in files]
    for file, name in zip(files, names, strict=True):
        if name not in known:
            raise DatasetError(
                f"{storage.url(file.path)!r} is read as format {format!r} with "
                f"{storage.url(name)!r}, which is not there: restore it, or name another format "
                "with format="
            )
    return [known[name] for name in names]


def _match(storage: Storage) -> tuple[Storage, list[FileInfo], dict[str, FileInfo]]:
    parts = storage.split_glob()
    if parts is None:
        raise DatasetError(f"no file or folder {storage.url()!r}{_braces_hint(storage)}")
    folder, pattern = parts
    asked = [part for part in pattern.split("/") if part.startswith("_")]
    files = [
        file
        for file in folder.glob(pattern)
        if not any(_is_left_out(part, asked) for part in file.path.split("/"))
    ]
    if not files:
        raise DatasetError(f"no file matches {storage.url()!r}{_braces_hint(storage)}")
    return folder, files, _look_beside(folder, files)


def _braces_hint(storage: Storage) -> str:
    has_braces = "{" in storage.url()
    return ": braces are not expanded, use *, ** or [0-9]" if has_braces else ""


def _is_left_out(name: str, asked: Sequence[str]) -> bool:
    """Whether a file or folder that a wildcard found is no data; "_*" asks for such, "*" not."""
    is_asked = any(fnmatch.fnmatchcase(name, part) for part in asked)
    return is_ignored(name.lstrip("_") if is_asked else name)


def _choose_in_folder(
    storage: Storage, format: str | None
) -> tuple[list[FileInfo], dict[str, FileInfo], str]:
    """Pick the data files of a folder; others (a README) may lie beside them."""
    listed = sorted(storage.list_files())
    names = {file.path: file for file in listed}
    marked = marked_format(names)
    if marked is not None and format in (None, marked):
        chosen = cast(FolderFormat, load_format(marked)).choose(storage, listed)
        return list(chosen), names, marked
    by_format: dict[str, list[FileInfo]] = {}
    for file in listed:
        if (name := detect_format(file.path, names)) is not None and format in (None, name):
            by_format.setdefault(name, []).append(file)
    _refuse_compressed(storage, listed)
    if format in by_format:
        _refuse_alone(storage, listed, names, str(format))
    if len(by_format) > 1:
        _refuse_mixed(storage, {name: files[0].path for name, files in by_format.items()})
    if not by_format:
        _refuse_empty(storage, listed, format)
    ((name, files),) = by_format.items()
    return files, names, name


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
        if not file.path.lower().endswith((*_COMPRESSED, *_COMPRESSED_TARS)):
            continue
        stem, extension = os.path.splitext(file.path)
        if extension.lower() in _COMPRESSED_TARS:
            stem, extension = f"{stem}.tar", _COMPRESSED[0]
        is_unknown = extension.lower() in _COMPRESSED and detect_format(file.path) is None
        if is_unknown and detect_format(stem):
            raise DatasetError(
                f"{storage.url(file.path)!r} is compressed in a way that is not supported: "
                "decompress it (JSON lines may be compressed by gzip or zstd) or move it out of "
                "the dataset"
            )


def _refuse_alone(
    storage: Storage, listed: Sequence[FileInfo], names: Collection[str], format: str
) -> None:
    """Leaving out a shard that has lost the file beside it would lose data without a word."""
    entry = FORMATS[format]
    for file in listed if entry.beside else ():
        if file.path.lower().endswith(entry.extensions) and not entry.has(file.path, names):
            raise DatasetError(
                f"{storage.url(file.path)!r} lies among files of format {format!r} without its "
                f"{storage.url(str(entry.name_beside(file.path)))!r}: restore that, or move it away"
            )


def _refuse_mixed(storage: Storage, examples: Mapping[str, str]) -> None:
    named = ", ".join(f"{path!r} is {name}" for name, path in examples.items())
    raise DatasetError(
        f"{storage.url()!r} holds files of more than one format: {named}; pick one with format=, "
        "or make one dataset of each"
    )


def _refuse_empty(storage: Storage, listed: Sequence[FileInfo], format: str | None) -> None:
    paths = [file.path for file in listed]
    content = ", ".join(_describe(path, set(paths)) for path in paths[:_NUM_NAMED]) or "nothing"
    if len(paths) > _NUM_NAMED:
        content += f" and {len(paths) - _NUM_NAMED:,} more"
    wanted = f"{format!r} ({FORMATS[format]})" if format else describe_formats()
    raise DatasetError(
        f"folder {storage.url()!r} holds no data files: found {content}, expected {wanted}; hidden "
        "names and names that begin with '_' or end with '.tmp' do not count"
        + ("; a pattern such as '*.json' also takes files of other extensions" if format else "")
    )


def _describe(path: str, names: Collection[str]) -> str:
    name = detect_format(path, names)
    return f"{path!r} ({name})" if name else repr(path)


def _refuse_broken_links(storage: Storage, files: Sequence[FileInfo]) -> None:
    for file in files:
        if file.num_bytes < 0:
            with suppress(FileNotFoundError):
                storage.info(file.path)  # says what else it is
            raise DatasetError(f"{storage.url(file.path)!r} is a symbolic link to nothing")
