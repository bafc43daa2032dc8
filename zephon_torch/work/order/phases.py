"""A course of phases, each with a mixture of its own, over the same datasets.

Every dataset's stream goes on where the phase before left it: nothing is repeated or missed at a
change. A dataset of weight 0 is not drawn in that phase.

**Ends.** The phases' samples are added up, and each sum is rounded up to a multiple of the samples
of a chunk, or of a round of chunks where there are several lanes: there the phase ends. So does the
last phase, unless it is open. So nothing ahead of a position changes what stands before it, not
even the planned end of its own phase: no chunk that is begun is cut.

Phases in a row whose weights have the same ratio are one segment: a phase that is lengthened by
another like it makes the plan of one long phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from zephon_torch.arithmetic.apportion import MAX_POSITION, SplitTree
from zephon_torch.errors import ConfigurationError, MixtureError
from zephon_torch.io.datasets.dataset import Dataset
from zephon_torch.support import checks
from zephon_torch.work.order.mixture import MixtureSpec, canonical, check_weights, integer_weights
from zephon_torch.work.order.segments import SegmentMixture, Segments


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase.

    Attributes:
        mixture: weights by dataset name, zeros allowed.
        num_samples: samples of the phase, >= 1; None for the last phase of a plan without end.
    """

    mixture: MixtureSpec
    num_samples: int | None = None


@dataclass(frozen=True, slots=True)
class Course:
    """Phases, one after the other.

    Attributes:
        phases: at least one.
        lanes: sub-streams of the delivery order; phases end at ends of rounds of so many chunks.
    """

    phases: Sequence[Phase]
    lanes: int = 1

    def __post_init__(self) -> None:
        if not self.phases:
            raise ConfigurationError("no phases: give at least one")

    def ends(self, chunk_size: int) -> list[int | None]:
        """One past the last position of each phase, None for an open last one.

        Raises:
            ConfigurationError: an open phase before the last, fewer samples than 1, a
                phase that the rounding leaves without a position, or too many positions in all. The
                message names the phase, counted from 0.
        """
        unit = chunk_size * checks.integer("lanes", self.lanes, minimum=1)
        ends: list[int | None] = []
        total, start = 0, 0
        for number, phase in enumerate(self.phases):
            if phase.num_samples is None:
                _check_is_last(number, len(self.phases))
                return [*ends, None]
            total += _num_samples(number, phase)
            end = -(-total // unit) * unit
            _check_end(number, phase.num_samples, start, end, unit)
            ends.append(end)
            start = end
        return ends


@dataclass(frozen=True, slots=True)
class Stretches:
    """A course over certain datasets: what segments are made from.

    Attributes:
        mixtures: of each segment; no two in a row are the same.
        start: first position of each segment.
        length: positions in all, None for an open course.
    """

    mixtures: Sequence[SegmentMixture]
    start: Sequence[int]
    length: int | None

    @classmethod
    def of(cls, weights: Sequence[Sequence[Fraction]], ends: Sequence[int | None]) -> Stretches:
        """Stretches of phases.

        Args:
            weights: for each phase, the exact weights of all D datasets, zeros allowed.
            ends: of each phase, see :meth:`Course.ends`.

        Raises:
            ConfigurationError: a phase in which no dataset has a weight, naming it.
        """
        mixtures: list[SegmentMixture] = []
        start: list[int] = []
        begins = [0, *(end or 0 for end in ends[:-1])]
        for number, begin in enumerate(begins):
            mixture = _mixture(number, weights[number])
            if not mixtures or mixture.weights != mixtures[-1].weights:
                mixtures.append(mixture)
                start.append(begin)
        return cls(mixtures, start, ends[-1])

    def segments(self) -> Segments:
        """The segments. Pure; computes the counts at each change."""
        start = np.array(self.start, np.int64)
        before = np.zeros((len(start), len(self.mixtures[0].weights)), np.int64)
        for k, length in enumerate(np.diff(start).tolist()):
            mixture = self.mixtures[k]
            before[k + 1] = before[k]
            tree = SplitTree(mixture.integers())
            before[k + 1, mixture.live] += tree.counts(np.array([length]))[0]
        return Segments(self.mixtures, start, before, self.length)


def mixtures_of(mixture: MixtureSpec | Mapping[str, float] | Course) -> list[MixtureSpec]:
    """The mixture of each phase, at least one."""
    if isinstance(mixture, Course):
        return [phase.mixture for phase in mixture.phases]
    return [mixture if isinstance(mixture, MixtureSpec) else MixtureSpec(mixture)]


def canonical_in_all(
    datasets: Sequence[Dataset], mixtures: Sequence[MixtureSpec]
) -> tuple[Dataset, ...]:
    """Datasets in order by name, after checking that they match every mixture.

    Raises:
        ConfigurationError: as :func:`~zephon_torch.work.order.mixture.canonical`; a mixture behind
            the first is named by its phase.
    """
    ordered = canonical(datasets, mixtures[0])
    for number, mixture in enumerate(mixtures[1:], start=1):
        try:
            check_weights({dataset.name for dataset in ordered}, mixture)
        except MixtureError as error:
            raise MixtureError(f"phase {number}: {error}") from None
    return ordered


def _mixture(number: int, weights: Sequence[Fraction]) -> SegmentMixture:
    """The mixture of a phase, in integers."""
    live = [i for i, weight in enumerate(weights) if weight]
    if not live:
        raise ConfigurationError(
            f"phase {number} has no samples at all: every dataset is empty or has weight 0 in it"
        )
    integers = [0] * len(weights)
    for i, weight in zip(live, integer_weights([weights[i] for i in live]), strict=True):
        integers[i] = weight
    return SegmentMixture(np.array(live, np.int64), integers)


def _num_samples(number: int, phase: Phase) -> int:
    name = f"num_samples of phase {number}"
    return checks.integer(name, phase.num_samples, minimum=1, maximum=MAX_POSITION)


def _check_is_last(number: int, num_phases: int) -> None:
    if number + 1 < num_phases:
        raise ConfigurationError(
            f"phase {number} has no end, so the phases after it ({num_phases - number - 1:,}) "
            "would never begin: give its num_samples"
        )


def _check_end(number: int, num_samples: int, start: int, end: int, unit: int) -> None:
    if end == start:
        raise ConfigurationError(
            f"phase {number} has {num_samples:,} samples, and the phase before it ends at position "
            f"{start:,} with all of them: phases end at multiples of {unit:,}, chunk_size times "
            "lanes. Give it more samples, or give a smaller chunk_size"
        )
    if end >= MAX_POSITION:
        raise ConfigurationError(
            f"phase {number} would end at position {end:.3g}, the limit is {MAX_POSITION:.3g}: "
            "give smaller num_samples, or leave the last phase open"
        )
