"""Numbers in words, for people who look at datasets."""

from __future__ import annotations

_UNITS = ("kB", "MB", "GB", "TB", "PB", "EB")


def plural(number: int, word: str) -> str:
    """Return a number with its noun."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def describe_bytes(num_bytes: int) -> str:
    """Return a size in its unit."""
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    power = min((len(str(num_bytes)) - 1) // 3, len(_UNITS))
    return f"{num_bytes / 1000**power:.1f} {_UNITS[power - 1]}"
