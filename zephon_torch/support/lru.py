"""Values that a thread keeps for as long as it uses them, within a number of bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


class Recent(threading.local, Generic[_T]):
    """Values by key, for each thread its own: nothing is locked, and a forked child may go on.

    Attributes:
        num_bytes: sum of what `put` was told of those that are kept.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._held: OrderedDict[tuple[Any, ...], tuple[_T, int]] = OrderedDict()

    def get(self, key: tuple[Any, ...]) -> _T | None:
        """Return a value, as the most recently used, or None."""
        if key not in self._held:
            return None
        self._held.move_to_end(key)
        return self._held[key][0]

    def put(self, key: tuple[Any, ...], value: _T, num_bytes: int, limit_bytes: int) -> None:
        """Keep a value; while all take more than the limit, the least recently used others go."""
        self.pop(key)
        self._held[key] = (value, num_bytes)
        self.num_bytes += num_bytes
        while self.num_bytes > limit_bytes and len(self._held) > 1:
            self.pop(next(iter(self._held)))

    def pop(self, key: tuple[Any, ...]) -> _T | None:
        """Take a value out, None if it is not there."""
        value, num_bytes = self._held.pop(key, (None, 0))
        self.num_bytes -= num_bytes
        return value

    def drop(self, first: int) -> None:
        """Forget all keys that begin so."""
        for key in [key for key in self._held if key[0] == first]:
            self.pop(key)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        return key in self._held
