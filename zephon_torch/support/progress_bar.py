"""A progress bar on stderr for work that turns out to take longer than a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_PATIENCE_SECONDS = 1.0


@contextmanager
def byte_bar(description: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to be called with the number of bytes done since its last call."""
    bar = _Bar(description, num_bytes)
    try:
        yield bar.advance
    finally:
        bar.close()


class _Bar:
    def __init__(self, description: str, num_bytes: int) -> None:
        self._description = description
        self._num_bytes = num_bytes
        self._num_done = 0
        self._start = time.monotonic()
        self._tqdm: Any = None

    def advance(self, num_bytes: int) -> None:
        self._num_done += num_bytes
        if self._tqdm is not None:
            self._tqdm.update(num_bytes)
        elif time.monotonic() - self._start > _PATIENCE_SECONDS:
            self._tqdm = self._open()

    def close(self) -> None:
        if self._tqdm is not None:
            self._tqdm.close()

    def _open(self) -> Any:
        from tqdm import tqdm  # most datasets never need it

        return tqdm(
            desc=self._description,
            total=self._num_bytes,
            initial=self._num_done,
            unit="B",
            unit_scale=True,
        )
