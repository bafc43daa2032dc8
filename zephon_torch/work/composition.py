"""Which dataset stands at which position, and as which rank of its stream.

Cuts positions into pieces (see :mod:`zephon_torch.work.plan`), takes each piece's quotas from the
exact counts at its ends, and spreads them inside the piece. Datasets are numbered 0 .. D-1 among
those that take part.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from zephon_torch.arithmetic.permutation import Int64Array, text_key
from zephon_torch.work.interleave import (
    Pieces,
    balanced_at,
    balanced_labels,
    balanced_offset,
    shuffled_labels,
)
from zephon_torch.work.stopping import Segments

Interleave: TypeAlias = Literal["balanced", "shuffle"]

_CELLS_AT_ONCE = 1 << 21  # quotas (pieces x datasets) held at once
_LABELS_KEPT = 1 << 21  # offsets whose labels are kept for the next call
_MANY_LEAVES = 128  # from here on a path per position is faster than node by node


class Composition:
    """Position <-> (dataset, rank), both ways.

    Pure but for a cache of labels, which makes it unsafe to call from two threads at once.

    Args:
        segments: the stretches of the plan.
        chunk_size: positions in a chunk.
        interleave: "balanced" or "shuffle".
        seed: the plan's seed.
    """

    def __init__(
        self, segments: Segments, *, chunk_size: int, interleave: Interleave, seed: int
    ) -> None:
        self._segments, self._chunk_size, self._interleave = segments, chunk_size, interleave
        self._key = text_key("zephon_torch/interleave/1", str(seed))
        self._num_datasets = segments.before.shape[1]
        self._labels: OrderedDict[int, tuple[Int64Array, Int64Array]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_labels": OrderedDict()}

    def ranks(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Dataset and rank in its stream at each position, int64[n] -> two int64[n]."""
        segment = np.searchsorted(self._segments.start, positions, side="right") - 1
        chunk_start = positions - positions % self._chunk_size
        starts, row = _distinct(np.maximum(chunk_start, self._segments.start[segment]))
        dataset, rank = np.empty_like(positions), np.empty_like(positions)
        for first, last in self._groups(starts):
            members = np.flatnonzero((row >= first) & (row < last))
            dataset[members], rank[members] = self._ranks_in(
                starts[first:last], row[members] - first, positions[members]
            )
        return dataset, rank

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
        segment = int(np.searchsorted(segments.start, starts[0], side="right")) - 1
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

    def _ranks_in(
        self, starts: Int64Array, row: Int64Array, positions: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        pieces, before, live = self._pieces(starts)
        offset = positions - starts[row]
        leaf, rank = np.empty_like(offset), np.empty_like(offset)
        wanted = np.bincount(row, minlength=len(starts))
        whole = self._by_labels(pieces, wanted)
        for r in np.flatnonzero(whole):
            here = slice(None) if len(starts) == 1 else np.flatnonzero(row == r)
            labels = self._labels_of(pieces, int(r))
            leaf[here], rank[here] = (a[offset[here]] for a in labels)
        rest = np.flatnonzero(~whole[row])
        if len(rest):
            leaf[rest], rank[rest] = balanced_at(pieces, self._key, row[rest], offset[rest])
        rank += before[row, leaf]
        return live[leaf], rank

    def _by_labels(self, pieces: Pieces, wanted: Int64Array) -> npt.NDArray[np.bool_]:
        """Which pieces are labelled as a whole: the result is the same, the cost is not."""
        if self._interleave == "shuffle":
            return np.ones(len(wanted), bool)
        few_leaves = 1 < pieces.tree.num_leaves <= _MANY_LEAVES
        most: npt.NDArray[np.bool_] = 3 * wanted > pieces.quotas.sum(axis=1)
        return most & few_leaves

    def _labels_of(self, pieces: Pieces, row: int) -> tuple[Int64Array, Int64Array]:
        start = int(pieces.start[row])
        labels = self._labels.get(start)
        if labels is None:
            make = shuffled_labels if self._interleave == "shuffle" else balanced_labels
            labels = make(pieces, self._key, row)
            while len(self._labels) >= max(2, _LABELS_KEPT // self._chunk_size):
                self._labels.popitem(last=False)
            self._labels[start] = labels
        return labels


def _distinct(starts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Ascending distinct values, and for each element the number of its value."""
    if len(starts) and (starts[0] == starts).all():
        return starts[:1], np.zeros_like(starts)
    values, row = np.unique(starts, return_inverse=True)
    return values, row
