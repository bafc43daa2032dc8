"""The pure function from a work item to a batch, in two stages.

``read`` touches storage and decodes; ``finish`` runs user code. Engines may run the two in
different places, the bytes are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from zephon_torch.io.copies import ShardCopies
from zephon_torch.io.dataset import Samples, samples_of
from zephon_torch.nodes.batch import Collate
from zephon_torch.nodes.fetch import Fetcher
from zephon_torch.nodes.made import Made
from zephon_torch.nodes.tolerate import OnError, Tolerance
from zephon_torch.nodes.transform import Functions, Transform
from zephon_torch.work.source import WorkSource
from zephon_torch.work.splitter import WorkItem


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Work item -> batch. Picklable if the user's functions and datasets are.

    Attributes:
        tolerance: what to do about bad records; None raises.
    """

    fetcher: Fetcher
    transform: Transform | None
    collate: Collate
    tolerance: Tolerance | None = None

    def __call__(self, item: WorkItem) -> Made:
        """Both stages."""
        return self.finish(item, self.read(item))

    def read(self, item: WorkItem) -> Samples:
        """Samples of a work item as they are stored."""
        if self.tolerance is not None:
            return self.tolerance.read(item.pointers)
        return self.fetcher.read(item.pointers)

    def finish(self, item: WorkItem, read: Samples) -> Made:
        """Transform and collate."""
        samples = samples_of(read)
        if self.tolerance is not None:
            return self._finish_tolerantly(self.tolerance, item, samples)
        if self.transform is not None:
            samples = self.transform(samples, item.pointers, item.epoch, self.fetcher.name)
        return Made(self.collate(samples, item.pointers), item.pointers, item.valid)

    def _finish_tolerantly(self, tolerance: Tolerance, item: WorkItem, samples: Samples) -> Made:
        kept = tolerance.finish(item, samples)
        if kept.is_whole:
            return Made(self.collate(kept.samples, item.pointers), item.pointers, item.valid)
        valid = None if all(kept.valid) else np.array(kept.valid)
        data = self.collate(kept.samples, kept.pointers)
        return Made(data, kept.pointers, valid, tuple(kept.bad))


def make_pipeline(
    source: WorkSource,
    transform: Functions | None,
    takes_rng: bool,
    collate_fn: Callable[[list[Any]], Any] | None,
    on_error: OnError,
    provenance: bool,
    copies: ShardCopies | None = None,
) -> Pipeline:
    """The pipeline over a source's datasets that a loader's arguments ask for."""
    fetcher = Fetcher(source.datasets, copies)
    user = None if transform is None else Transform(transform, takes_rng, source.seed, source.names)
    tolerance = None if on_error == "raise" else Tolerance(fetcher, user, on_error, source.seed)
    return Pipeline(fetcher, user, Collate(collate_fn, source.names, provenance), tolerance)
