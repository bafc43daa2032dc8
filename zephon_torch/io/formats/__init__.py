"""File formats by name: a new format is one module and one entry of `FORMATS`.

Files are told by their extensions. A format whose folders have an index of their own names that
file as a marker: a folder that holds it is of that format, and the format's module says which of
the listed files are its shards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, Protocol, cast

from zephon_torch.errors import ConfigurationError
from zephon_torch.io.storage.files import FileInfo, Storage, StoredFile
from zephon_torch.io.storage.reader import Reader


class FormatOptions(Protocol):
    """Keywords of one format: a frozen dataclass with a default for each field.

    Its constructor raises ConfigurationError for values that cannot be.
    """

    @property
    def identity(self) -> str | None:
        """Text for the fingerprint: options that decide which samples stand where; None: none."""
        ...


@dataclass(frozen=True, slots=True)
class NoOptions:
    """Of formats without any."""

    @property
    def identity(self) -> None:
        """Nothing."""


class Format(Protocol):
    """Attributes and functions that the module of a format provides."""

    Options: Callable[..., FormatOptions]

    def count(self, file: StoredFile, options: Any) -> int | None:
        """Count the records if that is cheap; else return None, and `scan` is called."""
        ...

    def scan(self, file: StoredFile, options: Any, advance: Callable[[int], object]) -> int:
        """Count the records by reading the file; `advance` gets the bytes of each block."""
        ...

    def open_reader(self, file: StoredFile, options: Any, dataset: str, num_samples: int) -> Reader:
        """Open one file; `dataset` is its name for messages."""
        ...


class FolderFormat(Format, Protocol):
    """A format that has a marker."""

    def choose(self, storage: Storage, listed: Sequence[FileInfo]) -> Sequence[FileInfo]:
        """The shards of a folder that holds the marker, of all its listed files."""
        ...


class AlikeFormat(Protocol):
    """A format whose files must be alike, in their columns say.

    Its files are counted together, by this in place of `Format.count` and `Format.scan`.
    """

    def count_all(
        self, files: Sequence[StoredFile], options: Any, advance: Callable[[int], object]
    ) -> Sequence[int]:
        """Count the records of each file; `advance` gets the bytes of each that is done."""
        ...


@dataclass(frozen=True, slots=True)
class FormatEntry:
    """How files of a format are told, and the module that is imported on first use.

    Attributes:
        extensions: lower case.
        module: dotted name.
        codecs: extensions of compression that may follow.
        beside: extension of a file that lies beside each shard in place of its own; shards without
            it are of another format.
        markers: names of files that only folders of this format have in their root; any will do.
    """

    extensions: tuple[str, ...]
    module: str
    codecs: tuple[str, ...] = ()
    beside: str | None = None
    markers: tuple[str, ...] = ()

    def name_beside(self, path: str) -> str | None:
        """Path of the file beside a shard that says what is in it; None for most formats."""
        if self.beside is None:
            return None
        extension = next(e for e in (*self.extensions, "") if path.lower().endswith(e))
        return path[: len(path) - len(extension)] + self.beside

    def has(self, path: str, names: Collection[str]) -> bool:
        """Whether a path is a shard of this format. `names`: all paths that are there."""
        lower = path.lower()
        for codec in self.codecs:
            if lower.endswith(codec):
                lower, path = lower.removesuffix(codec), path[: -len(codec)]
                break
        for extension in self.extensions:
            if lower.endswith(extension):
                return self.beside is None or self.name_beside(path) in names
        return False

    def __str__(self) -> str:
        text = " ".join((*self.extensions, *self.codecs))
        return text if self.beside is None else f"{text} with {self.beside}"


# The first that has a file wins.
FORMATS = {
    "jsonl": FormatEntry(
        (".jsonl", ".ndjson"), "zephon_torch.io.formats.json.jsonl", codecs=(".gz", ".zst")
    ),
    "mds": FormatEntry(
        (".mds",),
        "zephon_torch.io.formats.mds.mds",
        codecs=(".zstd", ".zst", ".gz", ".bz2", ".br", ".snappy"),
        markers=("index.json",),
    ),
    "megatron": FormatEntry((".bin",), "zephon_torch.io.formats.rows.megatron", beside=".idx"),
    "tokens": FormatEntry((".npy", ".bin"), "zephon_torch.io.formats.rows.tokens"),
    "webdataset": FormatEntry((".tar",), "zephon_torch.io.formats.tar.webdataset"),
    "parquet": FormatEntry((".parquet", ".pq"), "zephon_torch.io.formats.tables.parquet"),
    "arrow": FormatEntry(
        (".arrow", ".arrows", ".feather"),
        "zephon_torch.io.formats.tables.arrow",
        markers=("state.json", "dataset_dict.json"),
    ),
}


def load_format(name: str) -> Format:
    """Import the module of a format.

    Raises:
        ConfigurationError: No format of that name is known.
    """
    if name not in FORMATS:
        raise ConfigurationError(f"unknown format {name!r}; known are {describe_formats()}")
    return cast(Format, import_module(FORMATS[name].module))


def make_options(name: str, given: Mapping[str, Any]) -> FormatOptions:
    """Options of a format from keywords.

    Raises:
        ConfigurationError: A keyword that the format does not have, or a value that cannot be.
    """
    kind = load_format(name).Options
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for keyword in given:
        if keyword not in known:
            has = ", ".join(map(repr, known)) or "none"
            raise ConfigurationError(f"format {name!r} has no option {keyword!r}; it has {has}")
    return kind(**given)


def without_pickles(options: FormatOptions) -> FormatOptions:
    """Options under which a pickle is only named, whatever was asked for: for those who look."""
    change = getattr(options, "without_pickles", None)
    return options if change is None else cast(FormatOptions, change())


def detect_format(path: str, names: Collection[str] = ()) -> str | None:
    """Return the format that a path has by its extension, None without one. Pure."""
    for name, entry in FORMATS.items():
        if entry.has(path, names):
            return name
    return None


def marked_format(names: Collection[str]) -> str | None:
    """Return the format of which a marker and a shard are among the names in a folder. Pure.

    A marker alone is no more than a name: many programs write an ``index.json``.
    """
    for name, entry in FORMATS.items():
        if any(marker in names for marker in entry.markers) and any(
            entry.has(path, names) for path in names
        ):
            return name
    return None


def describe_formats() -> str:
    """List the known formats with their extensions, for messages."""
    return ", ".join(f"{name!r} ({entry})" for name, entry in FORMATS.items())
