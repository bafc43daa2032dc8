"""How many batches are read in one go.

A window is so many consecutive batches. Reading it at once spares hand-overs between threads, and
requests: records of several batches that lie in one remote file cost one. What is read is the same
whatever the window, so it may change at any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Self

from zephon_torch.io.dataset import Dataset
from zephon_torch.nodes.fetch import ROWS, Fetcher
from zephon_torch.work.items import WorkItem

_LOCAL_BYTES = 2 << 20  # as stored: stays in the cache, and is half a millisecond of work at least
_LOCAL_BATCHES = 16
_TEXT_BATCHES = 4
_REMOTE_BYTES = 8 << 20
_REMOTE_BATCHES = 32
_IN_MEMORY = {"memory", "torch"}
_TEXT = {"jsonl", "arrow"}


@dataclass(frozen=True, slots=True)
class Windows:
    """Sizes of windows over some datasets.

    Attributes:
        sample_bytes: mean size of a sample as it is stored; 0 where a window is one batch.
        num_bytes: of a window, about.
        num_batches: of a window, at most.
    """

    sample_bytes: float
    num_bytes: int
    num_batches: int

    @classmethod
    def over(cls, fetcher: Fetcher, *, only_reads: bool) -> Self:
        """Windows for what reads through a fetcher.

        One batch where samples are in memory; where whole shards are copied to this machine, for a
        window pins all that it touches; and locally where decoding takes longer than a hand-over.
        A thread that has nothing else to do reads larger ones than one that is waited for.

        Args:
            fetcher: it.
            only_reads: whether it is such a thread.
        """
        formats = {dataset.format for dataset in fetcher.datasets}
        sample_bytes = max(map(_sample_bytes, fetcher.datasets))
        if fetcher.copies is not None or formats & _IN_MEMORY or not sample_bytes:
            return cls(0, 0, 1)
        if any(map(_is_remote, fetcher.datasets)):
            return cls(sample_bytes, _REMOTE_BYTES, _REMOTE_BATCHES)
        if only_reads or formats <= ROWS:
            return cls(sample_bytes, _LOCAL_BYTES, _LOCAL_BATCHES)
        if formats <= _TEXT | ROWS:
            return cls(sample_bytes, _LOCAL_BYTES, _TEXT_BATCHES)
        return cls(0, 0, 1)

    def at_most(self, num_batches: int) -> Self:
        """The same with a limit."""
        return replace(self, num_batches=max(1, min(self.num_batches, num_batches)))

    def cut(self, items: Iterator[WorkItem], batch_size: int) -> Iterator[Sequence[WorkItem]]:
        """Work items in windows, the first of them alone: it should come soon."""
        size = 1
        while window := list(islice(items, size)):
            yield window
            size = self.batches(batch_size)

    def batches(self, batch_size: int) -> int:
        """Batches of a window."""
        num_bytes = max(1.0, self.sample_bytes * batch_size)
        return max(1, min(self.num_batches, int(self.num_bytes / num_bytes)))


def _sample_bytes(dataset: Dataset) -> float:
    return int(dataset.shard_num_bytes.sum()) / max(1, len(dataset))


def _is_remote(dataset: Dataset) -> bool:
    return any(
        dataset.remote_file(shard) is not None for shard in range(min(1, dataset.num_shards))
    )
