"""Shared memory through which worker processes hand over rows, window by window.

Rows travel as narrow as they are stored, and nothing is allocated, opened or faulted in for a
batch: a worker copies its window into a slot, the main process widens it out of there. Slots are
taken in turn by the number of the window. That is safe because torch's DataLoader delivers in
order, and sends window k out only when window ``k - outstanding`` has been delivered: then those
before it have been used up, and there are two slots more than windows outstanding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
import numpy.typing as npt

from zephon_torch.nodes.pipeline import Pipeline

Array = npt.NDArray[Any]


class RowRing:
    """Slots for windows of rows; crosses to worker processes as they start.

    Args:
        row: a row as it is read, for its type and shape.
        num_rows: of a slot.
        num_outstanding: windows that are out at a time, at most.
    """

    def __init__(self, row: Array, num_rows: int, num_outstanding: int) -> None:
        self._dtype, self._row_shape = row.dtype, row.shape
        self._slot_rows, self._num_slots = num_rows, num_outstanding + 2
        self._memory = RawArray("b", self._num_slots * num_rows * row.nbytes)

    def put(self, number: int, parts: Sequence[Any]) -> list[int] | None:
        """Copy what was read of a window into its slot.

        Args:
            number: of the window.
            parts: what was read for each of its batches.

        Returns:
            Rows of each batch; None, with nothing copied, if these are other rows or too many.
        """
        for part in parts:
            if not isinstance(part, np.ndarray) or part.dtype != self._dtype:
                return None
            if part.shape[1:] != self._row_shape:
                return None
        sizes = [len(part) for part in parts]
        if sum(sizes) > self._slot_rows:
            return None
        np.concatenate(parts, out=self._slot(number)[: sum(sizes)])
        return sizes

    def get(self, number: int, sizes: Sequence[int]) -> list[Array]:
        """Views of the batches of a window, to be used up before the next window is asked for."""
        slot, stop, parts = self._slot(number), 0, []
        for size in sizes:
            stop += size
            parts.append(slot[stop - size : stop])
        return parts

    def _slot(self, number: int) -> Array:
        shape = self._slot_rows, *self._row_shape
        count = math.prod(shape)
        start = number % self._num_slots * count * self._dtype.itemsize
        return np.frombuffer(self._memory, self._dtype, count, start).reshape(shape)


def make_ring(pipeline: Pipeline, num_rows: int, num_outstanding: int) -> RowRing | None:
    """A ring for what a pipeline reads; None where batches are finished by the workers.

    Args:
        pipeline: it.
        num_rows: samples of a window.
        num_outstanding: windows that are out at a time, at most.
    """
    if pipeline.has_user_code or pipeline.tolerance is not None:
        return None
    row = pipeline.fetcher.first_row()
    return None if row is None else RowRing(row, num_rows, num_outstanding)
