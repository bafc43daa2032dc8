"""The check that every count among the arguments goes through."""

from __future__ import annotations

import operator

from zephon_torch.errors import ConfigurationError


def integer(
    name: str,
    value: object,
    *,
    minimum: int | None = None,
    maximum: int | None = None,
    error: type[ConfigurationError] = ConfigurationError,
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
        raise error(f"{name} is {value!r}: expected an integer{at_least}{at_most}")
    return number
