"""The plan: at position p of an epoch stands pointer (dataset, shard, sample). A pure function.

Positions are cut in chunks of ``chunk_size``. The split tree gives the exact number of samples of
each dataset before any chunk, so every chunk, and every position in it, is computed directly::

    position ──▶ piece (chunk, segment) ──▶ dataset, rank in its stream ──▶ pass, shard, sample
              apportion, segments        interleave                      order

A piece is a chunk's positions [k * C, (k + 1) * C), cut short at the end of the plan and, with
``exhausted_policy="redistribute"``, at each departure. (Phases change at ends of chunks.) Its
quotas are the differences of the exact counts at its two ends. Nothing is replayed, nothing is
stored per sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from zephon_torch.arithmetic.apportion import MAX_POSITION
from zephon_torch.arithmetic.permutation import Int64Array
from zephon_torch.errors import ConfigurationError
from zephon_torch.io.datasets.dataset import Dataset
from zephon_torch.support.fork_safe import Lock
from zephon_torch.work.identity.given import Given, plainest
from zephon_torch.work.identity.identity import identify
from zephon_torch.work.order.composition import Composition
from zephon_torch.work.order.mixture import MixtureSpec
from zephon_torch.work.order.options import PlanOptions
from zephon_torch.work.order.phases import Course, canonical_in_all, mixtures_of


@dataclass(frozen=True, slots=True)
class Pointers:
    """Where samples stand, as four int64[n] arrays.

    Attributes:
        dataset: number in the plan's ``datasets`` (canonical order: by name).
        shard: number of the shard in its dataset.
        sample: number of the record in its shard.
        pass_index: which pass of its dataset the sample belongs to, from 0 in every epoch.
    """

    dataset: Int64Array
    shard: Int64Array
    sample: Int64Array
    pass_index: Int64Array

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, where: slice | Int64Array) -> Pointers:
        return Pointers(
            self.dataset[where], self.shard[where], self.sample[where], self.pass_index[where]
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """As one block: a worker process is sent pointers with every batch."""
        return _unpacked, (np.concatenate(self.arrays()).tobytes(),)

    def arrays(self) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
        """The four arrays in the order of the attributes."""
        return self.dataset, self.shard, self.sample, self.pass_index

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        """(dataset, shard, sample) one by one, as ints."""
        return zip(*(a.tolist() for a in self.arrays()[:3]), strict=True)


def _placed(place: Int64Array, *found: Int64Array) -> Iterator[Int64Array]:
    for values in found:
        placed = np.empty_like(values)
        placed[place] = values
        yield placed


def _unpacked(block: bytes) -> Pointers:
    return Pointers(*np.frombuffer(block, np.int64).reshape(4, -1))


class Plan:
    """Deterministic order of an epoch over weighted datasets, with random access.

    Args:
        datasets: the datasets, in any order: they are put in order by name.
        mixture: their weights, or a course of phases with weights of their own.
        options: everything else that the order depends on.

    Attributes:
        datasets: tuple of datasets in canonical order; ``Pointers.dataset`` counts in it.
        length: positions of an epoch, None where it never ends.
        mixture: weights of the first phase, where there are several.
        weights: integer weights in force at position 0, of the datasets that take part, by name.
        identity: fingerprint and description.

    Raises:
        ConfigurationError: datasets without any sample, or a mixture that does not match the
            datasets (:class:`MixtureError`), naming the entry.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        mixture: MixtureSpec | Mapping[str, float] | Course,
        options: PlanOptions,
    ) -> None:
        self.course = mixture if isinstance(mixture, Course) else None
        mixtures = mixtures_of(mixture)
        self.mixture = mixtures[0]
        self.datasets = canonical_in_all(datasets, mixtures)
        self.options, self.chunk_size = options, options.chunk_size
        names = [dataset.name for dataset in self.datasets]
        options.check_names(names)
        weighted = {name for one in mixtures for name, weight in one.items() if weight}
        present = [i for i, d in enumerate(self.datasets) if d.name in weighted and len(d)]
        if not present:
            raise ConfigurationError(
                f"no samples at all: every dataset of {names} is empty or has weight 0"
            )
        self._present = np.array(present)
        self._numbers = {self.datasets[i].name: n for n, i in enumerate(present)}
        self._build([self.datasets[i] for i in present])
        self._lock = Lock()

    def _build(self, present: Sequence[Dataset]) -> None:
        options, given = self.options, self._given(present)
        self._segments, self._order = given.segments(), given.order()
        self.weights = self.weights_at(0)
        self.identity = identify(given, plainest(given, self._segments, self._order))
        self.length = self._segments.length
        self._composition = Composition(
            self._segments,
            chunk_size=options.chunk_size,
            interleave=options.interleave,
            seed=options.seed,
        )

    def _given(self, present: Sequence[Dataset]) -> Given:
        if self.course is not None:
            return Given.of_course(present, self.course, self.options)
        return Given(present, [self.mixture[d.name] for d in present], self.options)

    def __repr__(self) -> str:
        length = "endless" if self.length is None else f"{self.length:,} positions"
        return f"Plan({len(self.datasets)} datasets, {length}, {self.fingerprint[:12]})"

    @property
    def fingerprint(self) -> str:
        """64 hexadecimal digits; equal for plans of equal order."""
        return self.identity.fingerprint

    @property
    def total_samples(self) -> int | float:
        """Positions of an epoch; infinite for an endless plan."""
        return math.inf if self.length is None else self.length

    @property
    def num_chunks(self) -> int | float:
        """Chunks of an epoch, the last one possibly shorter; infinite for an endless plan."""
        return math.inf if self.length is None else -(-self.length // self.chunk_size)

    @property
    def limit(self) -> int:
        """One past the last position that can be asked for: the length, or about 2**56."""
        return MAX_POSITION - self.chunk_size if self.length is None else self.length

    def chunk_range(self, k: int) -> tuple[int, int]:
        """First and one past the last position of chunk k.

        Raises:
            IndexError: no such chunk.
        """
        start = k * self.chunk_size
        if k < 0 or start >= self.limit:
            raise IndexError(f"chunk {k} is outside of the plan of {self.num_chunks} chunks")
        return start, min(start + self.chunk_size, self.limit)

    def pointers(self, positions: npt.ArrayLike, epoch: int = 0) -> Pointers:
        """Pointers at any positions of an epoch, in the order given.

        Args:
            positions: int64[n], each in [0, length).
            epoch: >= 0.

        Raises:
            IndexError: a position outside the plan, or a negative epoch.

        Examples:
            >>> from zephon_torch.io import Dataset
            >>> from zephon_torch.work import StaticMixtureWorkSource
            >>> numbers = Dataset.from_samples("numbers", range(10))
            >>> source = StaticMixtureWorkSource([numbers], {"numbers": 1}, shuffle_shards=False)
            >>> source.plan.pointers([3, 9]).sample.tolist()
            [3, 9]
        """
        _check_epoch(epoch)
        where = self._checked(positions)
        with self._lock:
            place, number, rank = self._composition.ranks(where)
            pass_index, shard, sample = self._order.locate(number, rank, epoch)
        found = self._present.take(number), shard, sample, pass_index
        return Pointers(*found) if isinstance(place, slice) else Pointers(*_placed(place, *found))

    def positions(
        self,
        dataset: str | int,
        shard: int,
        sample: int,
        epoch: int = 0,
        *,
        stop: int | None = None,
    ) -> Int64Array:
        """Every position of an epoch at which one sample stands, ascending: int64[n].

        One computation per pass of the dataset; nothing is read or searched.

        Args:
            dataset: name, or number in ``datasets``.
            shard: number of the shard.
            sample: number of the record in the shard.
            epoch: >= 0.
            stop: only positions below; an endless plan needs it.

        Raises:
            IndexError: no such sample.
            ConfigurationError: an unknown name, or an endless plan without `stop`.
        """
        _check_epoch(epoch)
        chosen = self.datasets[self._index(dataset)]
        _check_sample(chosen, shard, sample)
        stop = self._stop(stop)
        number = self._numbers.get(chosen.name)
        if number is None:
            return np.zeros(0, np.int64)
        drawn = self._composition.drawn(number, stop)
        passes = np.arange(-(-drawn // len(chosen)))
        with self._lock:
            ranks = self._order.ranks(number, shard, sample, passes, epoch)
            found = [self._composition.position(number, r) for r in ranks[ranks < drawn].tolist()]
        return np.array(sorted(p for p in found if p < stop), np.int64)

    def counts(self, position: int) -> dict[str, int]:
        """Samples of each dataset among the first `position` positions; exact at chunk ends."""
        counts = self._segments.counts(position).tolist()
        return {
            d.name: counts[self._numbers[d.name]] if d.name in self._numbers else 0
            for d in self.datasets
        }

    @property
    def starts(self) -> list[int]:
        """First position of each segment, ascending from 0: where the mixture changes."""
        return [start for start in self._segments.start.tolist() if start < self.limit]

    def weights_at(self, position: int) -> dict[str, int]:
        """Integer weights in force at a position, of the datasets that take part there, by name."""
        mixture = self._segments.mixtures[self._segments.at(position)]
        names = [self.datasets[i].name for i in self._present[mixture.live].tolist()]
        return dict(zip(names, mixture.integers(), strict=True))

    def varies(self, name: str) -> bool:
        """Whether two passes of a dataset can differ in order."""
        return name in self._numbers and self._order.varies(self._numbers[name])

    def _stop(self, stop: int | None) -> int:
        if stop is None and self.length is None:
            raise ConfigurationError(
                "the plan never ends, so a sample stands at endlessly many positions: give stop="
            )
        if stop is not None and stop < 0:
            raise ConfigurationError(f"stop is {stop}: expected a position >= 0")
        return self.limit if stop is None else min(stop, self.limit)

    def _index(self, dataset: str | int) -> int:
        if isinstance(dataset, str):
            names = [d.name for d in self.datasets]
            if dataset not in names:
                raise ConfigurationError(f"no dataset {dataset!r} in the plan: it has {names}")
            return names.index(dataset)
        if not 0 <= dataset < len(self.datasets):
            raise IndexError(f"the plan has {len(self.datasets)} datasets, no number {dataset}")
        return dataset

    def _checked(self, positions: npt.ArrayLike) -> Int64Array:
        array = np.asarray(positions)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise TypeError(
                "positions must be a one-dimensional array of integers, got "
                f"{array.dtype} of shape {array.shape}"
            )
        if array.size and (array.min() < 0 or array.max() >= self.limit):
            outside = array[(array < 0) | (array >= self.limit)]
            raise IndexError(f"position {outside[0]} is outside of the plan's [0, {self.limit})")
        return array.astype(np.int64, copy=False)


def _check_epoch(epoch: int) -> None:
    if epoch < 0:
        raise IndexError(f"epoch is {epoch}: expected an integer >= 0")


def _check_sample(dataset: Dataset, shard: int, sample: int) -> None:
    if not 0 <= shard < dataset.num_shards:
        raise IndexError(f"dataset {dataset.name!r} has {dataset.num_shards} shards, no {shard}")
    held = int(dataset.shard_num_samples[shard])
    if not 0 <= sample < held:
        raise IndexError(
            f"shard {shard} of dataset {dataset.name!r} has {held} samples, no {sample}"
        )
