"""Disjoint parts of a dataset (training and validation, say), without lists of numbers.

Where a record goes is computed, in both directions, from the numbers of samples of the shards, of
the parts, and a seed:

- A tree (``arithmetic/apportion.py``) over the sizes of the parts, ordered by their names, says how
  many of the first p samples of the dataset each part gets: exactly its size of all of them, and
  its share within 2 at any p.
- Each shard is cut into blocks of 128 consecutive records, the last one shorter. The tree at the
  ends of a block gives the numbers q_0, q_1 ... of its records that go to each part.
- With key ``k = subkey(split key, shard, block)``, the records of a block are ordered by
  ``(mix(k + i) >> 39, i)``, i their number in it; the first q_0 go to the first part, the next q_1
  to the second. Within a part they stand as in the file.

The split key is ``text_key("zephon_torch/split/1", str(seed), path)`` with `path` the parts of
parts that led here, ``""`` for a whole dataset. So neither the dataset's name nor the place of its
files matter: the same data under another name are split alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from zephon_torch.arithmetic.apportion import SplitTree
from zephon_torch.arithmetic.permutation import (
    Int64Array,
    U,
    UInt64Array,
    mix,
    subkeys,
    text_key,
)
from zephon_torch.errors import ConfigurationError
from zephon_torch.io.datasets.content import Through
from zephon_torch.io.storage.files import StoredFile
from zephon_torch.io.storage.reader import Reader, Samples, check_bounds
from zephon_torch.support import checks

if TYPE_CHECKING:
    from zephon_torch.io.datasets.dataset import Dataset
    from zephon_torch.io.datasets.shards import ShardTable

BLOCK = 128
MAX_SAMPLES = 1 << 46
_TOLERANCE = Fraction(1, 10**9)
_ROWS = 256  # blocks that are ordered at once: their hashes stay in the processor's cache
_ITEMS = np.arange(BLOCK, dtype=np.uint32)
_ITEM_BITS = np.uint32(BLOCK - 1)
_BEHIND = np.uint32((1 << 32) - 1)  # sorts behind all records of a block that is shorter


def sizes_of_parts(name: str, parts: Mapping[str, float], num_samples: int) -> dict[str, int]:
    """How many samples each part gets, by its name in order.

    Args:
        name: The dataset's name, for messages.
        parts: Integers are numbers of samples; else fractions that sum to 1, rounded by largest
            remainder (ties: in the order of names).
        num_samples: Of the whole dataset.

    Raises:
        ConfigurationError: No parts, names or values that cannot be, or another sum.
    """
    if not isinstance(parts, Mapping) or not parts:
        raise ConfigurationError(
            f'parts of dataset {name!r} must be a mapping like {{"train": 0.99, "val": 0.01}}, '
            f"got {parts!r}"
        )
    if num_samples > MAX_SAMPLES:
        raise ConfigurationError(f"dataset {name!r} has {num_samples:,} samples: more than 2**46")
    values = {part: _value(name, part, value) for part, value in parts.items()}
    ordered = {part: values[part] for part in sorted(values)}
    if all(isinstance(value, int) for value in ordered.values()):
        sizes = {part: int(value) for part, value in ordered.items()}
        if (total := sum(sizes.values())) != num_samples:
            raise ConfigurationError(
                f"parts of dataset {name!r} sum to {total:,} samples, but it has {num_samples:,}"
            )
        return sizes
    total_share = sum(map(Fraction, ordered.values()), Fraction())
    if abs(total_share - 1) > _TOLERANCE:
        raise ConfigurationError(
            f"parts of dataset {name!r} sum to {float(total_share):.12g}: fractions must sum to 1, "
            "integers to the number of samples"
        )
    return _largest_remainder(
        {part: Fraction(value) * num_samples / total_share for part, value in ordered.items()}
    )


def _value(dataset: str, part: object, value: Any) -> int | Fraction:
    if not isinstance(part, str) or not part:
        raise ConfigurationError(
            f"the name of a part of dataset {dataset!r} must be a str, not empty, got {part!r}"
        )
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or float(value) < 0:
        raise ConfigurationError(
            f"part {part!r} of dataset {dataset!r} is {value!r}: expected a fraction or a number "
            "of samples"
        )
    return int(value) if isinstance(value, Integral) else Fraction(str(value))


def _largest_remainder(shares: Mapping[str, Fraction]) -> dict[str, int]:
    sizes = {part: math.floor(share) for part, share in shares.items()}
    num_left = int(sum(shares.values(), Fraction())) - sum(sizes.values())
    by_remainder = sorted(shares, key=lambda part: (sizes[part] - shares[part], part))
    for part in by_remainder[:num_left]:
        sizes[part] += 1
    return sizes


@dataclass(frozen=True, slots=True)
class Cut:
    """How a dataset is cut: a pure function from (part, number in it) to the whole dataset.

    Attributes:
        sizes: Number of samples of each part, in the order of their names.
        seed: As the user gave it.
        key: The split key.
        tree: Over the parts that have samples, in this order.
    """

    sizes: Mapping[str, int]
    seed: int
    key: int
    tree: SplitTree

    @classmethod
    def make(cls, sizes: Mapping[str, int], seed: int, path: str) -> Cut:
        """Cut into parts of these sizes; `path` tells a part from the whole."""
        key = text_key("zephon_torch/split/1", str(seed), path)
        return cls(sizes, seed, key, SplitTree([n for n in sizes.values() if n] or [1]))

    def leaf(self, part: str) -> int:
        """Number of a part that has samples in the tree."""
        return [name for name, size in self.sizes.items() if size].index(part)

    def shard_sizes(self, part: str, whole: ShardTable) -> Int64Array:
        """int64[num_shards]: samples of a part in each shard."""
        if not self.sizes[part]:
            return np.zeros(len(whole), np.int64)
        ends = np.concatenate(([0], whole.stops))
        return np.diff(self.tree.counts(ends)[:, self.leaf(part)])

    def records(
        self, part: str, ordinals: Int64Array, shards: Int64Array, whole: ShardTable
    ) -> Int64Array:
        """Where samples of a part stand in their shards; a microsecond for each block in question.

        Args:
            part: One that has samples.
            ordinals: int64[n], their numbers in the part.
            shards: int64[n], their shards.
            whole: Shards of the whole dataset.

        Returns:
            int64[n], record numbers in the shards.
        """
        leaf = self.leaf(part)
        stops = whole.stops[shards]
        starts = stops - whole.num_samples[shards]
        places = self.tree.positions(leaf, ordinals + 1) - 1 - starts
        firsts, where, which = np.unique(
            starts + places // BLOCK * BLOCK, return_index=True, return_inverse=True
        )
        ends = np.minimum(firsts + BLOCK, stops[where])
        counts = self.tree.counts(np.concatenate((firsts, ends)))
        before, quotas = counts[: len(firsts)], counts[len(firsts) :] - counts[: len(firsts)]
        own, lows = quotas[:, leaf], quotas[:, :leaf].sum(axis=1)
        keys = subkeys(np.array([self.key], U), shards[where])
        keys = subkeys(keys, (firsts - starts[where]) // BLOCK)
        members = _members(keys, ends - firsts, lows, lows + own)
        offsets = own.cumsum() - own - before[:, leaf]
        numbers: Int64Array = firsts[which] - starts + members[offsets[which] + ordinals]
        return numbers


def _members(
    keys: UInt64Array, sizes: Int64Array, lows: Int64Array, highs: Int64Array
) -> npt.NDArray[np.uint8]:
    """Of each block the records whose rank by hash is in [low, high), ascending, end to end.

    Args:
        keys: uint64[num_blocks].
        sizes: int64[num_blocks], numbers of records.
        lows: int64[num_blocks].
        highs: int64[num_blocks], each more than its low.
    """
    found = []
    for at in range(0, len(keys), _ROWS):
        part = slice(at, at + _ROWS)
        hashes = (mix(keys[part, None] + _ITEMS) >> U(32)).astype(np.uint32)
        hashes &= ~_ITEM_BITS
        hashes |= _ITEMS
        short = np.flatnonzero(sizes[part] < BLOCK)
        hashes[short] |= np.where(_ITEMS < sizes[part][short, None], np.uint32(0), _BEHIND)
        ordered, rows = np.sort(hashes, axis=1), np.arange(len(hashes))
        first, last = ordered[rows, lows[part]], ordered[rows, highs[part] - 1]
        is_taken = (hashes >= first[:, None]) & (hashes <= last[:, None])
        items = np.broadcast_to(_ITEMS.astype(np.uint8), is_taken.shape)
        found.append(items[is_taken])  # as bytes: at most 128 of them a block
    return np.concatenate(found)


@dataclass(frozen=True, slots=True)
class PartContent:
    """Content of one part: that of the whole dataset, through a `Cut`."""

    whole: Dataset
    part: str
    cut: Cut

    @property
    def version(self) -> str:
        """Parent, seed and sizes, for the fingerprint."""
        return json.dumps([self.whole.fingerprint, self.part, self.cut.seed, dict(self.cut.sizes)])

    @property
    def path(self) -> str:
        """The parts that led here."""
        return json.dumps([_path_of(self.whole), self.part])

    def place(self, dataset: str, path: str, shard: int) -> str:
        """Name a shard as the whole dataset does."""
        return self.whole.shard_path(shard)

    def records(self, shards: ShardTable, numbers: Int64Array, samples: Int64Array) -> Int64Array:
        """Map the samples to the whole dataset, all at once."""
        if not len(samples):
            return samples
        ordinals = shards.stops[numbers] - shards.num_samples[numbers] + samples
        found = self.cut.records(self.part, ordinals, numbers, self.whole.shards)
        return self.whole.records(numbers, found)

    def remote_file(self, shards: ShardTable, shard: int) -> StoredFile | None:
        """Return the file of the whole dataset."""
        return self.whole.remote_file(shard)

    def check_unchanged(self, shards: ShardTable, shard: int) -> None:
        """Look at the file of the whole dataset."""
        self.whole.check_unchanged(shard)

    def open(self, dataset: str, shards: ShardTable, shard: int, through: Through) -> Reader:
        """Open a shard of the whole dataset under the name of the part."""
        return self.whole.content.open(dataset, self.whole.shards, shard, through)


class PartReader:
    """Reads the samples of a part by their numbers in it, through a reader of the whole shard."""

    def __init__(self, part: Dataset, shard: int, reader: Reader) -> None:
        self._part = part
        self._shard = shard
        self._reader = reader

    def read(self, samples: npt.NDArray[np.int64]) -> Samples:
        """Map the numbers and read; see `Reader.read`."""
        samples = np.asarray(samples, dtype=np.int64)
        part, shard = self._part, self._shard
        num_samples = int(part.shard_num_samples[shard])
        check_bounds(samples, num_samples, f"dataset {part.name!r}, shard {part.shard_path(shard)}")
        return self._reader.read(part.records(np.full_like(samples, shard), samples))

    def close(self) -> None:
        """Close the reader of the whole shard."""
        self._reader.close()


def split(whole: Dataset, parts: Mapping[str, float], seed: int) -> dict[str, PartContent]:
    """Contents of the parts, in the order given; see ``Dataset.split``."""
    sizes = sizes_of_parts(whole.name, parts, len(whole))
    cut = Cut.make(sizes, checks.integer("seed", seed), _path_of(whole))
    return {part: PartContent(whole, part, cut) for part in parts}


def _path_of(dataset: Dataset) -> str:
    return dataset.content.path if isinstance(dataset.content, PartContent) else ""
