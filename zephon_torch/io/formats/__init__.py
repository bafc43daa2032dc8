"""File formats by name: a new format is one module and one line of `FORMATS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from zephon_torch.errors import ConfigurationError
from zephon_torch.io.files import StoredFile
from zephon_torch.io.formats.reader import Reader


class Format(Protocol):
    """What a format's module provides, as functions of the module."""

    def count(self, file: StoredFile) -> int | None:
        """Count the records if that is cheap; else return None, and `scan` is called."""
        ...

    def scan(self, file: StoredFile, advance: Callable[[int], object]) -> int:
        """Count the records by reading the file; `advance` gets the bytes of each block."""
        ...

    def open_reader(self, file: StoredFile, dataset: str, num_samples: int) -> Reader:
        """Open one file; `dataset` is its name for messages."""
        ...


@dataclass(frozen=True, slots=True)
class FormatEntry:
    """Extensions of a format (lower case), and the module that is imported on first use."""

    extensions: tuple[str, ...]
    module: str


FORMATS = {
    "jsonl": FormatEntry((".jsonl", ".ndjson"), "zephon_torch.io.formats.jsonl"),
}


def load_format(name: str) -> Format:
    """Import the module of a format.

    Raises:
        ConfigurationError: No format of that name is known.
    """
    if name not in FORMATS:
        raise ConfigurationError(f"unknown format {name!r}; known are {describe_formats()}")
    return cast(Format, import_module(FORMATS[name].module))


def detect_format(path: str) -> str | None:
    """Return the format whose extension a path has, None without one. Pure."""
    for name, entry in FORMATS.items():
        if path.lower().endswith(entry.extensions):
            return name
    return None


def describe_formats() -> str:
    """List the known formats with their extensions, for messages."""
    return ", ".join(f"{name!r} ({' '.join(e.extensions)})" for name, e in FORMATS.items())
