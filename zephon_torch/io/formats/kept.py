"""What readers decoded lately, by thread and within a limit for all readers of the thread."""

from __future__ import annotations

import threading
from collections import OrderedDict
from itertools import count
from typing import Any

# For each thread; what was put last is kept whatever its size.
KEPT_BYTES = 64 << 20

# Of readers, as the first part of keys: an id() may come again.
numbers = count()


class _Kept(threading.local):
    """Values by (reader, number), the least recently used first."""

    def __init__(self) -> None:
        self._values: OrderedDict[tuple[int, int], tuple[Any, int]] = OrderedDict()
        self.num_bytes = 0

    def get(self, key: tuple[int, int]) -> Any:
        """A value; None if it is not there, or not any more."""
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]

    def put(self, key: tuple[int, int], value: Any, num_bytes: int) -> None:
        """Keep a value that takes so many bytes of memory, in place of old ones."""
        self._values[key] = (value, num_bytes)
        self.num_bytes += num_bytes
        while self.num_bytes > KEPT_BYTES and len(self._values) > 1:
            self.num_bytes -= self._values.popitem(last=False)[1][1]

    def forget(self, reader: int) -> None:
        """Let go of all values of a reader."""
        for key in [key for key in self._values if key[0] == reader]:
            self.num_bytes -= self._values.pop(key)[1]


kept = _Kept()
