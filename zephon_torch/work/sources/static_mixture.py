"""Work sources: what hands out the plan chunk by chunk, as stateful torchdata nodes.

Every source answers ``chunk(k, epoch)`` for any chunk directly; splitter, loader and checkpoints
need nothing else and never know which source they have. The iterating face of a torchdata node
(``next``, ``reset``, ``get_state``) is written once, on top of that.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from torchdata.nodes import BaseNode

from zephon_torch.errors import StateError
from zephon_torch.io.datasets.dataset import Dataset
from zephon_torch.support.keywords import explains_keywords
from zephon_torch.work.identity.identity import PlanIdentity
from zephon_torch.work.identity.progress import Progress
from zephon_torch.work.order.composition import Interleave
from zephon_torch.work.order.mixture import MixtureSpec
from zephon_torch.work.order.options import PlanOptions
from zephon_torch.work.order.sample_order import BlockSize, ShuffleLevels
from zephon_torch.work.order.stopping import ExhaustedPolicy, StopRules
from zephon_torch.work.plan.describe import describe
from zephon_torch.work.plan.plan import Plan, Pointers


@dataclass(frozen=True, slots=True)
class WorkChunk:
    """Consecutive positions of the plan, as pointers.

    Attributes:
        index: number of the chunk in its epoch.
        epoch: epoch it belongs to.
        start, stop: positions [start, stop) it covers.
        pointers: int64 arrays ``dataset``, ``shard``, ``sample`` (and ``pass_index``).
        names: names of the datasets that ``pointers.dataset`` counts in.
    """

    index: int
    epoch: int
    start: int
    stop: int
    pointers: Pointers
    names: tuple[str, ...]

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def counts(self) -> dict[str, int]:
        """Samples of each dataset in this chunk."""
        counts = np.bincount(self.pointers.dataset, minlength=len(self.names)).tolist()
        return dict(zip(self.names, counts, strict=True))

    def __repr__(self) -> str:
        return (
            f"WorkChunk(index={self.index}, epoch={self.epoch}, positions {self.start}.."
            f"{self.stop}, {self.counts})"
        )


class ChunkNode(BaseNode[WorkChunk]):  # type: ignore[misc]  # torchdata has no types
    """A torchdata node over an epoch's sequence of chunks.

    After the last chunk the state already says the next epoch, and iterating again goes on with it.
    A state is a fresh dict of ints and strings. Contract: torchdata ``BaseNode`` (0.11).
    """

    _counted = "chunks"  # name of the count in the state
    _split = (1, 1)  # lanes and ranks that share out the chunks

    def __init__(self) -> None:
        super().__init__()
        self._epoch = self._index = 0
        self._ended = False

    @property
    @abstractmethod
    def identity(self) -> PlanIdentity:
        """Identity of the plan behind the chunks."""

    @abstractmethod
    def _has(self, index: int) -> bool:
        """Whether the epoch's sequence has an item of this number."""

    @abstractmethod
    def _item(self, index: int, epoch: int) -> WorkChunk:
        """The item of this number. Pure."""

    def __iter__(self) -> ChunkNode:
        self._ended = False
        return self

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin at a state, or at the start of the current epoch.

        Raises:
            StateError: not a state of this node; :class:`~zephon_torch.PlanMismatch` if it belongs
                to another plan.
        """
        super().reset(initial_state)
        self._ended = False
        if initial_state is None:
            self._epoch, self._index = self._place()
            self._index = 0
        else:
            self._epoch, self._index = self._read(initial_state)

    def next(self) -> WorkChunk:
        """The next chunk; StopIteration at the end of each epoch."""
        if self._ended:
            raise StopIteration
        if not self._has(self._index):
            self._epoch, self._index = self._place()
            self._ended = True
            raise StopIteration
        item = self._item(self._index, self._epoch)
        self._index += 1
        return item

    def get_state(self) -> dict[str, Any]:
        """Where the node stands: (epoch, chunks handed out), and the plan it belongs to."""
        epoch, index = self._place()
        lanes, num_replicas = self._split
        progress = Progress.at(self.identity, epoch=epoch, delivered=index, lanes=lanes)
        return progress.to_dict(self._counted) | {"num_replicas": num_replicas}

    def _place(self) -> tuple[int, int]:
        """Epoch and index of the next item: the end of an epoch is the start of the next."""
        if self._index and not self._has(self._index):
            return self._epoch + 1, 0
        return self._epoch, self._index

    def _read(self, state: dict[str, Any]) -> tuple[int, int]:
        progress = Progress.from_dict(state, self._counted)
        progress.check(self.identity)
        if (progress.lanes, state.get("num_replicas")) != self._split:
            raise StateError(
                f"the state counts the chunks of lanes={progress.lanes} over "
                f"{state.get('num_replicas')} ranks, this node has lanes={self._split[0]} over "
                f"{self._split[1]}: split as before, or use DataLoader, whose state fits any world"
            )
        if progress.delivered and not self._has(progress.delivered - 1):
            raise StateError(
                f"the state says that {progress.delivered} chunks were handed out, more than an "
                "epoch has"
            )
        return progress.epoch, progress.delivered


class WorkSource(ChunkNode):
    """The contract of every work source.

    Attributes:
        datasets: tuple of datasets that ``Pointers.dataset`` counts in.
        chunk_size: positions in a chunk.
        seed: seed of all that is random in the run, transforms included.
    """

    datasets: tuple[Dataset, ...]
    chunk_size: int
    seed: int

    @property
    @abstractmethod
    def total_samples(self) -> int | float:
        """Positions of an epoch; ``math.inf`` if it never ends."""

    @property
    def is_shuffled(self) -> bool:
        """Whether the order is anything else than that of the files."""
        return True

    @property
    def num_chunks(self) -> int | float:
        """Chunks of an epoch; ``math.inf`` if it never ends."""
        total = self.total_samples
        return total if isinstance(total, float) else -(-total // self.chunk_size)

    @property
    def fingerprint(self) -> str:
        """64 hexadecimal digits; equal for sources of equal order."""
        return self.identity.fingerprint

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the datasets."""
        return tuple(dataset.name for dataset in self.datasets)

    @abstractmethod
    def pointers(self, positions: npt.ArrayLike, epoch: int = 0) -> Pointers:
        """Pointers at any positions of an epoch, int64[n]. Pure."""

    def chunk(self, k: int, epoch: int = 0) -> WorkChunk:
        """Chunk k of an epoch, computed directly. Pure.

        Raises:
            IndexError: no such chunk.
        """
        if not 0 <= k < self.num_chunks:
            raise IndexError(f"chunk {k} of a plan of {self.num_chunks} chunks")
        start = k * self.chunk_size
        stop = int(min(start + self.chunk_size, self.total_samples))
        pointers = self.pointers(np.arange(start, stop), epoch)
        return WorkChunk(k, epoch, start, stop, pointers, self.names)

    def _has(self, index: int) -> bool:
        return index < self.num_chunks

    def _item(self, index: int, epoch: int) -> WorkChunk:
        return self.chunk(index, epoch)


class StaticMixtureWorkSource(WorkSource):
    """Deterministic mixture of datasets with fixed weights.

    Args:
        datasets: the datasets, in any order (the order of the list has no effect).
        mixture: weight of each dataset by name, a :class:`MixtureSpec` or a plain mapping.
        seed: any integer. Order depends on it and on the data's identity alone.
        chunk_size: positions in a chunk.
        shuffle_shards: a new order of the shards in each pass.
        shuffle_within_shard: permute the samples of each shard.
        shuffle_block_size: None; a number of samples; "auto" (8 times a dataset's largest shard):
            permute windows of so many samples of the shuffled shards; or "global": permute the
            whole dataset.
        stop_after_passes: stop once every dataset has completed that many passes. Without any stop
            option: 1.
        exhausted_policy: "repeat", "stop" or "redistribute", or a mapping by dataset name to
            "repeat" or "stop".
        max_repeats: passes allowed beyond the first, one number or a mapping by dataset name.
        max_samples: length of an epoch at most.
        reshuffle_on_repeat: whether passes and epochs get orders of their own; one value or a
            mapping by dataset name.
        interleave: "balanced" (every prefix close to the mixture) or "shuffle" (labels shuffled
            inside each chunk, as independent draws would look; chunks of at most 2**26 positions).

    The tables of all shuffle levels and stop options are in
    :mod:`zephon_torch.work.order.sample_order` and :mod:`zephon_torch.work.order.stopping`.

    Raises:
        ConfigurationError: an option, or a combination, that cannot work.
        MixtureError: an invalid weight, or names that do not match.

    Examples:
        >>> from zephon_torch.io import Dataset
        >>> from zephon_torch.work import MixtureSpec, StaticMixtureWorkSource
        >>> datasets = [Dataset.from_samples("a", range(6)), Dataset.from_samples("b", range(3))]
        >>> source = StaticMixtureWorkSource(datasets, MixtureSpec({"a": 2, "b": 1}), seed=42)
        >>> source.total_samples
        9
        >>> [chunk.counts for chunk in source]
        [{'a': 6, 'b': 3}]
    """

    @explains_keywords("StaticMixtureWorkSource")
    def __init__(
        self,
        datasets: Sequence[Dataset],
        mixture: MixtureSpec | Mapping[str, float],
        *,
        seed: int = 0,
        chunk_size: int = 16384,
        shuffle_shards: bool = True,
        shuffle_within_shard: bool = False,
        shuffle_block_size: BlockSize = None,
        stop_after_passes: int | None = None,
        exhausted_policy: ExhaustedPolicy | Mapping[str, ExhaustedPolicy] | None = None,
        max_repeats: int | Mapping[str, int] | None = None,
        max_samples: int | None = None,
        reshuffle_on_repeat: bool | Mapping[str, bool] = True,
        interleave: Interleave = "balanced",
    ) -> None:
        super().__init__()
        options = PlanOptions(
            seed=seed,
            chunk_size=chunk_size,
            levels=ShuffleLevels(shuffle_shards, shuffle_within_shard, shuffle_block_size),
            rules=StopRules(stop_after_passes, exhausted_policy, max_repeats, max_samples),
            reshuffle_on_repeat=reshuffle_on_repeat,
            interleave=interleave,
        )
        self.plan = Plan(datasets, mixture, options)
        self.datasets, self.chunk_size, self.seed = self.plan.datasets, chunk_size, seed

    @property
    def identity(self) -> PlanIdentity:
        """Identity of the plan."""
        return self.plan.identity

    @property
    def mixture(self) -> MixtureSpec:
        """The weights as given."""
        return self.plan.mixture

    @property
    def total_samples(self) -> int | float:
        """Positions of an epoch; ``math.inf`` if it never ends."""
        return self.plan.total_samples

    @property
    def is_shuffled(self) -> bool:
        """Whether any level of shuffling is on."""
        levels = self.plan.options.levels
        return levels.shards or levels.within_shard or levels.block_size is not None

    def pointers(self, positions: npt.ArrayLike, epoch: int = 0) -> Pointers:
        """Pointers at any positions of an epoch; see :meth:`Plan.pointers`."""
        return self.plan.pointers(positions, epoch)

    def describe(self) -> str:
        """Table of the datasets: weight, samples, draws, passes, share, never-seen samples."""
        return describe(self.plan)

    def __repr__(self) -> str:
        return f"StaticMixtureWorkSource({self.plan!r})"
