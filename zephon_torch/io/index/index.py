"""Where the records of a shard start: read from its sidecar, built and written when there is none.

A sidecar (layout in ``sidecar.py``) lies hidden beside its shard as ``.<file>.zidx``. Where that
folder cannot be written, and for remote shards, it lies in a cache folder under the sha256 of the
shard's full path: ``$ZEPHON_CACHE_DIR``, else ``$XDG_CACHE_HOME/zephon_torch``, else
``~/.cache/zephon_torch``. Where nothing can be written the index lives in this process.

A sidecar that does not match its shard is never used: it is rebuilt and a `StaleIndexWarning` says
why. Writing is atomic (temporary file in the same folder, then rename), so any number of processes
may build the same index at once; on one machine the others wait for the first (``turns.py``). This
module is the only writer of indexes.
"""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from zephon_torch.errors import DatasetError
from zephon_torch.io.index.sidecar import (
    Blocks,
    Index,
    Offsets,
    Origin,
    SidecarError,
    encode_header,
    find_fault,
    read_header,
    read_index,
)
from zephon_torch.io.index.turns import turn
from zephon_torch.io.storage.files import StoredFile
from zephon_torch.io.storage.local import make_own_folder, write_atomically

__all__ = [
    "Advance",
    "Blocks",
    "Index",
    "Indexer",
    "Offsets",
    "StaleIndexWarning",
    "UnsavedIndexWarning",
    "build",
    "cache_folder",
    "load",
    "load_index",
    "sidecar_paths",
    "stored_count",
]

Advance = Callable[[int], object]

_T = TypeVar("_T")


class StaleIndexWarning(UserWarning):
    """A sidecar did not match its shard and was built anew."""


class UnsavedIndexWarning(UserWarning):
    """No place for sidecars can be written: every process builds its indexes again."""


@dataclass(frozen=True, slots=True)
class Indexer:
    """How the offsets of one format are found.

    Attributes:
        format: Name of the format.
        version: Changes whenever `build` would find other offsets in the same file.
        build: Makes int64[num_samples + 1] offsets (as in ``sidecar.py``) from a file, or an
            `Index` of one that is compressed, and calls its second argument with the number of
            bytes of each part of the file it is done with.
        has_blocks: Whether a file of this name is compressed, so that its index has blocks.
    """

    format: str
    version: int
    build: Callable[[StoredFile, Advance], Offsets | Index]
    has_blocks: Callable[[str], bool] = lambda name: False

    def origin(self, file: StoredFile) -> Origin:
        """Return what a sidecar of this file must say."""
        return Origin(self.format, self.version, file.name, file.num_bytes, file.stamp)


# Indexes that could not be written, by the identity of their file and what they were made from.
_unsaved: dict[tuple[str, Origin], Index] = {}


def stored_count(file: StoredFile, indexer: Indexer) -> int | None:
    """Count the records by a sound index, without reading the shard.

    Returns:
        The number, or None when the index must be built.
    """
    if _unsaved and (index := _unsaved.get(_key(file, indexer))) is not None:
        return len(index.offsets) - 1
    header = _first_sound(file, indexer, read_header)
    return None if header is None else header.num_samples


def build(file: StoredFile, indexer: Indexer, advance: Advance) -> Offsets:
    """Read the whole shard, make its index and write the sidecar.

    Where another process of this machine is about it, wait and take what it made.

    Raises:
        DatasetError: The shard changed meanwhile.
    """
    return _build_in_turn(file, indexer, advance).offsets


def load(file: StoredFile, indexer: Indexer, num_samples: int) -> Offsets:
    """Return the offsets of a shard, from its sidecar or built anew.

    Returns:
        int64[num_samples + 1], read-only.

    Raises:
        DatasetError: The shard does not hold `num_samples` records.
    """
    return load_index(file, indexer, num_samples).offsets


def load_index(file: StoredFile, indexer: Indexer, num_samples: int) -> Index:
    """Return offsets and blocks of a shard; see `load`."""
    index = _unsaved.get(_key(file, indexer))
    if index is None:
        index = _first_sound(file, indexer, read_index)
    if index is None:
        index = _build_in_turn(file, indexer, _unwatched)
    if (found := len(index.offsets) - 1) != num_samples:
        raise DatasetError(
            f"{file.url!r} holds {found:,} records, {num_samples:,} when the dataset was made; "
            "make the dataset anew"
        )
    return index


def sidecar_paths(file: StoredFile) -> Iterator[str]:
    """Where a sidecar of this file may lie, best place first; mostly only the first is wanted."""
    if (local := file.storage.own_path(file.path)) is not None:
        folder, name = os.path.split(local)
        yield os.path.join(folder, f".{name}.zidx")
    digest = hashlib.sha256(os.fsencode(file.storage.identity(file.path))).hexdigest()
    yield os.path.join(cache_folder(), f"{digest}.zidx")


def cache_folder() -> str:
    """Where this package keeps what it cannot keep beside the data; an absolute path."""
    if folder := os.environ.get("ZEPHON_CACHE_DIR"):
        return os.path.abspath(folder)
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(os.path.abspath(base), "zephon_torch")


def _build_in_turn(file: StoredFile, indexer: Indexer, advance: Advance) -> Index:
    with turn(file.storage.own_path(file.path)) as others_were_first:
        made = _first_sound(file, indexer, read_index) if others_were_first else None
        if made is None:
            return _build(file, indexer, advance)
    advance(file.num_bytes)
    return made


def _build(file: StoredFile, indexer: Indexer, advance: Advance) -> Index:
    found = indexer.build(file, advance)
    index = found if isinstance(found, Index) else Index(found)
    file.check_unchanged()
    assert not (fault := find_fault(index, file.num_bytes)), f"{file.url}: {fault}"
    for table in index.tables:
        table.setflags(write=False)
    if not _save(file, indexer.origin(file), index):
        _keep_unsaved(file, indexer, index)
    return index


def _key(file: StoredFile, indexer: Indexer) -> tuple[str, Origin]:
    return file.storage.identity(file.path), indexer.origin(file)


def _unwatched(num_bytes: int) -> None:
    """Show no progress: a reader that must build an index does so for one shard."""


def _first_sound(
    file: StoredFile, indexer: Indexer, read: Callable[[str, Origin, bool], _T]
) -> _T | None:
    """Return what `read` makes of the first sidecar it accepts; warn if it only refused some."""
    origin, refused = indexer.origin(file), []
    has_blocks = indexer.has_blocks(file.name)
    for path in sidecar_paths(file):
        try:
            return read(path, origin, has_blocks)
        except SidecarError as error:
            refused.append(f"{path!r}: {error}")
        except OSError:  # not there, or not readable: as good as not there
            continue
    if refused:
        warnings.warn(
            f"building the index of {file.url!r} anew, not using {'; '.join(refused)}",
            StaleIndexWarning,
            stacklevel=2,
        )
    return None


def _save(file: StoredFile, origin: Origin, index: Index) -> bool:
    """Write the sidecar to the first place that takes it."""
    header = encode_header(origin, index)
    for path in sidecar_paths(file):
        with suppress(OSError):
            make_own_folder(os.path.dirname(path))
            tables = [table.astype("<i8", copy=False).data for table in index.tables]
            write_atomically(path, (header, *tables), _mode(file))
            return True
    return False


def _mode(file: StoredFile) -> int:
    """Whoever may read the shard may read its index: temporary files are private otherwise."""
    local = file.storage.own_path(file.path)
    return 0o600 if local is None else 0o600 | (os.stat(local).st_mode & 0o666)


def _keep_unsaved(file: StoredFile, indexer: Indexer, index: Index) -> None:
    if not _unsaved:
        warnings.warn(
            f"the index of {file.url!r} can be written neither beside it nor to "
            f"{cache_folder()!r}: every process will build it again; point ZEPHON_CACHE_DIR to a "
            "folder that can be written",
            UnsavedIndexWarning,
            stacklevel=2,
        )
    _unsaved[_key(file, indexer)] = index
