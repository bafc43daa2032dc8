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
the remaining weights starts anew at 0. So a plan is a list of *segments*
(:mod:`zephon_torch.work.order.segments`), one per departure; every other plan here is one segment.
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
from zephon_torch.work.order.segments import SegmentMixture, Segments

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


def segments_of(
    names: Sequence[str], weights: Sequence[Fraction], sizes: Sequence[int], rules: StopRules
) -> Segments:
    """The segments of one mixture under stop options.

    Args:
        names: names of the D datasets that take part, in canonical order.
        weights: their exact weights, all positive.
        sizes: their samples, all positive.
        rules: the stop options.

    Raises:
        ConfigurationError: more positions than :data:`MAX_POSITION`.
    """
    if rules.redistributes:
        segments = _departures(weights, sizes)
    else:
        single = Segments.single(weights)
        segments = single.cut(_length_in_one_segment(single, names, sizes, rules))
    return checked(segments.cut(shorter(segments.length, rules.max_samples)))


def shorter(length: int | None, other: int | None) -> int | None:
    """The smaller of two lengths, of which None has no end."""
    return min((one for one in (length, other) if one is not None), default=None)


def checked(segments: Segments) -> Segments:
    """The segments themselves, unless they have more positions than a plan can have."""
    length = segments.length
    if length is not None and length >= MAX_POSITION:
        raise ConfigurationError(
            f"the plan would have {length:.3g} positions, the limit is "
            f"{MAX_POSITION:.3g}: give a smaller max_samples=, or raise the smallest weight"
        )
    return segments


def plainest_rules(segments: Segments, sizes: Sequence[int], rules: StopRules) -> StopRules:
    """The stop options that are plainest among those that give the very same plan.

    The order depends on stop options through two things alone: whether datasets leave before the
    end, and the length.

    Args:
        segments: those that :func:`segments_of` made.
        sizes: samples of each dataset.
        rules: as given.
    """
    length = segments.length
    if rules == StopRules():
        return rules
    if segments.changes:
        cut = None if length == sum(sizes) else length
        return StopRules(exhausted_policy="redistribute", max_samples=cut)
    if length is None:
        return StopRules(exhausted_policy="repeat")
    names = [""] * len(sizes)  # an option without names
    one_pass = _length_in_one_segment(segments, names, sizes, StopRules())
    if length == one_pass:
        return StopRules()
    policy: ExhaustedPolicy | None = "repeat" if length > (one_pass or 0) else None
    return StopRules(exhausted_policy=policy, max_samples=length)


def _length_in_one_segment(
    segments: Segments, names: Sequence[str], sizes: Sequence[int], rules: StopRules
) -> int | None:
    """The length by floors and caps alone, as if the first segment never ended."""
    floors, caps = rules.floors_and_caps(names)
    allowed = {i: cap * sizes[i] + 1 for i, cap in enumerate(caps) if cap is not None}
    wanted = {i: floor * sizes[i] for i, floor in enumerate(floors) if floor is not None}
    ends = [_first_to(segments.tree(0), allowed) - 1] if allowed else []
    if wanted:
        ends.append(_last_to(segments.tree(0), wanted))
    return min(ends, default=None)


def _first_to(tree: SplitTree, counts: Mapping[int, int]) -> int:
    """The first position count at which any dataset has as many items as `counts` says."""
    leaves, early, late = _estimates(tree, counts)
    able = leaves[early <= late.min() * (1 + 1e-9)].tolist()
    return min(tree.position(leaf, counts[leaf]) for leaf in able)


def _last_to(tree: SplitTree, counts: Mapping[int, int]) -> int:
    """The first position count at which all datasets have."""
    leaves, early, late = _estimates(tree, counts)
    able = leaves[late >= early.max() * (1 - 1e-9)].tolist()
    return max(tree.position(leaf, counts[leaf]) for leaf in able)


def _estimates(
    tree: SplitTree, counts: Mapping[int, int]
) -> tuple[Int64Array, npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Leaves, and bounds of the position at which each has its count.

    n_i(p) is within 2 of its share of p, so few leaves can be the first or the last.
    """
    leaves = np.array(list(counts))
    share = tree.weight[leaves] / tree.weight[tree.root]
    count = np.array(list(counts.values()), np.float64)
    return leaves, (count - 3) / share, (count + 3) / share


def _departures(weights: Sequence[Fraction], sizes: Sequence[int]) -> Segments:
    """One segment per departure, up to the last one."""
    used, left = np.zeros(len(sizes), np.int64), np.array(sizes, np.int64)
    mixtures, starts, before, position = [], [], [], 0
    while left.any():
        mixtures.append(SegmentMixture(np.flatnonzero(left), weights))
        starts.append(position)
        before.append(used.copy())
        here = mixtures[-1].live
        length, counts = _until_departure(SplitTree(mixtures[-1].integers()), left[here])
        used[here] += counts
        left[here] -= counts
        position += length
    return Segments(mixtures, np.array(starts, np.int64), np.array(before), position)


def _until_departure(tree: SplitTree, left: Int64Array) -> tuple[int, Int64Array]:
    """Positions until the first leaf is used up, and what they draw of each, int64[L]."""
    # n_i(p) is within 2 of its share, so only these can be the first to run out
    share = tree.weight[: tree.num_leaves] / tree.weight[tree.root]
    soonest = (left + 3) / share
    able = np.flatnonzero((left - 3) / share <= soonest.min() * (1 + 1e-9))
    length = min(tree.position(int(j), int(left[j])) for j in able)
    counts: Int64Array = tree.counts(np.array([length]))[0]
    return length, counts
