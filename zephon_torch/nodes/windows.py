"""How many batches are read in one go.

A window is so many consecutive batches. Reading it at once spares hand-overs between threads, and
requests: records of several batches that lie in one remote file cost one. What is read is the same
whatever the window, so it may change at any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple, Self

from zephon_torch.io.datasets.dataset import Dataset
from zephon_torch.nodes.fetch import ROWS, Fetcher
from zephon_torch.work.sharing.items import WorkItem

_LOCAL_BYTES = 2 << 20  # as stored: stays in the cache, and is half a millisecond of work at least
# numpy keeps the interpreter's lock while it gathers 500 rows or fewer: a thread stops the loop
_MIN_ROWS = 512
_MAX_BYTES = 16 << 20
_REMOTE_BYTES = 8 << 20
_IN_MEMORY = {"memory", "torch"}
_TEXT = ROWS | {"jsonl", "arrow"}


class Most(NamedTuple):
    """Batches of a window at most, where samples are rows, text, anything else, or remote."""

    rows: int
    text: int
    other: int
    remote: int


FOR_READER = Most(rows=64, text=16, other=16, remote=32)
"""For a thread that has nothing else to do."""
FOR_CALLER = Most(rows=64, text=4, other=1, remote=32)
"""In the loop's own thread, which waits meanwhile."""
FOR_WORKER = Most(rows=64, text=1, other=1, remote=4)
"""For one that also makes batches: all of a window come when its last one is done."""
FOR_USER_CODE = Most(rows=1, text=1, other=1, remote=4)
"""For one that also runs code of the user, which may be slow."""


@dataclass(frozen=True, slots=True)
class Windows:
    """Sizes of windows over some datasets.

    Attributes:
        sample_bytes: mean size of a sample as it is stored; 0 where a window is one batch.
        num_bytes: of a window, about.
        num_batches: of a window, at most.
        min_rows: of a window, if that is not too many bytes.
    """

    sample_bytes: float
    num_bytes: int
    num_batches: int
    min_rows: int = 0

    @classmethod
    def over(cls, fetcher: Fetcher, most: Most) -> Self:
        """Windows for what reads through a fetcher.

        One batch where samples are in memory, and where whole shards are copied to this machine:
        a window pins all that it touches.
        """
        formats = {dataset.format for dataset in fetcher.datasets}
        sample_bytes = max(map(_sample_bytes, fetcher.datasets))
        if fetcher.copies is not None or formats & _IN_MEMORY or not sample_bytes:
            return cls(0, 0, 1)
        if any(map(_is_remote, fetcher.datasets)):
            return cls(sample_bytes, _REMOTE_BYTES, most.remote)
        if formats <= ROWS:
            return cls(sample_bytes, _LOCAL_BYTES, most.rows, _MIN_ROWS)
        return cls(sample_bytes, _LOCAL_BYTES, most.text if formats <= _TEXT else most.other)

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
        batch_bytes = max(1.0, self.sample_bytes * batch_size)
        batches = max(int(self.num_bytes / batch_bytes), -(-self.min_rows // batch_size))
        return max(1, min(self.num_batches, batches, int(_MAX_BYTES / batch_bytes)))


def _sample_bytes(dataset: Dataset) -> float:
    return int(dataset.shard_num_bytes.sum()) / max(1, len(dataset))


def _is_remote(dataset: Dataset) -> bool:
    return any(
        dataset.remote_file(shard) is not None for shard in range(min(1, dataset.num_shards))
    )
