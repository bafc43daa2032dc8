"""Notices a loop that skips, after a load, what the loader has left behind already.

``if step < resume_step: continue`` was right for a loader that begins every epoch anew. On one that
goes on by itself, it drops as many batches as were trained on before.
"""

from __future__ import annotations

import time
import warnings

_FEWEST = 4  # a wrapper that fetches ahead takes a few batches at once, at its start
_TIMES_SLOWER = 20  # dropping a batch takes about 0.2 us, the smallest training step some 50 us


class SkipWatch:
    """Watches the first batches after a load.

    It warns if the loop had no time for as many batches as the state had left behind, and then has
    for each of the next two: at least 20 times as much as for the mean of those. (One that takes
    several batches at once, to accumulate gradients, soon takes some fast again.)

    Args:
        num_batches: batches of the epoch that the state had left behind.
    """

    def __init__(self, num_batches: int) -> None:
        self._num_batches, self._num_gaps, self._num_slow = num_batches, 0, 0
        self._returned = self._seconds = 0.0

    @classmethod
    def after(cls, delivered: int, batch_size: int) -> SkipWatch | None:
        """A watch after a load of so many samples; None if too few or no whole batches of them."""
        whole = delivered % batch_size == 0 and delivered // batch_size >= _FEWEST
        return cls(delivered // batch_size) if whole else None

    def returned(self) -> None:
        """A batch is handed over now."""
        self._returned = time.perf_counter()

    def is_over(self, called: float) -> bool:
        """Whether all was seen, when the loop asks for another batch at the time `called`."""
        if not self._returned:
            return False
        seconds = called - self._returned
        if self._num_gaps < self._num_batches:
            self._num_gaps, self._seconds = self._num_gaps + 1, self._seconds + seconds
            return False
        if seconds <= _TIMES_SLOWER * self._seconds / self._num_batches:
            return True
        self._num_slow += 1
        if self._num_slow == 2:
            self._warn()
        return self._num_slow == 2

    def _warn(self) -> None:
        warnings.warn(
            f"the loop took {self._seconds / self._num_batches * 1e6:.1f} us for each of the first "
            f"{self._num_batches} batches after the load, which are as many as the state had left "
            "behind. The loader goes on after those by itself: a loop that skips batches "
            "('if step < resume_step: continue') has now lost as many others. (Nothing is lost if "
            f"a wrapper that fetches {self._num_batches} ahead holds them)",
            stacklevel=5,
        )
