"""Shared memory through which worker processes hand over rows, window by window.

Rows travel as narrow as they are stored, and nothing is allocated, opened or faulted in for a
batch: a worker gathers its window into a slot, the main process widens it out of there. Slots are
taken in turn by the number of the window. That is safe because torch's DataLoader delivers in
order, and sends window k out only when window ``k - outstanding`` has been delivered: then those
before it have been used up, and there are two slots more than windows outstanding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from zephon_torch.io.formats.mapped_rows import RowGroupKind
from zephon_torch.nodes.gather import RowBuffer
from zephon_torch.nodes.pipeline import Pipeline

Array = npt.NDArray[Any]


class RowRing:
    """Slots for windows of rows; crosses to worker processes as they start.

    Args:
        kind: of the rows.
        num_rows: of a slot.
        num_outstanding: windows that are out at a time, at most.
    """

    def __init__(self, kind: RowGroupKind, num_rows: int, num_outstanding: int) -> None:
        self._kind, self._num_slots = kind, num_outstanding + 2
        self._slot_bytes = num_rows * kind.row_bytes
        self._memory = RawArray("b", self._num_slots * self._slot_bytes)

    def slot(self, number: int) -> Slot:
        """Where a worker puts the window of a number."""
        start = number % self._num_slots * self._slot_bytes
        memory = torch.frombuffer(
            self._memory, dtype=torch.uint8, count=self._slot_bytes, offset=start
        )
        return Slot(memory, self._kind)

    def get(self, number: int, sizes: Sequence[int]) -> list[Array]:
        """Views of the batches of a window, to be used up before the next window is asked for."""
        start = number % self._num_slots * self._slot_bytes
        count = sum(sizes) * self._kind.row_length
        rows = np.frombuffer(self._memory, self._kind.dtype, count, start)
        rows = rows.reshape(-1, self._kind.row_length)
        stops = accumulate(sizes)
        return [rows[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]


class Slot(RowBuffer):
    """Memory for one window.

    Args:
        memory: uint8[n], shared.
        kind: of rows that it takes.
    """

    def __init__(self, memory: torch.Tensor, kind: RowGroupKind) -> None:
        self._memory, self._kind = memory, kind

    def take(self, num_rows: int, kind: RowGroupKind) -> torch.Tensor | None:
        """As of any buffer; None for other rows, or too many."""
        num_bytes = num_rows * kind.row_bytes
        if kind != self._kind or num_bytes > len(self._memory):
            return None
        return self._memory[:num_bytes].view(num_rows, kind.row_bytes)

    def holds(self, parts: Sequence[Any]) -> bool:
        """Whether this is what was read for each batch of a window."""
        first = parts[0]
        is_here = isinstance(first, np.ndarray) and first.ctypes.data == self._memory.data_ptr()
        return is_here and all(isinstance(part, np.ndarray) for part in parts)


def make_ring(pipeline: Pipeline, num_rows: int, num_outstanding: int) -> RowRing | None:
    """A ring for what a pipeline reads; None where batches are finished by the workers.

    Args:
        pipeline: it.
        num_rows: samples of a window.
        num_outstanding: windows that are out at a time, at most.
    """
    if pipeline.has_user_code or pipeline.tolerance is not None:
        return None
    kind = pipeline.fetcher.first_kind()
    return None if kind is None else RowRing(kind, num_rows, num_outstanding)
