"""Options of a store, which may hold keys: nothing that is shown of them holds a value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

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
