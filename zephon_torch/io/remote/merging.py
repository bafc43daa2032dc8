"""Ranges of bytes, joined into fewer requests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def merge_ranges(
    starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64], gap: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Join ranges that touch, overlap or lie at most `gap` bytes apart. Pure.

    Args:
        starts: int64[n], in any order.
        stops: int64[n].
        gap: Bytes that may be read in vain between two ranges.

    Returns:
        Starts and stops of the joined ranges, and int64[n]: which of them holds range i.
    """
    order = np.argsort(starts, kind="stable")
    reach = np.maximum.accumulate(stops[order])
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = starts[order][1:] > reach[:-1] + gap
    owner = np.empty(len(order), dtype=np.int64)
    owner[order] = np.cumsum(is_first) - 1
    is_last = np.roll(is_first, -1)
    return starts[order][is_first], reach[is_last], owner
