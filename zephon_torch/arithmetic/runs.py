"""Runs of equal values: what depends on them alone is computed once for each run.

Elements that stand next to each other mostly share their dataset, pass, window and shard, and with
them keys and sizes. Nothing here asks for any order; one in which they share less makes more runs.
"""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Int64Array: TypeAlias = npt.NDArray[np.int64]
T = TypeVar("T", bound=np.generic)


def runs_of(values: Int64Array, inside: Int64Array | None = None) -> Int64Array:
    """First element of each run of equal values, int64[R].

    Args:
        values: int64[m], m >= 1.
        inside: starts of runs that no run may cross.
    """
    change = values[1:] != values[:-1]
    if inside is not None:
        change[inside[1:] - 1] = True
    ends = change.nonzero()[0]
    starts = np.zeros(len(ends) + 1, np.int64)
    np.add(ends, 1, out=starts[1:])
    return starts


def lengths_of(starts: Int64Array, length: int) -> Int64Array:
    """Elements in each of the runs that `length` elements are cut into, int64[R]."""
    lengths = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=lengths[:-1])
    lengths[-1:] = length - starts[-1:]
    return lengths


def spread(values: npt.NDArray[T], lengths: Int64Array | None) -> npt.NDArray[T]:
    """Values of runs as values of their elements: value i stands `lengths[i]` times.

    One value, or no lengths, stay as they are: arithmetic broadcasts one value faster.
    """
    return values if lengths is None or len(values) == 1 else np.repeat(values, lengths)


def counted(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """The numbers [start, start + length) of each run, one after the other."""
    if len(starts) == 1:
        return np.arange(starts[0], starts[0] + lengths[0])
    numbers = np.arange(int(lengths.sum()))
    numbers += np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return numbers
