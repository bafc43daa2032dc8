"""The checks that every count goes through, among arguments and in files alike."""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import ConfigurationError

MAX_SAMPLES = (1 << 54) - 1
"""Most samples of a dataset: what the plan's arithmetic has room for."""
MAX_BYTES = (1 << 62) - 1

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100


def integer(
    name: str,
    value: object,
    *,
    minimum: int | None = None,
    maximum: int | None = None,
    error: Callable[[str], Exception] = ConfigurationError,
) -> int:
    """`value` as a Python int; numpy's integers are taken, booleans and floats are not.

    Raises:
        ConfigurationError: (or `error`) not an integer, or out of range; names the argument.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    too_small = number is not None and minimum is not None and number < minimum
    too_large = number is not None and maximum is not None and number > maximum
    if number is None or too_small or too_large:
        at_least = "" if minimum is None else f" >= {minimum}"
        at_most = "" if maximum is None else f" and <= {maximum}"
        raise error(f"{name} is {shown(value)}: expected an integer{at_least}{at_most}")
    return number


def total(
    name: str,
    counts: npt.NDArray[np.int64],
    *,
    maximum: int = MAX_SAMPLES,
    error: Callable[[str], Exception] = ConfigurationError,
) -> int:
    """Exact sum of counts, int64[n], which numpy would let wrap around without a word.

    Raises:
        ConfigurationError: (or `error`) a count below 0, or a sum above the maximum; names what
            was counted.
    """
    if len(counts) and (low := int(counts.min())) < 0:
        raise error(f"{name} has {low}, less than 0")
    # halves of 32 bits: neither of their sums can wrap
    found = (int((counts >> 32).sum()) << 32) + int((counts & 0xFFFFFFFF).sum())
    if found > maximum:
        raise error(f"{name} sum to {found:,}: {maximum:,} is the most that can be")
    return found


def shown(value: object) -> str:
    """`value` for a message: short, however large it is or deep it is nested."""
    try:
        return _short.repr(value)
    except Exception:  # an int of too many digits, a __repr__ that raises
        return f"<{type(value).__name__}>"
