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

from zephon_torch.arithmetic.permutation import (
    MAX_N,
    U,
    UInt64Array,
    hash_order,
    permute,
    subkeys,
    text_key,
    unpermute,
)
from zephon_torch.arithmetic.runs import Int64Array, lengths_of, runs_of, spread
from zephon_torch.errors import ConfigurationError
from zephon_torch.support import checks
from zephon_torch.work.order.shard_tables import ShardTables

_Permutation: TypeAlias = Callable[
    [Int64Array, Int64Array, UInt64Array, "Int64Array | None"], Int64Array
]
BlockSize: TypeAlias = int | Literal["auto", "global"] | None

_SHARDS, _WITHIN, _BLOCK, _GLOBAL = (np.array([purpose]) for purpose in range(4))
_TABLE_CELLS = 1 << 20  # most cells of shard orders made at once


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
        num_shards: int64[D], shards in each dataset that are not empty.
        is_permuted: bool[D], whether a pass has any other order than that of the files.
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
        self.num_shards: Int64Array = np.array([len(ids) for ids in present])
        self._first_shard = np.cumsum(self.num_shards) - self.num_shards
        self._shard_end = np.cumsum(self._shard_size)
        self.size: Int64Array = np.add.reduceat(self._shard_size, self._first_shard)
        self._first_sample = np.cumsum(self.size) - self.size
        self._block = self.block_sizes(levels.block_size)
        self.is_permuted = self._are_permuted()
        self._shuffles_shards = levels.shards and levels.block_size != "global"
        self._tables = ShardTables(
            self.num_shards,
            self._shard_size,
            self._shard_orders if self._shuffles_shards else None,
            self._reshuffle & self._shuffles_shards,
        )

    def block_sizes(self, block_size: BlockSize) -> Int64Array | None:
        """Samples in a window of each dataset, int64[D]; None for options without windows."""
        if block_size is None or block_size == "global":
            return None
        largest: Int64Array = np.maximum.reduceat(self._shard_size, self._first_shard)
        wanted = 8 * largest if block_size == "auto" else np.full_like(largest, block_size)
        block: Int64Array = np.minimum(wanted, self.size)
        return block

    def varies(self, dataset: int) -> bool:
        """Whether two passes of a dataset can differ in order."""
        return bool(self._reshuffle[dataset] and self.is_permuted[dataset])

    def _are_permuted(self) -> npt.NDArray[np.bool_]:
        levels = self._levels
        if levels.block_size == "global":
            return self.size > 1
        if self._block is not None:
            inside = self._block > 1
        else:
            inside = levels.within_shard & (self.size > self.num_shards)
        return inside | (levels.shards & (self.num_shards > 1))

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
        if not len(rank):
            return rank, rank, rank
        starts = runs_of(dataset)
        size = self.size[dataset[starts]]
        pass_index = rank // spread(size, lengths_of(starts, len(rank)))
        starts = runs_of(pass_index, starts)
        lengths = lengths_of(starts, len(rank))
        # from here on, one of each for a run of one dataset and pass
        dataset, passes = dataset[starts], pass_index[starts]
        size, levels = self.size[dataset], self._levels
        offset = rank - spread(passes * size, lengths)
        keys = self._pass_keys(dataset, passes, epoch)
        if levels.block_size == "global":
            offset = permute(offset, size, subkeys(keys, _GLOBAL), lengths)
        elif self._block is not None:
            offset = self._in_block(dataset, offset, keys, starts, permute)
        flat, sample = self._tables.find(dataset, passes, epoch, offset, lengths)
        if levels.within_shard and levels.block_size is None:
            sample = self._in_shard(dataset, flat, sample, keys, starts)
        return pass_index, self._shard_id.take(flat), sample

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
        if not len(passes):
            return passes
        which = np.full_like(passes, dataset)
        keys = self._pass_keys(which, passes, epoch)
        first, levels = int(self._first_shard[dataset]), self._levels
        shard_ids = self._shard_id[first : first + int(self.num_shards[dataset])]
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
            offset = self._in_block(which, offset, keys, np.arange(len(passes)), unpermute)
        ranks: Int64Array = passes * self.size[dataset] + offset
        return ranks

    def _pass_keys(self, dataset: Int64Array, pass_index: Int64Array, epoch: int) -> UInt64Array:
        reshuffle = self._reshuffle[dataset]
        return subkeys(subkeys(self._key[dataset], reshuffle * epoch), pass_index * reshuffle)

    def _in_block(
        self,
        dataset: Int64Array,
        offset: Int64Array,
        keys: UInt64Array,
        starts: Int64Array,
        mapping: _Permutation,
    ) -> Int64Array:
        """Offsets mapped inside their windows; `dataset` and `keys` are those of runs."""
        assert self._block is not None
        index = offset // spread(self._block[dataset], lengths_of(starts, len(offset)))
        windows, run, lengths = _cut(index, starts)
        block, index = self._block[dataset[run]], index[windows]
        start = index * block
        length = np.minimum(block, self.size[dataset[run]] - start)
        window_keys = subkeys(subkeys(keys[run], _BLOCK), index)
        first = spread(start, lengths)
        mapped: Int64Array = mapping(offset - first, length, window_keys, lengths)
        mapped += first
        return mapped

    def _in_shard(
        self,
        dataset: Int64Array,
        flat: Int64Array,
        sample: Int64Array,
        keys: UInt64Array,
        starts: Int64Array,
    ) -> Int64Array:
        """Samples permuted inside their shards; `dataset` and `keys` are those of runs."""
        shards, run, lengths = _cut(flat, starts)
        number = flat[shards] - self._first_shard[dataset[run]]
        within = subkeys(subkeys(keys[run], _WITHIN), number)
        return permute(sample, self._shard_size[flat[shards]], within, lengths)

    def _shard_orders(self, dataset: Int64Array, passes: Int64Array, epoch: int) -> Int64Array:
        """Shard numbers in the order of each (dataset, pass); see :func:`hash_order`."""
        keys = self._pass_keys(dataset, passes, epoch)
        return hash_order(subkeys(keys, _SHARDS), self.num_shards[dataset])

    def _shard_starts(
        self, dataset: int, number: int, passes: Int64Array, epoch: int
    ) -> Int64Array | int:
        first = int(self._first_shard[dataset])
        size = int(self._shard_size[first + number])
        if not self._shuffles_shards:
            return int(self._shard_end[first + number] - size - self._first_sample[dataset])
        starts = np.empty_like(passes)
        sizes = self._shard_size[first : first + int(self.num_shards[dataset])]
        at_once = max(1, _TABLE_CELLS // len(sizes))
        for begin in range(0, len(passes), at_once):
            part = slice(begin, begin + at_once)
            order = self._shard_orders(np.full_like(passes[part], dataset), passes[part], epoch)
            row, cell = np.nonzero(order == number)
            starts[part] = np.cumsum(sizes[order], axis=1)[row, cell] - size
        return starts


def _cut(values: Int64Array, starts: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Cut runs further, where `values` change: starts, number of the run each is of, lengths."""
    parts = runs_of(values, starts)
    run = np.searchsorted(starts, parts, side="right") - 1
    return parts, run, lengths_of(parts, len(values))
