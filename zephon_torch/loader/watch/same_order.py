"""Two loops side by side whose loaders have one order by accident.

The order follows from the seed and from the names and sizes of the datasets. So two lists of equal
length in two loaders, both with the seed 0 of nobody's choice, come in the same order, and ``zip``
pairs their samples by number, which torch's loaders would not.
"""

from __future__ import annotations

import warnings
import weakref
from typing import TYPE_CHECKING

import numpy as np

from zephon_torch.errors import SameOrderWarning
from zephon_torch.io.datasets.dataset import Dataset
from zephon_torch.support.fork_safe import Lock

if TYPE_CHECKING:
    from zephon_torch.loader.iteration import Iteration
    from zephon_torch.loader.loader import DataLoader

_lock = Lock()
_loops: weakref.WeakSet[Iteration] = weakref.WeakSet()


class SideBySide:
    """The loops of one order, over other data, that are under way when a loop begins.

    Args:
        loop: a loop over a shuffled loader that begins.
        loader: its loader.
        epoch: its epoch.
    """

    def __init__(self, loop: Iteration, loader: DataLoader, epoch: int) -> None:
        self._loader, self._epoch = loader, epoch
        with _lock:
            others = list(_loops)
            _loops.add(loop)
        self._others = [
            (weakref.ref(other), other.position)
            for other in others
            if other.position is not None and _is_the_same_by_accident(other.loader, loader)
        ]

    def check(self, stacklevel: int) -> None:
        """At the loop's second batch: warn if one of them has moved on between its two batches.

        A loop that stands still meanwhile is around this one, as a training around an evaluation.
        """
        for reference, then in self._others:
            other = reference()
            place = None if other is None else other.position
            if place is not None and place != then and place[0] == self._epoch:
                self._warn(stacklevel + 1)
                return

    def _warn(self, stacklevel: int) -> None:
        if "same order" in self._loader._told:
            return
        self._loader._told.add("same order")
        warnings.warn(
            f"two loaders are iterated side by side, over different data but in the same order: "
            f"both have seed {self._loader.source.seed} and datasets of the same names "
            f"({', '.join(map(repr, self._loader.source.names))}) and sizes, so that zip() pairs "
            "samples of the same number. If that is not meant, give seed= to one of them, or a "
            "name to each: Dataset.from_torch(name, data). If it is, filter SameOrderWarning",
            SameOrderWarning,
            stacklevel=stacklevel + 1,
        )


def _is_the_same_by_accident(one: DataLoader, other: DataLoader) -> bool:
    if one is other or one._splitter.world.resolve() != other._splitter.world.resolve():
        return False
    if one.source.identity.digests[:3] != other.source.identity.digests[:3]:  # not the datasets
        return False
    pairs = list(zip(one.datasets, other.datasets, strict=False))
    is_one_order = len(one.datasets) == len(other.datasets) and all(
        np.array_equal(a.shard_num_samples, b.shard_num_samples) for a, b in pairs
    )
    return is_one_order and not all(_is_one_data(a, b) for a, b in pairs)


def _is_one_data(one: Dataset, other: Dataset) -> bool:
    if one is other or not one.num_shards:
        return True
    if one.samples is not None or other.samples is not None:
        return one.samples is other.samples
    return one.shard_path(0) == other.shard_path(0)
