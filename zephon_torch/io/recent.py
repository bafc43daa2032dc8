"""Values that are kept for as long as they are used, within a number of bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Recent(Generic[_T]):
    """Values by key; the least recently used go when all are larger than a limit, but for one.

    Args:
        limit_bytes: For the sum of what `put` is told.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._num_bytes = 0
        self._held: OrderedDict[tuple[int, ...], tuple[_T, int]] = OrderedDict()

    def get(self, key: tuple[int, ...]) -> _T | None:
        """Return a value, as the most recently used, or None."""
        if key not in self._held:
            return None
        self._held.move_to_end(key)
        return self._held[key][0]

    def put(self, key: tuple[int, ...], value: _T, num_bytes: int) -> None:
        """Keep a value, for now."""
        self.pop(key)
        self._held[key] = (value, num_bytes)
        self._num_bytes += num_bytes
        while self._num_bytes > self._limit_bytes and len(self._held) > 1:
            self.pop(next(iter(self._held)))

    def pop(self, key: tuple[int, ...]) -> _T | None:
        """Take a value out, None if it is not there."""
        value, num_bytes = self._held.pop(key, (None, 0))
        self._num_bytes -= num_bytes
        return value

    def drop(self, first: int) -> None:
        """Forget all keys that begin so."""
        for key in [key for key in self._held if key[0] == first]:
            self.pop(key)

    def __contains__(self, key: tuple[int, ...]) -> bool:
        return key in self._held
