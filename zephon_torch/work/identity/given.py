"""Ingredients of a plan as they were given, and the plainest spelling of the same order.

Many options have no effect beside others or on certain data: shuffle levels under a global shuffle,
windows larger than a dataset, ``max_samples`` beyond the end, a mapping that says the same of all.
:func:`plainest` gives one spelling for all that make one order, in which options without effect
have their default values:

======================  =======================================================================
option                  plainest spelling
======================  =======================================================================
chunk_size              the default, or the length of an epoch where that is more, if the chunk
                        holds a whole epoch
shuffle_shards          True where no dataset has two shards, and under a global shuffle
shuffle_within_shard    False beside ``shuffle_block_size``, and where shards hold one sample
shuffle_block_size      "auto" where the number is the same for every dataset; at most the size
                        of the largest dataset; None where windows hold one sample
stop options            none, ``exhausted_policy="repeat"``, or ``max_samples`` beside one of
                        these: whatever gives the same length; "redistribute" only where a
                        dataset leaves before the end
reshuffle_on_repeat     True, False, or a mapping of the datasets whose order it freezes
interleave              "balanced" for a single dataset, and for chunks of one sample
======================  =======================================================================

The seed always counts: transforms and the choice of substitutes use it, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from zephon_torch.errors import ConfigurationError
from zephon_torch.work.order.options import PlanOptions
from zephon_torch.work.order.phases import Course, Stretches
from zephon_torch.work.order.sample_order import SampleOrder, ShuffleLevels
from zephon_torch.work.order.segments import Segments
from zephon_torch.work.order.stopping import StopRules, plainest_rules, segments_of

if TYPE_CHECKING:
    from zephon_torch.io.datasets.dataset import Dataset

DEFAULT_CHUNK_SIZE = 16384


@dataclass(frozen=True, slots=True)
class Given:
    """Ingredients of a plan.

    Attributes:
        datasets: those that take part, in canonical order.
        weights: their exact weights, all positive; none where the mixture changes.
        options: as the user spelled them.
        course: how the mixture changes; None for one mixture.
    """

    datasets: Sequence[Dataset]
    weights: Sequence[Fraction]
    options: PlanOptions
    course: Stretches | None = None

    @classmethod
    def of_course(cls, datasets: Sequence[Dataset], phases: Course, options: PlanOptions) -> Given:
        """Ingredients of a plan of phases; a static mixture where all phases have the same.

        Raises:
            ConfigurationError: phases that cannot work, or stop options beside them.
        """
        if options.rules != StopRules(exhausted_policy="repeat"):
            raise ConfigurationError(
                f"stop options beside phases: {options.rules}. Phases say themselves where the "
                'plan ends: give exhausted_policy="repeat" alone'
            )
        weights = [[phase.mixture[d.name] for d in datasets] for phase in phases.phases]
        course = Stretches.of(weights, phases.ends(options.chunk_size))
        if len(course.start) > 1:
            return cls(datasets, [], options, course)
        rules = StopRules(exhausted_policy="repeat", max_samples=course.length)
        return cls(datasets, weights[0], replace(options, rules=rules))

    @property
    def names(self) -> list[str]:
        """Names of the datasets."""
        return [dataset.name for dataset in self.datasets]

    @property
    def sizes(self) -> list[int]:
        """Samples of the datasets."""
        return [dataset.num_samples for dataset in self.datasets]

    def respelled(self, options: PlanOptions) -> Given:
        """The same datasets and weights under other options."""
        return replace(self, options=options)

    def segments(self) -> Segments:
        """Where the plan stops, and where its mixture changes."""
        if self.course is not None:
            return self.course.segments()
        return segments_of(self.names, self.weights, self.sizes, self.options.rules)

    def order(self) -> SampleOrder:
        """The order inside each dataset."""
        options, names = self.options, self.names
        return SampleOrder(
            names,
            [dataset.shard_num_samples for dataset in self.datasets],
            seed=options.seed,
            levels=options.levels,
            reshuffle=[options.reshuffles(name) for name in names],
        )


def plainest(given: Given, segments: Segments, order: SampleOrder) -> PlanOptions:
    """The plainest options that make the same plan; see the table above. Pure.

    Args:
        given: what the plan is made of.
        segments, order: its own.
    """
    options = given.options
    alternates = options.chunk_size > 1 and any(len(m.live) > 1 for m in segments.mixtures)
    return PlanOptions(
        seed=options.seed,
        chunk_size=_chunk_size(options.chunk_size, segments.length),
        levels=_levels(options.levels, order),
        rules=options.rules
        if given.course is not None
        else plainest_rules(segments, given.sizes, options.rules),
        reshuffle_on_repeat=_reshuffle(given, order),
        interleave=options.interleave if alternates else "balanced",
    )


def _chunk_size(chunk_size: int, length: int | None) -> int:
    if length is None or chunk_size < length:
        return chunk_size
    return max(length, DEFAULT_CHUNK_SIZE)


def _levels(levels: ShuffleLevels, order: SampleOrder) -> ShuffleLevels:
    block_size = levels.block_size
    blocks = order.block_sizes(block_size)
    if blocks is not None:
        automatic = order.block_sizes("auto")
        block_size = "auto" if (blocks == automatic).all() else int(blocks.max())
    if not (order.size > 1).any() or (blocks is not None and blocks.max() == 1):
        block_size = None
    counts_shards = block_size != "global" and (order.num_shards > 1).any()
    counts_within = levels.block_size is None and (order.size > order.num_shards).any()
    return ShuffleLevels(
        levels.shards if counts_shards else True,
        levels.within_shard if counts_within else False,
        block_size,
    )


def _reshuffle(given: Given, order: SampleOrder) -> bool | Mapping[str, bool]:
    permuted = [name for name, p in zip(given.names, order.is_permuted, strict=True) if p]
    frozen = [name for name in permuted if not given.options.reshuffles(name)]
    if frozen and len(frozen) == len(permuted):
        return False
    return dict.fromkeys(frozen, False) or True
