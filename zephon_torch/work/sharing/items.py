"""Work items: the samples of one rank in one step, computed for many steps at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zephon_torch.support.fork_safe import Lock
from zephon_torch.work.plan.plan import Pointers


class WorkItem:
    """The samples that one rank reads for one global batch. Never changed.

    Attributes:
        epoch: epoch of the batch.
        start, stop: delivered indices [start, stop) of the global batch.
        valid: bool[b], which of this rank's samples are real; None where all are.
        is_last: whether no batch of the epoch comes after it.
        num_samples: samples of this rank.
    """

    __slots__ = ("_pointers", "epoch", "is_last", "num_samples", "start", "stop", "valid")

    def __init__(
        self,
        epoch: int,
        start: int,
        stop: int,
        pointers: Pointers | SlabPart,
        valid: npt.NDArray[np.bool_] | None = None,
        is_last: bool = False,
    ) -> None:
        self.epoch, self.start, self.stop = epoch, start, stop
        self._pointers, self.valid, self.is_last = pointers, valid, is_last
        if isinstance(pointers, SlabPart):
            self.num_samples = pointers.last - pointers.first
        else:
            self.num_samples = len(pointers)

    @property
    def pointers(self) -> Pointers:
        """This rank's samples, computed with those of its slab."""
        if isinstance(self._pointers, SlabPart):
            slab, first, last = self._pointers
            self._pointers = slab.pointers[first:last]
        return self._pointers

    def __reduce__(self) -> tuple[Any, ...]:
        fields = self.epoch, self.start, self.stop, self.pointers, self.valid, self.is_last
        return WorkItem, fields


class Slab:
    """Pointers of consecutive steps of a rank, computed when the first of them is asked for.

    So whoever reads them, such as a thread in the background, also computes them.

    Args:
        compute: computes them; or they themselves.
    """

    def __init__(self, compute: Callable[[], Pointers] | Pointers) -> None:
        self._pointers: Pointers | None = None
        self._compute: Callable[[], Pointers] | None = None
        if isinstance(compute, Pointers):
            self._pointers = compute
        else:
            self._compute = compute
        self._lock = Lock()

    @property
    def pointers(self) -> Pointers:
        """Of all steps, one after the other."""
        if self._pointers is None:
            with self._lock:
                if self._compute is not None:
                    self._pointers, self._compute = self._compute(), None
        assert self._pointers is not None
        return self._pointers


class SlabPart(NamedTuple):
    """Pointers [first, last) of a slab."""

    slab: Slab
    first: int
    last: int


def packed(items: Sequence[WorkItem]) -> tuple[Any, ...]:
    """Consecutive items as arguments of :func:`unpacked`: small, and quick to pickle."""
    fields = [(i.epoch, i.start, i.stop, i.num_samples, i.valid, i.is_last) for i in items]
    return pointers_of(items), fields


def unpacked(pointers: Pointers, fields: Sequence[tuple[Any, ...]]) -> list[WorkItem]:
    """Items as they were packed."""
    slab, items, first = Slab(pointers), [], 0
    for epoch, start, stop, size, valid, is_last in fields:
        part = SlabPart(slab, first, first + size)
        items.append(WorkItem(epoch, start, stop, part, valid, is_last))
        first += size
    return items


def pointers_of(items: Sequence[WorkItem]) -> Pointers:
    """Pointers of consecutive items, one after the other."""
    if len(items) == 1:
        return items[0].pointers
    held = [item._pointers for item in items]
    first, last = held[0], held[-1]
    if isinstance(first, SlabPart) and isinstance(last, SlabPart) and first.slab is last.slab:
        return first.slab.pointers[first.first : last.last]
    columns = zip(*(item.pointers.arrays() for item in items), strict=True)
    return Pointers(*(np.concatenate(column) for column in columns))
