"""The shards of a dataset as columns: a million of them are a few arrays, not a million objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from zephon_torch.io.datasets.paths import Paths


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a dataset, or one part of an in-memory one.

    Attributes:
        path: POSIX path relative to the dataset's root; ``shard-000000`` and so on in memory.
        num_samples: Number of records.
        num_bytes: Size of the file; 0 in memory.
    """

    path: str
    num_samples: int
    num_bytes: int


class ShardTable(Sequence[Shard]):
    """An immutable sequence of `Shard` objects, made when asked for.

    Args:
        num_samples: int64[num_shards].
        num_bytes: int64[num_shards], None for an in-memory dataset.
        paths: One relative path a shard, None for names made of the number.

    Raises:
        ValueError: A path that holds a NUL character.
    """

    def __init__(
        self,
        num_samples: npt.NDArray[np.int64],
        num_bytes: npt.NDArray[np.int64] | None = None,
        paths: Iterable[str] | None = None,
    ) -> None:
        self.paths = paths if paths is None or isinstance(paths, Paths) else Paths.of(paths)
        self.num_samples = _frozen(num_samples)
        self.num_bytes = _frozen(np.zeros_like(num_samples) if num_bytes is None else num_bytes)

    @cached_property
    def stops(self) -> npt.NDArray[np.int64]:
        """int64[num_shards]: number of samples up to and including each shard."""
        return _frozen(np.cumsum(self.num_samples))

    def path(self, shard: int) -> str:
        """Relative path of a shard by its number (not negative)."""
        return f"shard-{shard:06d}" if self.paths is None else self.paths[shard]

    def locate(self, sample: int) -> tuple[int, int]:
        """Shard and record number of a sample in shard-then-record order."""
        shard = int(np.searchsorted(self.stops, sample, side="right"))
        return shard, sample - int(self.stops[shard] - self.num_samples[shard])

    def __len__(self) -> int:
        return len(self.num_samples)

    @overload
    def __getitem__(self, index: int) -> Shard: ...
    @overload
    def __getitem__(self, index: slice) -> list[Shard]: ...
    def __getitem__(self, index: int | slice) -> Shard | list[Shard]:
        if isinstance(index, slice):
            return [self._shard(shard) for shard in range(len(self))[index]]
        try:
            return self._shard(range(len(self))[index])
        except IndexError:
            raise IndexError(f"shard {index} of {len(self)} shards") from None

    def __iter__(self) -> Iterator[Shard]:
        return map(self._shard, range(len(self)))

    def __repr__(self) -> str:
        return f"<{len(self):,} shards, {int(self.num_samples.sum()):,} samples>"

    def __getstate__(self) -> dict[str, Any]:
        return {"args": (self.num_samples, self.num_bytes, self.paths)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Through the constructor: arrays come out of a pickle writable.
        self.__init__(*state["args"])  # type: ignore[misc]

    def _shard(self, shard: int) -> Shard:
        return Shard(self.path(shard), int(self.num_samples[shard]), int(self.num_bytes[shard]))


def _frozen(array: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return a read-only array that no one else can write to."""
    array = array if array.base is None else array.copy()
    array.setflags(write=False)
    return array
