"""Samples by pointer, in the shape that torch code expects of ``loader.dataset``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.utils.data

from zephon_torch.io.datasets.dataset import samples_of
from zephon_torch.io.formats.map_style import came_as_one
from zephon_torch.nodes.pipeline import Pipeline
from zephon_torch.work.plan.plan import Pointers
from zephon_torch.work.sharing.items import WorkItem
from zephon_torch.work.sharing.splitter import Pointer
from zephon_torch.work.sources.static_mixture import WorkSource


class PointedSamples(torch.utils.data.Dataset[Any]):
    """Samples by :class:`Pointer`: what torch code finds as ``loader.dataset``.

    With ``loader.batch_sampler`` and ``loader.collate_fn`` it makes the loader's batches in a plain
    torch DataLoader. Any other attribute is read, set and deleted on the one object in memory
    behind (a torch dataset, say), as with torch's loader.

    Args:
        pipeline: reads and transforms.
        source: names the datasets.

    Raises:
        AttributeError: there are several datasets behind, or one of files.
    """

    _pipeline: Pipeline
    _source: WorkSource
    _num_set: int

    def __init__(self, pipeline: Pipeline, source: WorkSource) -> None:
        # not by assignment, which sets attributes of the object behind
        self.__dict__.update(_pipeline=pipeline, _source=source, _num_set=0)

    @property
    def num_set(self) -> int:
        """How often an attribute of the object behind was set or deleted through this one."""
        return self._num_set

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_pipeline", "_source", "_num_set"):
            raise AttributeError(name)  # asked for by what copies and pickles
        return getattr(self._behind(name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._behind(name), name, value)
        self.__dict__["_num_set"] += 1

    def __delattr__(self, name: str) -> None:
        delattr(self._behind(name), name)
        self.__dict__["_num_set"] += 1

    def _behind(self, name: str) -> Any:
        """The one object in memory that samples come from."""
        datasets = self._source.datasets
        if len(datasets) == 1 and datasets[0].samples is not None:
            return datasets[0].samples
        held = [
            f"loader.datasets[{number}].samples ({dataset.name!r})"
            for number, dataset in enumerate(datasets)
            if dataset.samples is not None
        ]
        where = f"ask {' or '.join(held)}" if held else "those of files have no such attributes"
        raise AttributeError(
            f"loader.dataset has no attribute {name!r} of its own, and stands for "
            f"{[dataset.name for dataset in datasets]}: {where}"
        )

    def __len__(self) -> int:
        total = self._source.total_samples
        if isinstance(total, float):
            raise TypeError("the plan never ends, so it has no number of samples")
        return total

    def __getitem__(self, pointer: Pointer) -> Any:
        return self.__getitems__([pointer])[0]

    def __getitems__(self, pointers: Sequence[Pointer]) -> Any:
        if not all(isinstance(pointer, Pointer) for pointer in pointers):
            raise TypeError(
                "loader.dataset takes the pointers that loader.batch_sampler gives; for raw "
                "samples by number use loader.datasets[i][n]"
            )
        fields = (np.array(field, np.int64) for field in zip(*pointers, strict=True))
        epochs, pass_index, dataset, shard, sample = fields
        item = WorkItem(int(epochs[0]), 0, 0, Pointers(dataset, shard, sample, pass_index))
        read = samples_of(self._pipeline.read(item))
        samples: Any = read if came_as_one(read) else list(read)
        transform = self._pipeline.transform
        if transform is None:
            return samples
        return transform(samples, item.pointers, item.epoch, self._pipeline.fetcher.name)
