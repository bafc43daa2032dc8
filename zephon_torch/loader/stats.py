"""Statistics of a loader, and the batch in hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from zephon_torch.io.cache.copies import CacheStats
from zephon_torch.nodes.batches import BadRecord, Mended
from zephon_torch.work.plan.plan import Pointers
from zephon_torch.work.sharing.items import WorkItem

_BAD_LISTED = 1000


@dataclass(slots=True)
class LoaderStats:
    """Statistics of a loader in this process.

    Attributes:
        batches: batches.
        samples: real samples on this rank.
        wait_seconds: seconds the training loop waited for batches.
        num_bad: records that ``on_error=`` left out or replaced.
        bad: the first 1,000 of them, with dataset, file, record and error.
        cache: what the cache of shards did; all 0 without ``cache_dir=``.
    """

    batches: int = 0
    samples: int = 0
    wait_seconds: float = 0.0
    num_bad: int = 0
    bad: list[BadRecord] = field(default_factory=list)
    cache: CacheStats = field(default_factory=CacheStats)

    def note_bad(self, bad: Sequence[BadRecord]) -> None:
        """Count bad records."""
        self.num_bad += len(bad)
        self.bad += bad[: max(0, _BAD_LISTED - len(self.bad))]


class InHand:
    """The batch that was handed over last: pointers and validity, made when they are asked for."""

    def __init__(self) -> None:
        self._source: WorkItem | Mended | None = None
        self._valid: torch.Tensor | None = None

    def take(self, source: WorkItem | Mended) -> None:
        """Hold another one."""
        self._source, self._valid = source, None

    @property
    def pointers(self) -> Pointers | None:
        """Its pointers; None before the first."""
        return None if self._source is None else self._source.pointers

    @property
    def valid(self) -> torch.Tensor | None:
        """bool[b], which of its samples are real."""
        if self._valid is None and self._source is not None:
            real = self._source.valid
            if real is None:
                self._valid = torch.ones(len(self._source.pointers), dtype=torch.bool)
            else:
                self._valid = torch.from_numpy(real.copy())
        return self._valid
