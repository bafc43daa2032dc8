"""Which shard holds which offset of a pass: cumulative sizes, and buckets to find a place in them.

A *table* is the shards of one dataset, in the order of one of its passes, laid end to end. Tables
stand end to end themselves: a *cell* is a place for a shard, an *address* one for a sample. A
*bucket* is a stretch of ``2**shift`` samples of a table, one mean shard to two; it knows the cell
of its first sample. So an offset is found at most two steps from its bucket's cell, and only where
shards are uneven by bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from zephon_torch.arithmetic.permutation import MAX_N
from zephon_torch.arithmetic.runs import Int64Array, counted, runs_of, spread

_CELLS_AT_ONCE = 1 << 20  # most cells of tables that are built at once

ShardOrder: TypeAlias = Callable[[Int64Array, Int64Array, int], Int64Array]


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where P tables stand, int64[P] each: their sizes, first places and size of buckets."""

    num_shards: Int64Array
    size: Int64Array
    first_cell: Int64Array
    first_address: Int64Array
    first_bucket: Int64Array
    num_buckets: Int64Array
    shift: Int64Array

    @classmethod
    def of(cls, num_shards: Int64Array, size: Int64Array) -> _Layout:
        """Tables of so many shards and samples."""
        shift = np.frexp((size // num_shards).astype(np.float64))[1].astype(np.int64)
        num_buckets = (size >> shift) + 2  # a last one past the end, to search up to
        first_cell, first_address, first_bucket = (
            np.cumsum(a) - a for a in (num_shards, size, num_buckets)
        )
        return cls(num_shards, size, first_cell, first_address, first_bucket, num_buckets, shift)


@dataclass(frozen=True, slots=True)
class _Tables:
    """Tables with their contents.

    Attributes:
        layout: where they stand.
        address: int64[cells + 1], address of the first sample of each cell.
        shard: int32[cells], shard of each cell.
        bucket: int32[buckets], cell of the first sample of each bucket.
    """

    layout: _Layout
    address: Int64Array
    shard: npt.NDArray[np.int32]
    bucket: npt.NDArray[np.int32]

    @classmethod
    def empty(cls, layout: _Layout) -> _Tables:
        """Tables that are filled later. The address where each ends is right from the start."""
        cells, buckets = int(layout.num_shards.sum()), int(layout.num_buckets.sum())
        address = np.zeros(cells + 1, np.int64)
        address[layout.first_cell] = layout.first_address
        address[-1] = layout.size.sum()
        return cls(layout, address, np.zeros(cells, np.int32), np.zeros(buckets, np.int32))

    @classmethod
    def of(cls, layout: _Layout, shard: Int64Array, shard_size: Int64Array) -> _Tables:
        """Tables of shards int64[cells]; `shard_size` is that of all shards there are."""
        address = np.zeros(len(shard) + 1, np.int64)
        np.cumsum(shard_size.take(shard), out=address[1:])
        # the first bucket that begins at or after each cell's first sample
        bucket = address[:-1] - spread(layout.first_address + 1, layout.num_shards)
        bucket >>= spread(layout.shift, layout.num_shards)
        bucket += spread(layout.first_bucket + 1, layout.num_shards)
        last_cell = np.bincount(bucket, minlength=int(layout.num_buckets.sum()))
        np.cumsum(last_cell, out=last_cell)
        last_cell -= 1
        return cls(layout, address, shard.astype(np.int32), last_cell.astype(np.int32))

    def put(self, table: Int64Array, new: _Tables) -> None:
        """Replace tables by those of `new`, in turn."""
        own, layout = self.layout, new.layout
        cells = _places(own.first_cell[table], layout.num_shards)
        moved = own.first_address[table] - layout.first_address
        self.address[cells] = new.address[:-1] + spread(moved, layout.num_shards)
        self.shard[cells] = new.shard
        moved = own.first_cell[table] - layout.first_cell
        buckets = _places(own.first_bucket[table], layout.num_buckets)
        self.bucket[buckets] = new.bucket + spread(moved, layout.num_buckets)

    def find(
        self, table: Int64Array, offset: Int64Array, lengths: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Shard and place in it of each offset; `table` int64[R] is that of runs of elements."""
        layout = self.layout
        bucket = offset >> spread(layout.shift[table], lengths)
        bucket += spread(layout.first_bucket[table], lengths)
        address = offset + spread(layout.first_address[table], lengths)
        cell = self.bucket.take(bucket).astype(np.int64)
        ends = self.address[1:]
        for _ in range(2):
            cell += address >= ends.take(cell)
        beyond = np.flatnonzero(address >= ends.take(cell))
        if len(beyond):
            last = self.bucket[bucket[beyond] + 1].astype(np.int64)
            cell[beyond] = self._bisected(cell[beyond] + 1, last, address[beyond])
        return self.shard.take(cell).astype(np.int64), address - self.address.take(cell)

    def _bisected(self, low: Int64Array, high: Int64Array, address: Int64Array) -> Int64Array:
        """The last of the cells low .. high that begins at the address or before."""
        while (low < high).any():
            middle = (low + high + 1) >> 1
            begins = self.address[middle] <= address
            low, high = np.where(begins, middle, low), np.where(begins, high, middle - 1)
        return low


def _places(first: Int64Array, lengths: Int64Array) -> Int64Array | slice:
    """Where the runs of these lengths that begin at `first` stand."""
    if len(first) == 1:
        return slice(int(first[0]), int(first[0] + lengths[0]))
    return counted(first, lengths)


class ShardTables:
    """The shard tables of D datasets, those of the last passes kept.

    Pass p of a dataset keeps its table in slot ``p % 2``, so that the two passes that meet at a
    boundary never evict each other. Passes that find no room have tables of the moment.

    Args:
        num_shards: int64[D], shards of each dataset.
        shard_size: int64[S], samples of all shards, dataset by dataset, all positive.
        order_of: (dataset int64[P], pass int64[P], epoch) -> int64[P, width]: the order of each
            dataset's shards, of which the first ``num_shards`` count. All datasets of a call agree
            in ``bit_length(num_shards - 1)``. None for file order.
        varies: bool[D], whether passes and epochs differ in order; others are pass 0 of epoch 0.
    """

    def __init__(
        self,
        num_shards: Int64Array,
        shard_size: Int64Array,
        order_of: ShardOrder | None,
        varies: npt.NDArray[np.bool_],
    ) -> None:
        self._num_shards, self._shard_size, self._order_of = num_shards, shard_size, order_of
        self._first_shard = np.cumsum(num_shards) - num_shards
        self._size: Int64Array = np.add.reduceat(shard_size, self._first_shard)
        self._varies = varies & (num_shards > 1)
        self._width = np.frexp((num_shards - 1).astype(np.float64))[1]  # bit_length
        self._kept: _Tables | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_kept": None}

    def find(
        self,
        dataset: Int64Array,
        pass_index: Int64Array,
        epoch: int,
        offset: Int64Array,
        lengths: Int64Array,
    ) -> tuple[Int64Array, Int64Array]:
        """Shard (counted over all datasets) and sample at each offset of a pass.

        Args:
            dataset, pass_index: int64[R], of runs of elements.
            offset: int64[m], in [0, size of the dataset).
            lengths: int64[R], elements of each run.

        Returns:
            (shard, sample), int64[m] each. Not for two threads at once.
        """
        kept = self._slots()
        version, epochs = (n * self._varies[dataset] for n in (pass_index, epoch))
        table = dataset + (version & 1) * len(self._size)
        is_held = self._is_held(table, version, epochs)
        if not is_held.all():
            self._hold_newest(dataset[~is_held], version[~is_held], epoch)
            is_held = self._is_held(table, version, epochs)
        shard, sample = kept.find(table, offset, lengths)
        if not is_held.all():
            rest = np.flatnonzero(np.repeat(~is_held, lengths))
            shard[rest], sample[rest] = self._find_unheld(
                dataset[~is_held], version[~is_held], epoch, offset[rest], lengths[~is_held]
            )
        return shard, sample

    def _slots(self) -> _Tables:
        if self._kept is None:
            slots = 2 if self._varies.any() else 1
            layout = _Layout.of(np.tile(self._num_shards, slots), np.tile(self._size, slots))
            self._kept = _Tables.empty(layout)
            self._version = np.full(slots * len(self._size), -1)
            self._epoch = np.full(slots * len(self._size), -1)
        return self._kept

    def _is_held(
        self, table: Int64Array, version: Int64Array, epochs: Int64Array
    ) -> npt.NDArray[np.bool_]:
        held: npt.NDArray[np.bool_] = self._version[table] == version
        held &= self._epoch[table] == epochs
        return held

    def _hold_newest(self, dataset: Int64Array, version: Int64Array, epoch: int) -> None:
        """Keep the tables of the last pass of each parity, for every dataset given."""
        table = dataset + (version & 1) * len(self._size)
        order = np.lexsort((version, table))
        last = np.append(runs_of(table[order])[1:], len(order)) - 1
        dataset, version, table = (a[order[last]] for a in (dataset, version, table))
        kept = self._slots()
        for part in self._portions(dataset):
            kept.put(table[part], self._build(dataset[part], version[part], epoch))
        self._version[table], self._epoch[table] = version, epoch * self._varies[dataset]

    def _find_unheld(
        self,
        dataset: Int64Array,
        version: Int64Array,
        epoch: int,
        offset: Int64Array,
        lengths: Int64Array,
    ) -> tuple[Int64Array, Int64Array]:
        shard, sample = np.empty_like(offset), np.empty_like(offset)
        first = np.cumsum(lengths) - lengths
        for part in self._portions(dataset):
            tables = self._build(dataset[part], version[part], epoch)
            here = counted(first[part], lengths[part])
            found = tables.find(np.arange(len(part)), offset[here], lengths[part])
            shard[here], sample[here] = found
        return shard, sample

    def _portions(self, dataset: Int64Array) -> Iterator[Int64Array]:
        """Indices of tables to build at once: of similar widths, and not too many cells."""
        order = np.argsort(self._width[dataset], kind="stable")
        width = self._width[dataset[order]]
        for members in np.split(order, runs_of(width)[1:]):
            most = int(self._num_shards[dataset[members]].max())
            largest = int(self._size[dataset[members]].max())
            at_once = max(1, min(_CELLS_AT_ONCE // most, MAX_N // largest))
            for start in range(0, len(members), at_once):
                yield members[start : start + at_once]

    def _build(self, dataset: Int64Array, version: Int64Array, epoch: int) -> _Tables:
        num_shards, first = self._num_shards[dataset], self._first_shard[dataset]
        if self._order_of is None:
            shard = counted(first, num_shards)
        else:
            order = self._order_of(dataset, version, epoch)
            order += first[:, None]
            counts = np.arange(order.shape[1]) < num_shards[:, None]
            shard = order.ravel() if counts.all() else order[counts]
        return _Tables.of(_Layout.of(num_shards, self._size[dataset]), shard, self._shard_size)
