"""Which dataset stands at which position, and as which rank of its stream.

Cuts positions into pieces (see :mod:`zephon_torch.work.plan.plan`), takes each piece's quotas from
the exact counts at its ends, and spreads them inside the piece. Datasets are numbered 0 .. D-1
among those that take part.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import numpy as np

from zephon_torch.arithmetic.permutation import text_key
from zephon_torch.arithmetic.runs import Int64Array, lengths_of, runs_of
from zephon_torch.errors import ConfigurationError
from zephon_torch.work.order.interleave import (
    Pieces,
    balanced_at,
    balanced_offset,
    by_leaf,
    shuffled_labels,
)
from zephon_torch.work.order.segments import Segments

Interleave: TypeAlias = Literal["balanced", "shuffle"]

_CELLS_AT_ONCE = 1 << 21  # quotas (pieces x datasets) held at once
_LABELS_KEPT = 1 << 21  # offsets whose labels are kept for the next call
_MOST_LABELS = 1 << 26
"""Most positions whose labels are made at once: 16 bytes each, 1 GiB, and two chunks are kept."""


class Composition:
    """Position <-> (dataset, rank), both ways.

    Pure but for a cache of labels, which makes it unsafe to call from two threads at once.

    Args:
        segments: the stretches of the plan.
        chunk_size: positions in a chunk.
        interleave: "balanced" or "shuffle".
        seed: the plan's seed.

    Raises:
        ConfigurationError: chunks too large to be shuffled.
    """

    def __init__(
        self, segments: Segments, *, chunk_size: int, interleave: Interleave, seed: int
    ) -> None:
        self._segments, self._chunk_size, self._interleave = segments, chunk_size, interleave
        self._key = text_key("zephon_torch/interleave/1", str(seed))
        self._num_datasets = segments.before.shape[1]
        self._labels: OrderedDict[int, tuple[Int64Array, Int64Array]] = OrderedDict()
        if interleave == "shuffle":
            self._check_shuffled()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_labels": OrderedDict()}

    def _check_shuffled(self) -> None:
        """Refuse chunks whose labels, which are made as a whole, would take too much memory."""
        length = self._segments.length
        most = self._chunk_size if length is None else min(self._chunk_size, length)
        alternates = any(len(mixture.live) > 1 for mixture in self._segments.mixtures)
        if alternates and most > _MOST_LABELS:
            raise ConfigurationError(
                f'interleave="shuffle" shuffles a chunk as a whole: chunks of {most:,} positions '
                f"(chunk_size={self._chunk_size:,}) are above the limit of {_MOST_LABELS:,}, which "
                'take 1 GiB. Give a smaller chunk_size, or interleave="balanced"'
            )

    def ranks(self, positions: Int64Array) -> tuple[Int64Array | slice, Int64Array, Int64Array]:
        """Dataset and rank in its stream at each position, int64[n].

        Returns:
            (place, dataset, rank): the dataset and rank of ``positions[place]``. Mostly dataset by
            dataset and ascending in each, which makes what follows cheap.
        """
        if not len(positions):
            return slice(None), positions, positions
        piece, starts = self._pieces_of(positions)
        order = _ascending(piece)
        if order is not None:
            piece, starts, positions = piece[order], starts[order], positions[order]
        if self._num_datasets == 1:
            place = slice(None) if order is None else order
            return place, np.zeros_like(positions), positions
        begins = runs_of(piece)
        starts, lengths = starts[begins], lengths_of(begins, len(piece))
        found = []
        for first, last in self._groups(starts):
            row = np.repeat(np.arange(last - first), lengths[first:last])
            begin = int(begins[first])
            offset = positions[begin : begin + len(row)] - starts[first:last].take(row)
            place, dataset, rank = self._ranks_in(starts[first:last], row, offset)
            found.append((place + begin, dataset, rank))
        place, dataset, rank = (
            arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
            for arrays in zip(*found, strict=True)
        )
        return place if order is None else order[place], dataset, rank

    def drawn(self, dataset: int, stop: int) -> int:
        """An upper bound of the samples of a dataset that stand before `stop`.

        The order inside a chunk may draw a sample ahead of its place in the tree, so this counts to
        the end of the chunk.
        """
        horizon = -(-stop // self._chunk_size) * self._chunk_size
        if self._segments.length is not None:
            horizon = min(horizon, self._segments.length)
        return int(self._segments.counts(horizon)[dataset])

    def position(self, dataset: int, rank: int) -> int:
        """Position of one rank of a dataset's stream: up the tree to the piece, then inside it."""
        segment, near = self._segments.position(dataset, rank + 1)
        start = max(near - near % self._chunk_size, int(self._segments.start[segment]))
        pieces, before, live = self._pieces(np.array([start]))
        leaf = int(np.searchsorted(live, dataset))
        inside = rank - int(before[0, leaf])
        if len(live) == 1:
            return start + inside
        if self._interleave == "shuffle":
            labels, ranks = self._labels_of(pieces, 0)
            return start + int(np.flatnonzero((labels == leaf) & (ranks == inside))[0])
        row, wanted = np.zeros(1, np.int64), np.array([inside])
        return start + int(balanced_offset(pieces, self._key, row, leaf, wanted)[0])

    def _groups(self, starts: Int64Array) -> Iterator[tuple[int, int]]:
        """Runs of pieces (ascending) of one segment, small enough to hold their quotas at once."""
        at_once = max(1, _CELLS_AT_ONCE // self._num_datasets)
        segment = np.searchsorted(self._segments.start, starts, side="right")
        edges = [0, *(np.flatnonzero(np.diff(segment)) + 1).tolist(), len(starts)]
        for begin, end in itertools.pairwise(edges):
            for first in range(begin, end, at_once):
                yield first, min(first + at_once, end)

    def _pieces(self, starts: Int64Array) -> tuple[Pieces, Int64Array, Int64Array]:
        """Pieces that begin at `starts` (one segment), the counts before them, their datasets."""
        segments = self._segments
        segment = segments.at(int(starts[0]))
        tree, live, origin = segments.tree(segment), segments.live(segment), segments.start[segment]
        chunk = starts // self._chunk_size
        stops = (chunk + 1) * self._chunk_size
        if segment + 1 < len(segments.start):
            stops = np.minimum(stops, segments.start[segment + 1])
        if self._segments.length is not None:
            stops = np.minimum(stops, self._segments.length)
        counts = tree.counts(np.concatenate([starts, stops]) - origin)
        begin, end = counts[: len(starts)], counts[len(starts) :]
        return (
            Pieces(tree, chunk, starts, end - begin),
            begin + segments.before[segment, live],
            live,
        )

    def _pieces_of(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Number and start of the piece of each position; pieces are numbered in their order."""
        chunk = positions // self._chunk_size
        starts = chunk * self._chunk_size
        if len(self._segments.start) == 1:
            return chunk, starts
        segment = np.searchsorted(self._segments.start, positions, side="right") - 1
        return chunk + segment, np.maximum(starts, self._segments.start[segment])

    def _ranks_in(
        self, starts: Int64Array, row: Int64Array, offset: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        pieces, before, live = self._pieces(starts)
        if self._interleave == "shuffle" and len(live) > 1:
            place, leaf, rank = self._shuffled_at(pieces, row, offset)
        else:
            place, leaf, rank = balanced_at(pieces, self._key, row, offset)
        rank += before.ravel().take(row.take(place) * len(live) + leaf)
        return place, live.take(leaf), rank

    def _shuffled_at(
        self, pieces: Pieces, row: Int64Array, offset: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        leaf, rank = np.empty_like(offset), np.empty_like(offset)
        for r in range(len(pieces.start)):
            here = slice(*np.searchsorted(row, [r, r + 1]))
            leaf[here], rank[here] = (a[offset[here]] for a in self._labels_of(pieces, r))
        return by_leaf(leaf, rank, pieces.tree.num_leaves)

    def _labels_of(self, pieces: Pieces, row: int) -> tuple[Int64Array, Int64Array]:
        start = int(pieces.start[row])
        labels = self._labels.get(start)
        if labels is None:
            labels = shuffled_labels(pieces, self._key, row)
            while len(self._labels) >= max(2, _LABELS_KEPT // self._chunk_size):
                self._labels.popitem(last=False)
            self._labels[start] = labels
        return labels


def _ascending(numbers: Int64Array) -> Int64Array | None:
    """Indices that sort numbers, equal ones in the order given; None where they are sorted."""
    if not (numbers[1:] < numbers[:-1]).any():
        return None
    numbers = numbers - numbers.min()
    # 16 bits are sorted by radix, several times faster
    return np.argsort(
        numbers.astype(np.uint16) if numbers.max() < 1 << 16 else numbers, kind="stable"
    )
