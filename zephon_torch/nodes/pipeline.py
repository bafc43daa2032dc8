"""The pure function from a work item to a batch, in two stages.

``read`` touches storage and decodes; ``finish`` runs user code. Engines may run the two in
different places, the bytes are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zephon_torch.nodes.batch import Collate
from zephon_torch.nodes.fetch import Fetcher
from zephon_torch.nodes.transform import Transform
from zephon_torch.work.splitter import WorkItem


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Work item -> batch. Picklable if the user's functions and datasets are."""

    fetcher: Fetcher
    transform: Transform | None
    collate: Collate

    def __call__(self, item: WorkItem) -> Any:
        """Both stages."""
        return self.finish(item, self.read(item))

    def read(self, item: WorkItem) -> list[Any]:
        """Samples of a work item as they are stored."""
        return self.fetcher.read(item.pointers)

    def finish(self, item: WorkItem, samples: list[Any]) -> Any:
        """Transform and collate."""
        if self.transform is not None:
            samples = self.transform(samples, item.pointers, item.epoch, self.fetcher.name)
        return self.collate(samples, item.pointers)
