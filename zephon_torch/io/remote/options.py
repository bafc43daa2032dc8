"""Options of a store and URLs, which may hold keys: their ``repr`` shows none."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from zephon_torch.errors import ConfigurationError

_USER_INFO = re.compile(r"://[^/@\s]*@")
_QUERY = re.compile(r"\?[^\s'\")>]+")
# Options whose texts help in a message, and are no secrets.
_SHOWN = {"endpoint_url", "region_name"}


class StorageOptions:
    """Options for fsspec, by name. Picklable, comparable; shows its names only.

    No `Mapping`: tools that report crashes go through the local variables of each frame, ask for
    the `repr` of what they do not know, and walk through every mapping.

    Args:
        values: Option values by name; copied. None stands for no options.
    """

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Any] | StorageOptions | None = None) -> None:
        if isinstance(values, StorageOptions):
            self._values: dict[str, Any] = values._values
        else:
            self._values = _copied(dict(values or {}))

    def plain(self) -> dict[str, Any]:
        """Copy the values; fsspec changes the mappings that it is given."""
        copied: dict[str, Any] = _copied(self._values)
        return copied

    def texts(self) -> Iterator[str]:
        """Texts that must not be shown, without those so short that they stand in any message."""
        return _texts(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorageOptions) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return bool(self._values)

    def __reduce__(self) -> tuple[Any, ...]:
        return StorageOptions, (self._values,)

    def __repr__(self) -> str:
        return f"StorageOptions({', '.join(f'{name}=***' for name in sorted(self._values))})"


class HiddenPath:
    """A path as a user gave it; shows no user and no query of a URL.

    Args:
        value: A path or URL, or whatever was given in the place of one.
    """

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def text(self) -> str:
        """Return the path.

        Raises:
            ConfigurationError: What was given is none.
        """
        given = self._value
        text = os.fspath(given) if isinstance(given, os.PathLike) else given
        if not isinstance(text, str) or not text:
            raise ConfigurationError(
                f"path must be a folder, a file or a pattern as str or os.PathLike, got {given!r}"
            )
        return text

    def __repr__(self) -> str:
        return f"HiddenPath({masked(repr(self._value))})"


def masked(text: str) -> str:
    """Return a text without users and queries in URLs."""
    return _QUERY.sub("?***", _USER_INFO.sub("://", text))


def _copied(value: Any) -> Any:
    """Copy mappings and lists at any depth; what else there is may be a live object."""
    if isinstance(value, dict):
        return {name: _copied(inner) for name, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        if len(value) > 3:
            yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in _SHOWN:
                yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
