"""The protocol of readers of a shard, and a check that they share."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import RecordError

# Samples of one call: a list, or for formats of equal rows an array whose first axis counts them.
Samples: TypeAlias = list[Any] | npt.NDArray[Any]


class Reader(Protocol):
    """Random access to the records of one shard, for the process that opened it."""

    def read(self, samples: npt.NDArray[np.int64]) -> Samples:
        """Read records by number.

        Args:
            samples: int64[n], record numbers within the shard, in any order, repeats allowed.

        Returns:
            The n records in the same order; a repeated number gives separate objects where the
            format decodes bytes. An array is (n, ...), as narrow as it is stored, and owns its
            memory; `samples_of` makes samples of it.

        Raises:
            RecordError: A number is outside of the shard, or a record cannot be decoded.
            DatasetError: The shard or its index is not what it was.
        """
        ...

    def close(self) -> None:
        """Let go of files; a second call has no effect."""
        ...


class ShardGroup(Protocol):
    """Open shards of one kind, of any datasets, whose records are read in one call.

    Belongs to one thread. Shards have numbers, given by who opens them. A group needs to name
    nothing in its errors: who reads through it then reads shard by shard, which does.
    """

    def add(self, number: int, reader: Any) -> None:
        """Take in a reader of the group's kind."""
        ...

    def remove(self, number: int) -> None:
        """Forget a reader that is about to be closed."""
        ...

    def read(self, numbers: npt.NDArray[np.int64], samples: npt.NDArray[np.int64]) -> Samples:
        """Records of shards that were all added; see `Reader.read`.

        Args:
            numbers: int64[n], numbers of shards.
            samples: int64[n], record numbers within them.

        Raises:
            Exception: Any, if a record cannot be read.
        """
        ...


class GroupKind(Protocol):
    """Kind of readers that are read in one call: hashable, equal for such readers.

    A reader that can be read so names its kind as ``group_kind``.
    """

    def make(self, num_shards: int) -> ShardGroup:
        """A new group, of shards numbered from 0."""
        ...


def samples_of(read: Samples) -> Samples:
    """Make samples of what a reader returned: whole numbers in rows become int64."""
    if isinstance(read, np.ndarray) and read.dtype.kind in "iu":
        return read.astype(np.int64, copy=False)
    return read


def check_bounds(samples: npt.NDArray[np.int64], num_samples: int, shard: str) -> None:
    """Refuse record numbers outside of a shard.

    Raises:
        RecordError: Naming the shard and the first such number.
    """
    outside = samples.view(np.uint64) >= num_samples  # as such, a negative number is a huge one
    if np.count_nonzero(outside):  # a tenth of the time of any()
        raise RecordError(
            f"{shard} has no record {samples[outside][0]}: it holds {num_samples:,} records, "
            "numbered from 0"
        )
