"""Groups of rows that were decoded lately, within a limit for all readers of a thread."""

from __future__ import annotations

from itertools import count
from typing import Any

from zephon_torch.support.lru import Recent

# For each thread; what was put last is kept whatever its size.
KEPT_BYTES = 64 << 20

# Of readers, as the first part of keys: an id() may come again.
numbers = count()

kept: Recent[Any] = Recent()


def keep(key: tuple[int, int], value: Any, num_bytes: int) -> None:
    """Keep a value of a reader that takes so many bytes of memory, in place of old ones."""
    kept.put(key, value, num_bytes, KEPT_BYTES)
