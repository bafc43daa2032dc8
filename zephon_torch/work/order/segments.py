"""Stretches of a plan in which the mixture stays the same, and what each dataset has given before.

A segment has weights of its own, and so a split tree of its own, which starts anew at 0 where the
segment starts. Every dataset's stream goes on where the segment before left it: ``before`` says how
many samples that is. A static mixture is one segment, ``exhausted_policy="redistribute"`` one per
departure (:mod:`zephon_torch.work.order.stopping`), a course of phases one per change
(:mod:`zephon_torch.work.order.phases`). Nothing here knows why a mixture changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from zephon_torch.arithmetic.apportion import SplitTree
from zephon_torch.arithmetic.permutation import Int64Array
from zephon_torch.work.order.mixture import integer_weights

_TREES_KEPT = 64


@dataclass(frozen=True, slots=True)
class SegmentMixture:
    """The mixture of one segment.

    Attributes:
        live: int64[L], ascending numbers of the datasets that take part.
        weights: exact weights by dataset number, one for each of all D datasets. Those of `live`
            are positive; the others do not count.
    """

    live: Int64Array
    weights: Sequence[Fraction | int]

    def integers(self) -> list[int]:
        """Integer weights in force, one for each of `live`."""
        return integer_weights([self.weights[i] for i in self.live.tolist()])


class Segments:
    """K segments over D datasets, one after the other.

    Args:
        mixtures: the mixture of each segment.
        start: int64[K], first position of each, ascending from 0.
        before: int64[K, D], samples of each dataset ahead of each.
        length: positions in all; None where the last segment never ends.

    Attributes:
        mixtures, start, before, length: as given.
    """

    def __init__(
        self,
        mixtures: Sequence[SegmentMixture],
        start: Int64Array,
        before: Int64Array,
        length: int | None,
    ) -> None:
        self.mixtures, self.start, self.before, self.length = mixtures, start, before, length
        self._trees: dict[int, SplitTree] = {}

    @classmethod
    def single(cls, weights: Sequence[Fraction | int]) -> Segments:
        """One segment that never ends. All weights are positive."""
        mixture = SegmentMixture(np.arange(len(weights)), weights)
        return cls([mixture], np.zeros(1, np.int64), np.zeros((1, len(weights)), np.int64), None)

    def cut(self, length: int | None) -> Segments:
        """The same with an end at `length`, None for none. A chunk cut so has its own quotas."""
        shorter = Segments(self.mixtures, self.start, self.before, length)
        shorter._trees = self._trees
        return shorter

    @property
    def changes(self) -> bool:
        """Whether the mixture changes before the end of the plan."""
        if len(self.start) == 1:
            return False
        return self.length is None or int(self.start[1]) < self.length

    def live(self, segment: int) -> Int64Array:
        """Numbers of the datasets that take part in a segment, int64[L]: the leaves of its tree."""
        return self.mixtures[segment].live

    def tree(self, segment: int) -> SplitTree:
        """Split tree of a segment; its leaves are :meth:`live`."""
        tree = self._trees.get(segment)
        if tree is None:
            tree = SplitTree(self.mixtures[segment].integers())
            if len(self._trees) >= _TREES_KEPT:
                self._trees = {}  # a new one: another thread may stand in the old one
            self._trees[segment] = tree
        return tree

    def at(self, position: int) -> int:
        """Number of the segment that a position belongs to."""
        return int(np.searchsorted(self.start, position, side="right")) - 1

    def position(self, dataset: int, m: int) -> tuple[int, int]:
        """Segment of a dataset's m-th item (m >= 1), and its position in the order of the tree.

        Raises:
            IndexError: the dataset has fewer items: it takes no part in the last segment.
        """
        segment = int(np.searchsorted(self.before[:, dataset], m, side="left")) - 1
        live = self.live(segment)
        leaf = int(np.searchsorted(live, dataset))
        if leaf == len(live) or live[leaf] != dataset:
            held = int(self.before[segment, dataset])
            raise IndexError(f"dataset {dataset} has {held} items in all segments, no {m}th")
        within = self.tree(segment).position(leaf, m - int(self.before[segment, dataset]))
        return segment, int(self.start[segment]) + within - 1

    def counts(self, position: int) -> Int64Array:
        """Samples of each dataset among the first `position` positions: int64[D]."""
        segment = self.at(position)
        counts: Int64Array = self.before[segment].copy()
        inside = np.array([position - int(self.start[segment])])
        counts[self.live(segment)] += self.tree(segment).counts(inside)[0]
        return counts
