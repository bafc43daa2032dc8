"""Where a plan stops, and how a mixture changes when datasets run out: closed forms, no replay.

With P_i(m) the smallest p with n_i(p) >= m (see :mod:`zephon_torch.arithmetic.apportion`), each
dataset i of s_i samples may have a *floor*, the number of passes that are wanted of it, and a
*cap*, the number of passes that are allowed:

    length = min( min over caps of P_i(cap_i * s_i + 1) - 1,
                  max over floors of P_i(floor_i * s_i),
                  max_samples )

==================================  =====================================================
given                               stops
==================================  =====================================================
nothing                             as ``stop_after_passes=1``
``exhausted_policy="repeat"`` only  never
``exhausted_policy="stop"``         just before the first position a dataset cannot supply
``stop_after_passes=N``             once every dataset has completed at least N passes
``max_repeats=N``                   just before a dataset would start its (N + 2)th pass
``exhausted_policy="redistribute"`` once every dataset is used up: each sample exactly once
``max_samples=N``                   with any of these, after N samples at the latest
==================================  =====================================================

A length is the first at which the counts hold; inside its last chunk the order may place the sample
that completes a pass a few positions before the end, with samples of other datasets behind it.

Redistribute: a dataset leaves with its last sample; from the next position on, the split tree over
the remaining weights starts anew at 0. So a plan is a list of *segments*, one per departure; every
other plan is one segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, TypeAlias, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from zephon_torch.arithmetic.apportion import MAX_POSITION, SplitTree
from zephon_torch.arithmetic.permutation import Int64Array
from zephon_torch.errors import ConfigurationError
from zephon_torch.support import checks
from zephon_torch.work.order.mixture import integer_weights

ExhaustedPolicy: TypeAlias = Literal["repeat", "stop", "redistribute"]
T = TypeVar("T")
_MOST = 1 << 62


@dataclass(frozen=True, slots=True)
class StopRules:
    """The stop options as given; see the table above. None means "not given"."""

    stop_after_passes: int | None = None
    exhausted_policy: ExhaustedPolicy | Mapping[str, ExhaustedPolicy] | None = None
    max_repeats: int | Mapping[str, int] | None = None
    max_samples: int | None = None

    def __post_init__(self) -> None:
        for option in ("exhausted_policy", "max_repeats"):
            if getattr(self, option) == {}:  # names nobody: not given
                object.__setattr__(self, option, None)
        for option, minimum in (("stop_after_passes", 1), ("max_samples", 1), ("max_repeats", 0)):
            value = _integers(option, getattr(self, option), minimum)
            object.__setattr__(self, option, value)  # plain ints, whatever integers were given
        for where, policy in _entries("exhausted_policy", self.exhausted_policy):
            if policy not in get_args(ExhaustedPolicy):
                raise ConfigurationError(
                    f'{where} is {policy!r}: expected "repeat", "stop" or "redistribute"'
                )
        self._check_combination()

    def _check_combination(self) -> None:
        policies = dict(_entries("exhausted_policy", self.exhausted_policy))
        if isinstance(self.exhausted_policy, Mapping) and "redistribute" in policies.values():
            raise ConfigurationError(
                'exhausted_policy="redistribute" concerns the whole mixture: give it as one value, '
                "not for single datasets"
            )
        ends = {"stop", "redistribute"} & set(policies.values())
        if self.stop_after_passes is not None and (ends or self.max_repeats is not None):
            other = f'exhausted_policy="{min(ends)}"' if ends else "max_repeats"
            raise ConfigurationError(
                f"stop_after_passes={self.stop_after_passes} and {other} contradict: the first "
                "asks for repeats, the second forbids or limits them. Give one of the two"
            )
        if self.max_repeats is not None and self.exhausted_policy in ("stop", "redistribute"):
            raise ConfigurationError(
                f'max_repeats={self.max_repeats} and exhausted_policy="{self.exhausted_policy}" '
                'contradict: without repeats there is nothing to limit. Use "repeat" or drop one'
            )
        if isinstance(self.exhausted_policy, Mapping) and isinstance(self.max_repeats, Mapping):
            for name in self.max_repeats:
                if self.exhausted_policy.get(name) == "stop":
                    raise ConfigurationError(
                        f'dataset {name!r} has exhausted_policy="stop" and '
                        f"max_repeats={self.max_repeats[name]}: give one of the two"
                    )

    @property
    def redistributes(self) -> bool:
        """Whether datasets leave one by one."""
        return self.exhausted_policy == "redistribute"

    def floors_and_caps(self, names: Sequence[str]) -> tuple[list[int | None], list[int | None]]:
        """Passes wanted of and allowed to each dataset; None where there is no bound."""
        explicit = self.exhausted_policy is not None or self.max_repeats is not None
        floor = self.stop_after_passes or (None if explicit else 1)
        return [floor] * len(names), [self._cap(name) for name in names]

    def _cap(self, name: str) -> int | None:
        if per_dataset(self.exhausted_policy, name, "repeat") != "repeat":
            return 1
        repeats = per_dataset(self.max_repeats, name, None)
        return None if repeats is None else repeats + 1


def per_dataset(option: T | Mapping[str, T], name: str, default: T) -> T:
    """Value of an option for one dataset: a scalar holds for all, a mapping for those it names."""
    if isinstance(option, Mapping):
        return option.get(name, default)
    return default if option is None else option


def _integers(option: str, value: object, minimum: int) -> int | dict[str, int] | None:
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {
            name: checks.integer(f"{option}[{name!r}]", entry, minimum=minimum, maximum=_MOST)
            for name, entry in value.items()
        }
    return checks.integer(option, value, minimum=minimum, maximum=_MOST)


def _entries(option: str, value: object) -> list[tuple[str, object]]:
    """(name of the argument, its value), one for each dataset that a mapping names."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        return [(f"{option}[{name!r}]", entry) for name, entry in value.items()]
    return [(option, value)]


class Segments:
    """The stretches of a plan in which the mixture does not change.

    Args:
        names: names of the D datasets that take part, in canonical order.
        weights: their exact weights, all positive.
        sizes: their samples, all positive.
        rules: the stop options.

    Attributes:
        start: int64[K], first position of each segment.
        before: int64[K, D], samples of each dataset ahead of each segment.
        length: positions in all, None where the plan never ends.
        redistributes: whether a dataset leaves before the end of the plan.
    """

    def __init__(
        self,
        names: Sequence[str],
        weights: Sequence[Fraction],
        sizes: Sequence[int],
        rules: StopRules,
    ) -> None:
        self.length: int | None
        self._weights = list(weights)
        self._trees: dict[int, SplitTree] = {}
        self._live: list[Int64Array] = []
        if rules.redistributes:
            self._departures(sizes)
        else:
            self._live = [np.arange(len(names))]
            self.start = np.zeros(1, np.int64)
            self.before = np.zeros((1, len(names)), np.int64)
            self.length = self._length_in_one_segment(names, sizes, rules)
        self._rules, self._sizes, self._whole = rules, sizes, self.length
        if rules.max_samples is not None:
            self.length = min(rules.max_samples, self.length or rules.max_samples)
        if self.length is not None and self.length >= MAX_POSITION:
            raise ConfigurationError(
                f"the plan would have {self.length:.3g} positions, the limit is "
                f"{MAX_POSITION:.3g}: give a smaller max_samples=, or raise the smallest weight"
            )

        self.redistributes = len(self.start) > 1 and int(self.start[1]) < (self.length or 0)

    def plainest_rules(self) -> StopRules:
        """The stop options that are plainest among those that give the very same plan.

        The order depends on stop options through two things alone: whether datasets leave before
        the end, and the length.
        """
        if self._rules == StopRules():
            return self._rules
        if self.redistributes:
            cut = None if self.length == self._whole else self.length
            return StopRules(exhausted_policy="redistribute", max_samples=cut)
        if self.length is None:
            return StopRules(exhausted_policy="repeat")
        names = [""] * len(self._sizes)  # an option without names
        one_pass = self._length_in_one_segment(names, self._sizes, StopRules())
        if self.length == one_pass:
            return StopRules()
        policy: ExhaustedPolicy | None = "repeat" if self.length > (one_pass or 0) else None
        return StopRules(exhausted_policy=policy, max_samples=self.length)

    def live(self, segment: int) -> Int64Array:
        """Numbers of the datasets that take part in a segment, int64[L]: the leaves of its tree."""
        return self._live[segment]

    def tree(self, segment: int) -> SplitTree:
        """Split tree of a segment; its leaves are :meth:`live`."""
        tree = self._trees.get(segment)
        if tree is None:
            live = [self._weights[i] for i in self._live[segment].tolist()]
            tree = SplitTree(integer_weights(live))
            if len(self._trees) >= 64:
                self._trees.pop(next(iter(self._trees)))
            self._trees[segment] = tree
        return tree

    def position(self, dataset: int, m: int) -> tuple[int, int]:
        """Segment of a dataset's m-th item (m >= 1), and its position in the order of the tree."""
        segment = int(np.searchsorted(self.before[:, dataset], m, side="left")) - 1
        leaf = int(np.searchsorted(self._live[segment], dataset))
        within = self.tree(segment).position(leaf, m - int(self.before[segment, dataset]))
        return segment, int(self.start[segment]) + within - 1

    def counts(self, position: int) -> Int64Array:
        """Samples of each dataset among the first `position` positions: int64[D]."""
        segment = int(np.searchsorted(self.start, position, side="right")) - 1
        counts: Int64Array = self.before[segment].copy()
        inside = np.array([position - int(self.start[segment])])
        counts[self.live(segment)] += self.tree(segment).counts(inside)[0]
        return counts

    def _length_in_one_segment(
        self, names: Sequence[str], sizes: Sequence[int], rules: StopRules
    ) -> int | None:
        floors, caps = rules.floors_and_caps(names)
        allowed = {i: cap * sizes[i] + 1 for i, cap in enumerate(caps) if cap is not None}
        wanted = {i: floor * sizes[i] for i, floor in enumerate(floors) if floor is not None}
        ends = [self._first_to(allowed) - 1] if allowed else []
        if wanted:
            ends.append(self._last_to(wanted))
        return min(ends, default=None)

    def _first_to(self, counts: Mapping[int, int]) -> int:
        """The first position count at which any dataset has as many items as `counts` says."""
        leaves, early, late = self._estimates(counts)
        able = leaves[early <= late.min() * (1 + 1e-9)].tolist()
        return min(self.tree(0).position(leaf, counts[leaf]) for leaf in able)

    def _last_to(self, counts: Mapping[int, int]) -> int:
        """The first position count at which all datasets have."""
        leaves, early, late = self._estimates(counts)
        able = leaves[late >= early.max() * (1 - 1e-9)].tolist()
        return max(self.tree(0).position(leaf, counts[leaf]) for leaf in able)

    def _estimates(
        self, counts: Mapping[int, int]
    ) -> tuple[Int64Array, npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Leaves, and bounds of the position at which each has its count.

        n_i(p) is within 2 of its share of p, so few leaves can be the first or the last.
        """
        tree, leaves = self.tree(0), np.array(list(counts))
        share = tree.weight[leaves] / tree.weight[tree.root]
        count = np.array(list(counts.values()), np.float64)
        return leaves, (count - 3) / share, (count + 3) / share

    def _departures(self, sizes: Sequence[int]) -> None:
        live, used = list(range(len(sizes))), np.zeros(len(sizes), np.int64)
        left = np.array(sizes, np.int64)
        starts, before, position = [], [], 0
        while live:
            segment = len(self._live)
            self._live.append(np.array(live))
            starts.append(position)
            before.append(used.copy())
            tree, here = self.tree(segment), self._live[segment]
            # n_i(p) is within 2 of its share, so only these can be the first to run out
            share = tree.weight[: tree.num_leaves] / tree.weight[tree.root]
            soonest = (left[here] + 3) / share
            able = np.flatnonzero((left[here] - 3) / share <= soonest.min() * (1 + 1e-9))
            length = min(tree.position(int(j), int(left[here[j]])) for j in able)
            counts = tree.counts(np.array([length]))[0]
            used[here] += counts
            left[here] -= counts
            position += length
            live = [i for i in live if left[i] > 0]
        self.start, self.before = np.array(starts, np.int64), np.array(before)
        self.length = position
