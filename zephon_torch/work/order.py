"""The order of the samples inside one dataset: rank in its stream <-> (pass, shard, sample).

A dataset of s samples is an endless stream of passes. Rank m of an epoch lies in pass ``m // s`` at
offset ``o = m % s``; every epoch starts at rank 0. The offset becomes a sample through the shuffle
levels, each computed directly for any offset:

==================  ==============  ====================  =====================================
shuffle_block_size  shuffle_shards  shuffle_within_shard  order of a pass
==================  ==============  ====================  =====================================
None                False           False                 file order
None                False           True                  shards in order, each permuted
None                True            False                 shards in a keyed order, each in order
None                True            True                  shards in a keyed order, each permuted
B or "auto"         False           (included)            file order, windows of B permuted
B or "auto"         True            (included)            shards in a keyed order laid end to
                                                          end, windows of B of that permuted
"global"            (no effect)     (no effect)           the whole dataset permuted
==================  ==============  ====================  =====================================

Windows tumble: [0, B), [B, 2B), ..., the last one shorter. ``"auto"`` is 8 times the largest shard
of that dataset, at most its size. Empty shards take no part: the keys below number only the others,
in the order of their paths (pointers keep the number that a shard has in its dataset).

Keys, in the terms of :mod:`zephon_torch.arithmetic.permutation`:

- dataset key ``text_key("zephon_torch/order/1", str(seed), name)``;
- pass key ``p = subkey(dataset key, epoch, pass)``; with ``reshuffle_on_repeat=False`` it is
  ``subkey(dataset key, 0, 0)`` in every pass of every epoch;
- shard order ``hash_order(subkey(p, 0), number of shards)``;
- within shard j, wherever it stands, ``permute(sample, size, subkey(p, 1, j))``;
- window b ``permute(offset in the window, its length, subkey(p, 2, b))``;
- global ``permute(offset, s, subkey(p, 3))``.

So a dataset's own order depends on the seed, its name and its shard sizes, not on other datasets,
weights or the chunk size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from zephon_torch import checks
from zephon_torch.arithmetic.permutation import (
    MAX_N,
    Int64Array,
    U,
    UInt64Array,
    hash_order,
    permute,
    subkeys,
    text_key,
    unpermute,
)
from zephon_torch.errors import ConfigurationError

_Permutation: TypeAlias = Callable[[Int64Array, Int64Array, UInt64Array], Int64Array]
BlockSize: TypeAlias = int | Literal["auto", "global"] | None

_SHARDS, _WITHIN, _BLOCK, _GLOBAL = (np.array([purpose]) for purpose in range(4))
_TABLE_CELLS = 1 << 20  # most cells of shard tables built at once beyond the two that are kept


@dataclass(frozen=True, slots=True)
class ShuffleLevels:
    """Which levels are on; see the table above."""

    shards: bool
    within_shard: bool
    block_size: BlockSize

    def __post_init__(self) -> None:
        size = self.block_size
        if size in (None, "auto", "global"):
            return
        if isinstance(size, str):
            raise ConfigurationError(
                f"shuffle_block_size is {size!r}: expected None, an integer >= 1, "
                '"auto" or "global"'
            )
        size = checks.integer("shuffle_block_size", size, minimum=1, maximum=MAX_N)
        object.__setattr__(self, "block_size", size)


class SampleOrder:
    """Orders of D datasets, addressed by their number 0 .. D-1.

    Args:
        names: name of each dataset.
        shard_sizes: int64[num_shards] for each dataset, samples per shard, at least one positive.
        seed: the plan's seed.
        levels: the shuffle levels.
        reshuffle: for each dataset, whether passes and epochs differ.

    Attributes:
        size: int64[D], samples in each dataset.
    """

    def __init__(
        self,
        names: Sequence[str],
        shard_sizes: Sequence[Int64Array],
        *,
        seed: int,
        levels: ShuffleLevels,
        reshuffle: Sequence[bool],
    ) -> None:
        self._levels = levels
        self._reshuffle = np.array(reshuffle, bool)
        keys = [text_key("zephon_torch/order/1", str(seed), name) for name in names]
        self._key = np.array(keys, U)
        present = [np.flatnonzero(sizes) for sizes in shard_sizes]
        self._shard_id = np.concatenate(present)
        self._shard_size = np.concatenate(
            [sizes[ids] for sizes, ids in zip(shard_sizes, present, strict=True)]
        )
        self._num_shards: Int64Array = np.array([len(ids) for ids in present])
        self._first_shard = np.cumsum(self._num_shards) - self._num_shards
        self._shard_end = np.cumsum(self._shard_size)
        self.size: Int64Array = np.add.reduceat(self._shard_size, self._first_shard)
        self._first_sample = np.cumsum(self.size) - self.size
        self._block = self._block_sizes(levels.block_size)
        self._shuffles_shards = levels.shards and levels.block_size != "global"
        self._forget_tables()

    def _block_sizes(self, block_size: BlockSize) -> Int64Array | None:
        if block_size is None or block_size == "global":
            return None
        largest: Int64Array = np.maximum.reduceat(self._shard_size, self._first_shard)
        wanted = 8 * largest if block_size == "auto" else np.full_like(largest, block_size)
        block: Int64Array = np.minimum(wanted, self.size)
        return block

    def varies(self, dataset: int) -> bool:
        """Whether two passes of a dataset can differ in order."""
        levels = self._levels
        if not self._reshuffle[dataset] or self.size[dataset] == 1:
            return False
        if levels.block_size == "global":
            return True
        if levels.shards and self._num_shards[dataset] > 1:
            return True
        if self._block is not None:
            return bool(self._block[dataset] > 1)
        return levels.within_shard and bool(self.size[dataset] > self._num_shards[dataset])

    def locate(
        self, dataset: Int64Array, rank: Int64Array, epoch: int
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Pass, shard and sample at each rank of each dataset's stream.

        Args:
            dataset: int64[m].
            rank: int64[m], >= 0.
            epoch: >= 0.

        Returns:
            (pass, shard, sample), int64[m] each. Pure but for a cache of shard tables, which makes
            it unsafe to call from two threads at once.
        """
        size = self.size[dataset]
        pass_index = rank // size
        offset = rank - pass_index * size
        levels = self._levels
        keys = self._pass_keys(dataset, pass_index, epoch)
        if levels.block_size == "global":
            offset = permute(offset, size, subkeys(keys, _GLOBAL))
        elif self._block is not None:
            offset = self._in_block(dataset, offset, keys, permute)
        if self._shuffles_shards:
            flat, sample = self._shuffled_shard(dataset, pass_index, offset, epoch)
        else:
            flat, sample = self._file_order_shard(dataset, offset)
        if levels.within_shard and levels.block_size is None:
            number = flat - self._first_shard[dataset]
            within = subkeys(subkeys(keys, _WITHIN), number)
            sample = permute(sample, self._shard_size[flat], within)
        return pass_index, self._shard_id[flat], sample

    def ranks(
        self, dataset: int, shard: int, sample: int, passes: Int64Array, epoch: int
    ) -> Int64Array:
        """Rank at which one sample stands in each given pass: the inverse of :meth:`locate`.

        Args:
            shard: number of a shard that holds `sample`.
            passes: int64[P].

        Returns:
            int64[P]. One unpermute per pass; with ``shuffle_shards`` also a table of the dataset's
            shards per pass.
        """
        which = np.full_like(passes, dataset)
        keys = self._pass_keys(which, passes, epoch)
        first, levels = int(self._first_shard[dataset]), self._levels
        shard_ids = self._shard_id[first : first + int(self._num_shards[dataset])]
        number = int(np.searchsorted(shard_ids, shard))
        flat = first + number
        x = np.full_like(passes, sample)
        if levels.within_shard and levels.block_size is None:
            within = subkeys(subkeys(keys, _WITHIN), np.array([number]))
            x = unpermute(x, self._shard_size[flat : flat + 1], within)
        offset = x + self._shard_starts(dataset, number, passes, epoch)
        if levels.block_size == "global":
            offset = unpermute(offset, self.size[which], subkeys(keys, _GLOBAL))
        elif self._block is not None:
            offset = self._in_block(which, offset, keys, unpermute)
        ranks: Int64Array = passes * self.size[dataset] + offset
        return ranks

    def _pass_keys(self, dataset: Int64Array, pass_index: Int64Array, epoch: int) -> UInt64Array:
        reshuffle = self._reshuffle[dataset]
        by_epoch = subkeys(self._key, self._reshuffle * epoch)
        return subkeys(by_epoch[dataset], pass_index * reshuffle)

    def _in_block(
        self, dataset: Int64Array, offset: Int64Array, keys: UInt64Array, mapping: _Permutation
    ) -> Int64Array:
        assert self._block is not None
        block = self._block[dataset]
        index = offset // block
        start = index * block
        length = np.minimum(block, self.size[dataset] - start)
        return start + mapping(offset - start, length, subkeys(subkeys(keys, _BLOCK), index))

    def _file_order_shard(
        self, dataset: Int64Array, offset: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        place = self._first_sample[dataset] + offset
        flat = np.searchsorted(self._shard_end, place, side="right")
        return flat, place - self._shard_end[flat] + self._shard_size[flat]

    # Shards in a keyed order. Pass p of a dataset keeps its table (order and cumulative sizes) in
    # slot p % 2, so the two passes that meet at a boundary never evict each other. The tables of
    # all datasets of a slot lie end to end; the second slot's ends are shifted by all samples, so
    # one searchsorted serves both. Passes that find no room are looked up in tables of the moment.

    def _forget_tables(self) -> None:
        num_datasets, num_shards = len(self.size), len(self._shard_size)
        self._table_pass = np.full((2, num_datasets), -1)
        self._table_epoch = np.full((2, num_datasets), -1)
        self._table_order: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self._table_end: Int64Array = np.zeros(0, np.int64)
        if self._shuffles_shards:
            number = np.arange(num_shards) - np.repeat(self._first_shard, self._num_shards)
            self._table_order = np.tile(number.astype(np.int32), 2)
            self._table_end = np.concatenate([self._shard_end, self._shard_end + self.size.sum()])

    def _shuffled_shard(
        self, dataset: Int64Array, pass_index: Int64Array, offset: Int64Array, epoch: int
    ) -> tuple[Int64Array, Int64Array]:
        version = pass_index * self._reshuffle[dataset]
        slot = version & 1
        held = self._is_held(dataset, version, slot, epoch)
        if not held.all():
            self._hold_newest(dataset[~held], version[~held], epoch)
            held = self._is_held(dataset, version, slot, epoch)
        place = self._first_sample[dataset] + offset + slot * self.size.sum()
        cell = np.searchsorted(self._table_end, place, side="right")
        flat = self._first_shard[dataset] + self._table_order[cell]
        sample = place - self._table_end[cell] + self._shard_size[flat]
        for rest in self._by_dataset(dataset, np.flatnonzero(~held)):
            flat[rest], sample[rest] = self._look_up(
                int(dataset[rest[0]]), version[rest], offset[rest], epoch
            )
        return flat, sample

    def _is_held(
        self, dataset: Int64Array, version: Int64Array, slot: Int64Array, epoch: int
    ) -> npt.NDArray[np.bool_]:
        held: npt.NDArray[np.bool_] = self._table_pass[slot, dataset] == version
        held &= self._table_epoch[slot, dataset] == epoch * self._reshuffle[dataset]
        held |= self._num_shards[dataset] == 1
        return held

    def _hold_newest(self, dataset: Int64Array, version: Int64Array, epoch: int) -> None:
        """Build the tables of the last pass of each parity, for every dataset given."""
        for members in self._by_dataset(dataset, np.arange(len(dataset))):
            number = int(dataset[members[0]])
            versions = np.unique(version[members])
            for parity in (0, 1):
                newest = versions[versions % 2 == parity][-1:]
                if len(newest):
                    self._hold(number, newest, epoch)

    def _hold(self, dataset: int, version: Int64Array, epoch: int) -> None:
        slot = int(version[0]) & 1
        order, end = self._tables(dataset, version, epoch)
        first = slot * len(self._shard_size) + int(self._first_shard[dataset])
        shift = slot * self.size.sum() + self._first_sample[dataset]
        self._table_order[first : first + order.shape[1]] = order[0]
        self._table_end[first : first + order.shape[1]] = end[0] + shift
        self._table_pass[slot, dataset] = version[0]
        self._table_epoch[slot, dataset] = epoch * self._reshuffle[dataset]

    def _look_up(
        self, dataset: int, version: Int64Array, offset: Int64Array, epoch: int
    ) -> tuple[Int64Array, Int64Array]:
        flat, sample = np.empty_like(offset), np.empty_like(offset)
        versions, row = np.unique(version, return_inverse=True)
        size, first = int(self.size[dataset]), int(self._first_shard[dataset])
        at_once = max(1, min(_TABLE_CELLS // int(self._num_shards[dataset]), MAX_N // size))
        for start in range(0, len(versions), at_once):
            part = np.flatnonzero((row >= start) & (row < start + at_once))
            order, end = self._tables(dataset, versions[start : start + at_once], epoch)
            shift = (row[part] - start) * size
            all_ends = (end + np.arange(len(end))[:, None] * size).ravel()
            cell = np.searchsorted(all_ends, offset[part] + shift, side="right")
            flat[part] = first + order.ravel()[cell]
            sample[part] = offset[part] + shift - all_ends[cell] + self._shard_size[flat[part]]
        return flat, sample

    def _tables(
        self, dataset: int, versions: Int64Array, epoch: int
    ) -> tuple[Int64Array, Int64Array]:
        """Shard numbers in order, and cumulative sizes, for passes: int64[P, num_shards] each."""
        keys = self._pass_keys(np.full_like(versions, dataset), versions, epoch)
        num_shards, first = int(self._num_shards[dataset]), int(self._first_shard[dataset])
        order = hash_order(subkeys(keys, _SHARDS), num_shards)
        sizes = self._shard_size[first : first + num_shards]
        return order, np.cumsum(sizes[order], axis=1)

    def _shard_starts(
        self, dataset: int, number: int, passes: Int64Array, epoch: int
    ) -> Int64Array | int:
        first = int(self._first_shard[dataset])
        size = int(self._shard_size[first + number])
        if not self._shuffles_shards:
            return int(self._shard_end[first + number] - size - self._first_sample[dataset])
        starts = np.empty_like(passes)
        at_once = max(1, _TABLE_CELLS // int(self._num_shards[dataset]))
        for begin in range(0, len(passes), at_once):
            part = slice(begin, begin + at_once)
            order, end = self._tables(dataset, passes[part], epoch)
            row, cell = np.nonzero(order == number)
            starts[part] = end[row, cell] - size
        return starts

    def _by_dataset(self, dataset: Int64Array, members: Int64Array) -> list[Int64Array]:
        """Split indices by the dataset they point to."""
        if len(members) == 0:
            return []
        by = members[np.argsort(dataset[members], kind="stable")]
        return np.split(by, np.flatnonzero(np.diff(dataset[by])) + 1)
