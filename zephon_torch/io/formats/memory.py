"""Records of any indexable Python object, in this process's memory or made on demand."""

from __future__ import annotations

from operator import length_hint
from typing import Any

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import DatasetError
from zephon_torch.io.formats.map_style import came_as_one
from zephon_torch.io.storage.reader import check_bounds


class MemoryReader:
    """Reads items [start, start + num_samples) of an object with ``__getitem__``.

    An object with ``__getitems__`` (torch's convention) gets all numbers of a call at once; rows of
    a TensorDict come as one, as torch's collate_fn gets them. What the object raises passes
    through, with a note that names the record.
    """

    def __init__(self, samples: Any, start: int, num_samples: int, shard: str) -> None:
        self._samples = samples
        self._start = start
        self._num_samples = num_samples
        self._shard = shard
        self._reads_at_once = bool(getattr(samples, "__getitems__", None))

    def read(self, samples: npt.NDArray[np.int64]) -> list[Any]:
        """Items by number, asked for in this order; see `Reader.read`."""
        numbers: list[int] = np.asarray(samples, dtype=np.int64).tolist()
        if numbers and (min(numbers) < 0 or max(numbers) >= self._num_samples):
            check_bounds(samples, self._num_samples, self._shard)
        if self._start:
            numbers = [self._start + number for number in numbers]
        if self._reads_at_once:
            return self._read_at_once(numbers)
        held, left = self._samples, iter(numbers)
        try:
            return [held[number] for number in left]
        except Exception as error:
            failed = numbers[len(numbers) - length_hint(left) - 1] - self._start
            error.add_note(f"at record {failed} of {self._shard}")
            raise

    def close(self) -> None:
        """Nothing to let go of."""

    def _read_at_once(self, numbers: list[int]) -> list[Any]:
        try:
            given = self._samples.__getitems__(numbers)
            items = given if came_as_one(given) else list(given)
        except Exception as error:
            records = ", ".join(str(number - self._start) for number in numbers)
            error.add_note(f"at one of the records {records} of {self._shard}")
            raise
        if len(items) != len(numbers):
            raise DatasetError(
                f"{self._shard}: __getitems__ of {type(self._samples).__name__} returned "
                f"{len(items)} samples for {len(numbers)} numbers"
            )
        return items
