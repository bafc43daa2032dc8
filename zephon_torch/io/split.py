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

from zephon_torch import checks
from zephon_torch.arithmetic.apportion import SplitTree
from zephon_torch.arithmetic.permutation import (
    Int64Array,
    U,
    UInt64Array,
    mix,
    subkey,
    subkeys,
    text_key,
)
from zephon_torch.errors import ConfigurationError
from zephon_torch.io.formats.reader import Reader, Samples, check_bounds

if TYPE_CHECKING:
    from zephon_torch.io.dataset import Dataset
    from zephon_torch.io.shards import ShardTable

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

    def of_shard(self, part: str, shard: int, whole: ShardTable) -> ShardCut:
        """Return the function for one part (that has samples) and one shard."""
        stop = int(whole.stops[shard])
        key = np.array([subkey(self.key, shard)], U)
        return ShardCut(self.tree, self.leaf(part), stop - int(whole.num_samples[shard]), stop, key)


@dataclass(frozen=True, slots=True)
class ShardCut:
    """Where the samples of one part stand in one shard.

    Attributes:
        tree: As in `Cut`.
        leaf: Number of the part in it.
        start: Number of the shard's first sample in the whole dataset.
        stop: Number behind its last.
        key: uint64[1], of the shard.
    """

    tree: SplitTree
    leaf: int
    start: int
    stop: int
    key: UInt64Array

    def records(self, ordinals: Int64Array) -> Int64Array:
        """Record numbers in the shard, int64[n], of samples by their numbers in the part.

        A microsecond for each block that any of them lies in, and a hundred for the call.
        """
        places = self.tree.positions(self.leaf, ordinals + 1) - (self.start + 1)
        blocks, which = np.unique(places // BLOCK, return_inverse=True)
        firsts = self.start + BLOCK * blocks
        ends = np.minimum(firsts + BLOCK, self.stop)
        counts = self.tree.counts(np.concatenate((firsts, ends)))
        before, quotas = counts[: len(blocks)], counts[len(blocks) :] - counts[: len(blocks)]
        own = quotas[:, self.leaf]
        lows = quotas[:, : self.leaf].sum(axis=1)
        members = _members(subkeys(self.key, blocks), lows, lows + own, int(ends[-1] - firsts[-1]))
        offsets = own.cumsum() - own - before[:, self.leaf]
        numbers: Int64Array = blocks[which] * BLOCK + members[offsets[which] + ordinals]
        return numbers


def _members(keys: UInt64Array, lows: Int64Array, highs: Int64Array, num_last: int) -> Int64Array:
    """Of each block the records whose rank by hash is in [low, high), ascending, end to end.

    Args:
        keys: uint64[num_blocks].
        lows: int64[num_blocks].
        highs: int64[num_blocks], each more than its low.
        num_last: Number of records of the last block; the others are full.
    """
    found = []
    for at in range(0, len(keys), _ROWS):
        part = slice(at, at + _ROWS)
        hashes = (mix(keys[part, None] + _ITEMS) >> U(32)).astype(np.uint32)
        hashes &= ~_ITEM_BITS
        hashes |= _ITEMS
        if at + _ROWS >= len(keys):
            hashes[-1, num_last:] = _BEHIND
        ordered, rows = np.sort(hashes, axis=1), np.arange(len(hashes))
        first, last = ordered[rows, lows[part]], ordered[rows, highs[part] - 1]
        taken = np.flatnonzero((hashes >= first[:, None]) & (hashes <= last[:, None]))
        found.append((taken % BLOCK).astype(np.uint8))  # as bytes: 128 of them a block
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

    def record(self, shards: ShardTable, shard: int, sample: int) -> int:
        """Number of a sample in its file."""
        ordinals = np.array([int(shards.stops[shard] - shards.num_samples[shard]) + sample])
        numbers = self.cut.of_shard(self.part, shard, self.whole.shards).records(ordinals)
        return self.whole.record(shard, int(numbers[0]))

    def open(self, dataset: str, shards: ShardTable, shard: int) -> Reader:
        """Open a shard of the whole dataset under the name of the part."""
        reader = self.whole.content.open(dataset, self.whole.shards, shard)
        num_samples = int(shards.num_samples[shard])
        is_empty = not self.cut.sizes[self.part]
        cut = None if is_empty else self.cut.of_shard(self.part, shard, self.whole.shards)
        first = int(shards.stops[shard]) - num_samples
        place = f"dataset {dataset!r}, shard {self.whole.shard_path(shard)}"
        return PartReader(reader, cut, first, num_samples, place)


class PartReader:
    """Reads the samples of a part through a reader of the whole shard.

    Args:
        reader: Of the whole shard.
        cut: Maps the part's numbers; None for a part without samples.
        first: Number in the part of its first sample in this shard.
        num_samples: Of the part in this shard.
        shard: What messages call the shard.
    """

    def __init__(
        self, reader: Reader, cut: ShardCut | None, first: int, num_samples: int, shard: str
    ) -> None:
        self._reader = reader
        self._cut = cut
        self._first = first
        self._num_samples = num_samples
        self._shard = shard

    def read(self, samples: npt.NDArray[np.int64]) -> Samples:
        """Map the numbers, all at once, and read; see `Reader.read`."""
        numbers = np.asarray(samples, dtype=np.int64)
        check_bounds(numbers, self._num_samples, self._shard)
        if self._cut is not None and len(numbers):
            numbers = self._cut.records(numbers + self._first)
        return self._reader.read(numbers)

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
