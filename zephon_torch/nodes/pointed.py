"""Samples by pointer, in the shape that torch code expects of ``loader.dataset``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.utils.data

from zephon_torch.io.dataset import samples_of
from zephon_torch.nodes.pipeline import Pipeline
from zephon_torch.work.items import WorkItem
from zephon_torch.work.plan import Pointers
from zephon_torch.work.source import WorkSource
from zephon_torch.work.splitter import Pointer


class PointedSamples(torch.utils.data.Dataset[Any]):
    """Samples by :class:`Pointer`: what torch code finds as ``loader.dataset``.

    With ``loader.batch_sampler`` and ``loader.collate_fn`` it makes the loader's batches in a plain
    torch DataLoader.
    """

    def __init__(self, pipeline: Pipeline, source: WorkSource) -> None:
        self._pipeline, self._source = pipeline, source

    def __len__(self) -> int:
        total = self._source.total_samples
        if isinstance(total, float):
            raise TypeError("the plan never ends, so it has no number of samples")
        return total

    def __getitem__(self, pointer: Pointer) -> Any:
        return self.__getitems__([pointer])[0]

    def __getitems__(self, pointers: Sequence[Pointer]) -> list[Any]:
        if not all(isinstance(pointer, Pointer) for pointer in pointers):
            raise TypeError(
                "loader.dataset takes the pointers that loader.batch_sampler gives; for raw "
                "samples by number use loader.datasets[i][n]"
            )
        fields = (np.array(field, np.int64) for field in zip(*pointers, strict=True))
        epochs, pass_index, dataset, shard, sample = fields
        item = WorkItem(int(epochs[0]), 0, 0, Pointers(dataset, shard, sample, pass_index))
        samples = list(samples_of(self._pipeline.read(item)))
        transform = self._pipeline.transform
        if transform is None:
            return samples
        return transform(samples, item.pointers, item.epoch, self._pipeline.fetcher.name)
