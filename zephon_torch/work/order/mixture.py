"""Which share of the stream each dataset gets: exact weights.

A float weight means its shortest decimal text (0.7 is 7/10, not the nearest binary fraction), so
weights are exact rationals, and then integers. No float decides an order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Rational, Real

from zephon_torch.errors import ConfigurationError, MixtureError
from zephon_torch.io.datasets.dataset import Dataset

_LARGEST_EXPONENT = 400  # of a Decimal; a float's is 308
TOTAL_LIMIT = 1 << 46
"""Largest sum of integer weights: keeps the products inside a chunk below 2**62."""


class MixtureSpec(Mapping[str, Fraction]):
    """Weights by dataset name, exact.

    Args:
        weights: name -> weight. Weights are relative (they need not sum to 1): int, float, Decimal
            or Fraction, zero allowed. A float means its shortest decimal text.

    Raises:
        MixtureError: a negative, NaN or infinite weight, all weights zero, no weight, a name that
            is not a non-empty string. The message names the entry.

    Examples:
        >>> MixtureSpec({"web": 0.7, "code": 0.3})
        MixtureSpec({'web': 0.7, 'code': 0.3})
        >>> MixtureSpec({"web": 0.7, "code": 0.3})["web"]
        Fraction(7, 10)
    """

    __slots__ = ("_given", "_weights")

    def __init__(self, weights: Mapping[str, float | Decimal | Fraction]) -> None:
        if not isinstance(weights, Mapping):
            raise MixtureError(
                f"expected a mapping of dataset name to weight, got {type(weights).__name__}"
            )
        self._given = dict(weights)
        self._weights = {name: _exact(name, weight) for name, weight in weights.items()}
        if not any(self._weights.values()):
            what = "every weight is zero" if weights else "the mixture is empty"
            raise MixtureError(f"{what}: at least one dataset needs a positive weight")

    def __getitem__(self, name: str) -> Fraction:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __repr__(self) -> str:
        inside = ", ".join(f"{name!r}: {weight!s}" for name, weight in self._given.items())
        return f"MixtureSpec({{{inside}}})"


def _exact(name: object, weight: object) -> Fraction:
    if not isinstance(name, str) or not name:
        raise MixtureError(f"a dataset name must be a non-empty string, got {name!r}")
    fraction = _as_fraction(weight)
    if fraction is None or fraction < 0:
        raise MixtureError(
            f"weight of dataset {name!r} is {weight!r}: expected a finite number >= 0 "
            "(zero leaves the dataset out), as a Decimal between 1e-400 and 1e400"
        )
    return fraction


def _as_fraction(weight: object) -> Fraction | None:
    """Exact value of a number, None where there is none. A float is read through its text."""
    if isinstance(weight, bool) or not isinstance(weight, Real | Decimal):
        return None
    if isinstance(weight, Integral):
        return Fraction(int(weight))
    if isinstance(weight, Rational):
        return Fraction(weight)
    if isinstance(weight, Decimal):
        # an exponent of millions would be written out digit by digit
        fits = weight.is_finite() and abs(weight.adjusted()) <= _LARGEST_EXPONENT
        return Fraction(weight) if fits else None
    if not math.isfinite(weight):
        return None
    # str, not repr: numpy's repr carries the type, its str is the shortest text at that precision
    return Fraction(str(weight))


def canonical(datasets: Sequence[Dataset], mixture: MixtureSpec) -> tuple[Dataset, ...]:
    """Put datasets in order by name, after checking that they and the mixture match.

    Raises:
        ConfigurationError: no datasets; :class:`~zephon_torch.MixtureError`: two of one name, or
            others than the mixture weighs.
    """
    if isinstance(datasets, str) or not isinstance(datasets, Sequence) or not len(datasets):
        raise ConfigurationError(f"expected a non-empty list of datasets, got {datasets!r}")
    for dataset in datasets:
        if not isinstance(dataset, Dataset):
            raise ConfigurationError(
                f"expected zephon_torch.io.Dataset objects, got {type(dataset).__name__}: make one "
                "with Dataset.from_path, from_samples or from_torch"
            )
    ordered = sorted(datasets, key=lambda dataset: dataset.name)
    for a, b in itertools.pairwise(ordered):
        if a.name == b.name:
            raise MixtureError(f"two datasets are named {a.name!r}: give each a name of its own")
    check_weights({dataset.name for dataset in ordered}, mixture)
    return tuple(ordered)


def check_weights(names: Set[str], mixture: MixtureSpec) -> None:
    """Refuse datasets without a weight and weights without a dataset, all of them at once."""
    missing, unknown = sorted(names - mixture.keys()), sorted(mixture.keys() - names)
    faults = []
    if missing:
        faults.append(
            f"{_named('dataset', missing)} no weight in {mixture!r}: add one (0 leaves out)"
        )
    if unknown:
        faults.append(f"{_named('weight', unknown)} no dataset: the datasets are {sorted(names)}")
    if faults:
        raise MixtureError("; ".join(faults))


def _named(kind: str, names: Sequence[str]) -> str:
    """One or several, with the verb."""
    told = ", ".join(map(repr, names))
    return f"{kind} {told} has" if len(names) == 1 else f"{kind}s {told} have"


def integer_weights(weights: Sequence[Fraction], limit: int | None = TOTAL_LIMIT) -> list[int]:
    """Positive integers in the ratio of positive rationals, with a sum of at most `limit`.

    Exact whenever the reduced ratio fits. Otherwise `limit` units are shared out: each weight gets
    the whole units of its share, and a weight whose share is below one unit is raised to one unit.
    What is left goes, a unit each, to the largest remainders among those that were not raised
    (ties: larger weight, then earlier); if raising overdrew the total, the largest give back, each
    at most down to one unit, the largest first (ties: earlier). A share is then off by less than
    (1 + number of raised weights) / limit.

    Args:
        weights: positive rationals, at most `limit` of them.
        limit: largest sum; None: any, so that the ratio is exact.
    """
    common = math.lcm(*(w.denominator for w in weights))
    scaled = [w.numerator * (common // w.denominator) for w in weights]
    divisor = math.gcd(*scaled)
    scaled = [v // divisor for v in scaled]
    total = sum(scaled)
    if limit is None or total <= limit:
        return scaled
    return _largest_remainder(scaled, total, limit)


def _largest_remainder(scaled: list[int], total: int, limit: int) -> list[int]:
    units = [max(1, v * limit // total) for v in scaled]
    spare = limit - sum(units)
    whole = [i for i, v in enumerate(scaled) if v * limit >= total]
    whole.sort(key=lambda i: (-(scaled[i] * limit % total), -scaled[i], i))
    for i in whole[: max(spare, 0)]:
        units[i] += 1
    for i in sorted(range(len(units)), key=lambda i: (-units[i], i)):
        if spare >= 0:
            break
        given = min(-spare, units[i] - 1)
        units[i] -= given
        spare += given
    return units
