"""Splits the plan over ranks: which samples each rank gets in each step.

The splitter is a ``DistributedSampler`` and a batch sampler in one, so that trainers that look for
either find what they expect. It has no position: where a run stands is the loader's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import numpy as np
from torch.utils.data import DistributedSampler

from zephon_torch.arithmetic.permutation import Int64Array
from zephon_torch.errors import ConfigurationError, WorldError
from zephon_torch.support import checks
from zephon_torch.work.identity.progress import MAX_EPOCH, MAX_LANES
from zephon_torch.work.plan.plan import Pointers
from zephon_torch.work.sharing.delivery import BoolArray, items_of, positions_of, rank_places
from zephon_torch.work.sharing.foreign_samplers import refuse_sampler
from zephon_torch.work.sharing.items import Slab, SlabPart, WorkItem
from zephon_torch.work.sharing.rank_chunks import RankChunks
from zephon_torch.work.sharing.world import World
from zephon_torch.work.sources.static_mixture import WorkSource

_SLAB = 16384  # positions whose pointers are computed at once
_FIRST_SLAB_STEPS = 8  # the first slab is short: a resumed run should start at once
_FIXED = {"source", "dataset", "seed", "shuffle", "drop_last"}  # parts of the plan, or checked


class Pointer(NamedTuple):
    """One sample of one epoch, as the items of a batch sampler."""

    epoch: int
    pass_index: int
    dataset: int
    shard: int
    sample: int


class ChunkSplitter(DistributedSampler[list[Pointer]]):
    """Deals the chunks of a work source out to ranks.

    Args:
        source: the work source.
        batch_size: samples a rank gets per step. Either this or `global_batch_size`.
        global_batch_size: samples all ranks together get per step.
        rank: data-parallel rank; None reads torch.distributed at the first use.
        num_replicas: number of ranks; None likewise.
        lanes: sub-streams of the delivery order. An option of the run,
            never derived from the number of ranks.
        drop_last: drop the last global batch of an epoch if it is incomplete.
        world: a :class:`~zephon_torch.work.sharing.world.World` in place of rank and num_replicas.

    Attributes:
        epoch: what iterating gives; setting it is :meth:`set_epoch`.
        even_batches: Accelerate's word for ranks that all get the same number of batches. They
            always do; setting it changes nothing.

    Raises:
        ConfigurationError: sizes below 1, or an epoch without a single batch.
        WorldError: a rank that does not exist, or a global batch that the ranks cannot share
            equally (at construction where the world is given, else at the first use).
    """

    def __init__(
        self,
        source: WorkSource,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        rank: int | None = None,
        num_replicas: int | None = None,
        lanes: int = 1,
        drop_last: bool = False,
        world: World | None = None,
    ) -> None:
        # DistributedSampler's own constructor would ask torch.distributed for the world right now
        refuse_sampler(source)
        if (batch_size is None) == (global_batch_size is None):
            raise ConfigurationError(
                f"give one of batch_size and global_batch_size, got {batch_size} and "
                f"{global_batch_size}"
            )
        if batch_size is not None:
            batch_size = checks.integer("batch_size", batch_size, minimum=1)
        if global_batch_size is not None:
            global_batch_size = checks.integer("global_batch_size", global_batch_size, minimum=1)
        self.source, self.drop_last = source, drop_last
        self.dataset = _Sized(source)  # type: ignore[assignment]
        self.epoch, self.seed, self.shuffle = 0, source.seed, source.is_shuffled
        self.lanes = checks.integer("lanes", lanes, minimum=1, maximum=MAX_LANES)
        self.on_set_epoch: Callable[[int], None] | None = None
        self.on_iter: Callable[[], None] | None = None
        self.even_batches = True  # Accelerator.join_uneven_inputs reads and sets it
        self._batch_size, self._global_batch_size = batch_size, global_batch_size
        self.world = World(rank, num_replicas) if world is None else world
        smallest = global_batch_size or batch_size or 1
        if self.world.is_known:
            self.check()
        elif drop_last and source.total_samples < smallest:
            self._refuse_empty_epoch(smallest)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and name in self.__dict__:
            raise ConfigurationError(
                f"{name} of a sampler that is made cannot be set, it would change nothing: give "
                f"{name}= to a new loader"
            )
        if name == "epoch" and self.__dict__.get("on_set_epoch") is not None:
            self.set_epoch(value)
        else:
            super().__setattr__(name, value)

    def show_epoch(self, epoch: int) -> None:
        """Set what iterating gives, for the loader that owns this splitter and keeps the count."""
        self.__dict__["epoch"] = epoch

    def check(self) -> None:
        """Raise if the world, the batch size and the epoch do not fit together."""
        size, num_replicas = self.global_batch_size, self.num_replicas
        if size % num_replicas:
            below, above = size - size % num_replicas, size + num_replicas - size % num_replicas
            near = f"{below} or {above}" if below else f"{above}"
            raise WorldError(
                f"global_batch_size {size} cannot be shared equally by {num_replicas} ranks: the "
                f"nearest sizes that can are {near}"
            )
        if self.num_steps == 0:
            self._refuse_empty_epoch(size)

    def _refuse_empty_epoch(self, global_batch_size: int) -> NoReturn:
        raise ConfigurationError(
            f"an epoch has {self.source.total_samples} samples, fewer than the {global_batch_size} "
            "of one global batch, and drop_last=True drops it: use a smaller batch or "
            "drop_last=False"
        )

    @property
    def rank(self) -> int:  # type: ignore[override]
        """This process's rank."""
        return self.world.rank

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """Number of ranks."""
        return self.world.num_replicas

    @property
    def global_batch_size(self) -> int:
        """Samples of a step over all ranks."""
        if self._global_batch_size is not None:
            return self._global_batch_size
        assert self._batch_size is not None
        return self._batch_size * self.num_replicas

    @property
    def batch_size(self) -> int:
        """Samples of a step on one rank."""
        if self._batch_size is not None:
            return self._batch_size
        return self.global_batch_size // self.num_replicas

    @property
    def num_steps(self) -> int | float:
        """Global batches of an epoch; ``math.inf`` if it never ends."""
        return self.steps_between(0, self.source.total_samples)

    def steps_between(self, delivered: int, total: int | float) -> int | float:
        """Global batches from `delivered` to the end of an epoch of `total` samples."""
        if isinstance(total, float):
            return math.inf
        left, size = max(0, total - delivered), self.global_batch_size
        return left // size if self.drop_last else -(-left // size)

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """Samples of an epoch on one rank, padding included.

        Raises:
            TypeError: the epoch never ends.
        """
        steps, total = len(self), int(self.source.total_samples)
        whole = total // self.global_batch_size * self.batch_size
        rest = total % self.global_batch_size
        return whole + (-(-rest // self.num_replicas) if steps * self.batch_size > whole else 0)

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """Samples of an epoch on all ranks, padding included."""
        return self.num_samples * self.num_replicas

    def __len__(self) -> int:
        """Batches of an epoch.

        Raises:
            TypeError: the epoch never ends.
        """
        steps = self.num_steps
        if isinstance(steps, float):
            raise TypeError(
                "the plan never ends, so it has no length: give max_samples= to the work source, "
                "or count steps in the training loop"
            )
        return steps

    def __iter__(self) -> Iterator[list[Pointer]]:
        """This rank's batches of the current epoch, each a list of :class:`Pointer`.

        Raises:
            ConfigurationError: a loader owns this splitter, and its progress would be passed by.
        """
        if self.on_iter is not None:
            self.on_iter()
        epoch = self.epoch
        for item in self.items(epoch, 0):
            shard_and_rest = zip(*(a.tolist() for a in item.pointers.arrays()), strict=True)
            yield [Pointer(epoch, p, d, s, i) for d, s, i, p in shard_and_rest]

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; a loader that owns this splitter follows."""
        epoch = checks.integer("epoch", epoch, minimum=0, maximum=MAX_EPOCH)
        if self.on_set_epoch is not None:
            self.on_set_epoch(epoch)
        else:
            self.epoch = epoch

    def pointers(self, step: int, epoch: int = 0) -> Pointers:
        """This rank's samples in one step, computed directly; ``item(step).valid`` marks padding.

        Raises:
            IndexError: the epoch has no such step.
        """
        return self.item(step, epoch).pointers

    def item(self, step: int, epoch: int = 0) -> WorkItem:
        """This rank's work in one step, computed directly.

        Raises:
            IndexError: the epoch has no such step.
        """
        self.check()
        if not 0 <= step < self.num_steps:
            raise IndexError(f"step {step} of an epoch of {self.num_steps} steps")
        return _Items(self, epoch, step * self.global_batch_size, 1).__next__()

    def items(self, epoch: int, delivered: int) -> Iterator[WorkItem]:
        """This rank's work from `delivered` to the end of an epoch, computed in slabs."""
        self.check()
        return _Items(self, epoch, delivered)

    def slab_pointers(self, epoch: int, start: int, num_steps: int, lanes: int) -> Pointers:
        """This rank's samples in consecutive steps of an epoch, in one computation.

        Args:
            epoch: the epoch.
            start: delivered index at which the first global batch begins.
            num_steps: number of global batches; the last one of an epoch may be incomplete.
            lanes: sub-streams of the delivery order.
        """
        size, total = self.global_batch_size, self.source.total_samples
        starts = np.arange(start, start + num_steps * size, size)
        last = int(min(size, total - int(starts[-1])))
        whole = starts if last == size else starts[:-1]
        parts = [
            items_of(begin, n, self.share(n)[0], lanes).ravel()
            for begin, n in ((whole, size), (starts[len(whole) :], last))
            if len(begin)
        ]
        delivered = np.concatenate(parts)
        return self.source.pointers(self._positions(delivered, lanes), epoch)

    def share(self, size: int) -> tuple[Int64Array, BoolArray | None]:
        """Places of a global batch that this rank takes, and which are real; see `rank_places`."""
        return rank_places(size, rank=self.rank, num_replicas=self.num_replicas)

    def _positions(self, delivered: Int64Array, lanes: int) -> Int64Array:
        total = self.source.total_samples
        return positions_of(
            delivered,
            lanes=lanes,
            chunk_size=self.source.chunk_size,
            length=1 << 62 if isinstance(total, float) else total,
        )

    def node(self) -> RankChunks:
        """A torchdata node over this rank's chunks.

        Raises:
            WorldError: the number of ranks does not divide the number of lanes, so that chunks
                would be shared between ranks.
        """
        return RankChunks(self)

    def __repr__(self) -> str:
        size = self._global_batch_size or self._batch_size
        what = "global_batch_size" if self._global_batch_size else "batch_size"
        return f"ChunkSplitter({self.source!r}, {what}={size}, lanes={self.lanes})"


class _Items(Iterator[WorkItem]):
    """Work items of one rank, in slabs. An exception moves nothing: the next call tries again."""

    def __init__(
        self,
        splitter: ChunkSplitter,
        epoch: int,
        delivered: int,
        first_steps: int = _FIRST_SLAB_STEPS,
    ) -> None:
        self._splitter, self._epoch, self._delivered = splitter, epoch, delivered
        self._size, self._lanes = splitter.global_batch_size, splitter.lanes
        self._batch_size, self._total = splitter.batch_size, splitter.source.total_samples
        self._needed = self._size if splitter.drop_last else 1  # samples that a batch takes
        self._slab: Slab | None = None
        self._slab_steps = first_steps
        self._steps = self._step = 0  # of the slab, and how many of them were given out

    def __next__(self) -> WorkItem:
        start, size, total = self._delivered, self._size, self._total
        if total - start < self._needed:
            raise StopIteration
        if self._step == self._steps:
            self._begin_slab()
        first, stop, valid = self._step * self._batch_size, start + size, None
        last = first + self._batch_size
        if stop > total:
            stop = int(total)
            share, valid = self._splitter.share(stop - start)
            last = first + len(share)
        assert self._slab is not None
        part = SlabPart(self._slab, first, last)
        item = WorkItem(self._epoch, start, stop, part, valid, total - stop < self._needed)
        self._delivered, self._step = stop, self._step + 1
        return item

    def _begin_slab(self) -> None:
        splitter, steps = self._splitter, self._slab_steps
        if not isinstance(self._total, float):
            steps = min(steps, -(-(self._total - self._delivered) // self._size))
        place = self._epoch, self._delivered, steps, self._lanes
        self._slab = Slab(lambda: splitter.slab_pointers(*place))
        self._slab_steps = max(1, _SLAB // self._batch_size)
        self._step, self._steps = 0, steps


class _Sized:
    """The dataset of a sampler, of which only the length is used."""

    def __init__(self, source: WorkSource) -> None:
        self._source = source

    def __len__(self) -> int:
        total = self._source.total_samples
        if isinstance(total, float):
            raise TypeError("the plan never ends, so it has no number of samples")
        return total
