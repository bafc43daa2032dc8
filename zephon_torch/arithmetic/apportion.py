"""How many of the first p positions belong to each dataset: the split tree.

A binary tree over the datasets, Huffman-shaped: of the list of subtrees ordered by (weight, age),
the two first are joined again and again, the second becoming the *heavy* (left) child; leaves are
aged by their place in the list of weights, joined trees come after in the order they were made. A
node of weight W that holds n items gives its heavy child, of weight w,

    heavy(n) = floor((n * w + floor(W / 2)) / W)

and the other child the rest. So n_i(p), the number of items of dataset i among the first p, is one
walk down; the dataset of one position is one path down, the position of a dataset's m-th item one
path up. Everything is integer arithmetic and nothing is replayed.

**Bound.** A child's error is its rounding (<= 1/2) plus its share of its parent's. In a Huffman
tree two consecutive ratios multiply to at most 1/2, so |n_i(p) - w_i p| < 2 for every number of
datasets, every p and all weights. Each step of p adds exactly one item to exactly one leaf.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from zephon_torch.arithmetic.permutation import Int64Array

MAX_POSITION = 1 << 56
"""Positions must stay below: the division in :func:`_scaled` is exact up to here."""

_FEW = 200  # products of leaves and prefixes up to which plain integers are faster
_Int64s: TypeAlias = Int64Array | np.int64


class SplitTree:
    """Exact apportionment over integer weights.

    Nodes are numbered: leaves 0 .. D-1 in the order of `weights`, joined nodes D .. 2D-2 in the
    order they are made, the root last. A child's number is smaller than its parent's.

    Args:
        weights: D positive integers with a sum of at most 2**46.

    Attributes:
        weight: int64[2D-1], weight of each node.
        heavy, light: int64[2D-1], children of each joined node (-1 for leaves).
        parent: list of 2D-1 ints (-1 for the root).
        rate: int64[2D-1], share of the heavy child of each joined node in units of 2**-32, rounded
            (0 for leaves).
        depth: int64[2D-1], distance from the root.
        levels: the joined nodes from the root down, one array per depth.
        walk: int64[D], the leaves from left to right, heavy children being on the left.
        first, last: int64[2D-1], the leaves below each node are ``walk[first:last]``.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        self.num_leaves = len(weights)
        weight, heavy, light, parent = _huffman(weights)
        self.root = len(weight) - 1
        self.parent = parent
        self.weight = np.array(weight, np.int64)
        self.heavy, self.light = np.array(heavy, np.int64), np.array(light, np.int64)
        self.depth, self.levels = _levels(self.heavy, self.light, self.num_leaves, self.root)
        self.rate = np.zeros(self.root + 1, np.int64)
        joined = np.arange(self.num_leaves, self.root + 1)
        if len(joined):
            unit = np.full_like(joined, 1 << 32)
            whole = self.weight[joined]
            self.rate[joined] = _scaled(unit, self.weight[self.heavy[joined]], whole, whole >> 1)
        self.walk, self.first, self.last = self._walk()
        self._joined = [
            (h, s, weight[h], weight[h] + weight[s])
            for h, s in zip(heavy[self.num_leaves :], light[self.num_leaves :], strict=True)
        ]
        # what one level of counts() needs, gathered once
        self._level_weights = [
            (nodes, self.heavy[nodes], self.light[nodes],
             self.weight[self.heavy[nodes], None], self.weight[nodes, None],
             self.weight[nodes, None] >> 1)
            for nodes in self.levels
        ]  # fmt: skip

    def counts(self, prefixes: Int64Array) -> Int64Array:
        """n_i(p) for each prefix length.

        Args:
            prefixes: int64[m], each in [0, 2**56).

        Returns:
            int64[m, D]; each row sums to its prefix length. Pure, O(m D).
        """
        if len(prefixes) * self.num_leaves <= _FEW:
            rows = [self._counts(p) for p in prefixes.tolist()]
            return np.array(rows, np.int64).reshape(len(rows), self.num_leaves)
        held = np.zeros((self.root + 1, len(prefixes)), np.int64)
        held[self.root] = prefixes
        for nodes, heavy, light, part, whole, half in self._level_weights:
            n = held[nodes]
            given = _scaled(n, part, whole, half)
            held[heavy] = given
            held[light] = n - given
        return np.ascontiguousarray(held[: self.num_leaves].T)

    def _counts(self, prefix: int) -> list[int]:
        """:meth:`counts` of one prefix, in plain integers: much faster where nodes are few."""
        held = [0] * self.root + [prefix]
        for node in range(self.root, self.num_leaves - 1, -1):
            heavy, light, part, whole = self._joined[node - self.num_leaves]
            held[heavy] = (held[node] * part + (whole >> 1)) // whole
            held[light] = held[node] - held[heavy]
        return held[: self.num_leaves]

    def _walk(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        leaves = np.ones(self.root + 1, np.int64)
        for nodes in reversed(self.levels):
            leaves[nodes] = leaves[self.heavy[nodes]] + leaves[self.light[nodes]]
        first = np.zeros_like(leaves)
        for nodes in self.levels:
            first[self.heavy[nodes]] = first[nodes]
            first[self.light[nodes]] = first[nodes] + leaves[self.heavy[nodes]]
        return np.argsort(first[: self.num_leaves]), first, first + leaves

    def position(self, leaf: int, m: int) -> int:
        """Smallest p with n_leaf(p) >= m; 0 for m <= 0. Any size of integer."""
        node = leaf
        while m > 0 and node != self.root:
            above = self.parent[node]
            whole, part = int(self.weight[above]), int(self.weight[node])
            phase = whole // 2 if self.heavy[above] == node else whole - 1 - whole // 2
            m = -((phase - m * whole) // part)
            node = above
        return max(m, 0)

    def positions(self, leaf: int, m: Int64Array) -> Int64Array:
        """:meth:`position` of many m >= 1 that the results show to be below 2**56, int64[k]."""
        node = leaf
        while node != self.root:
            above = self.parent[node]
            whole, part = self.weight[above], self.weight[node]
            phase = whole // 2 if self.heavy[above] == node else whole - 1 - whole // 2
            m = _scaled(m, whole, part, part - 1 - phase)
            node = above
        return m


def _huffman(weights: Sequence[int]) -> tuple[list[int], list[int], list[int], list[int]]:
    num_leaves = len(weights)
    weight = list(weights)
    heavy, light = [-1] * num_leaves, [-1] * num_leaves
    parent = [-1] * (2 * num_leaves - 1)
    heap = [(w, i) for i, w in enumerate(weight)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first = heapq.heappop(heap)
        _, second = heapq.heappop(heap)
        joined = len(weight)
        weight.append(weight[first] + weight[second])
        light.append(first)
        heavy.append(second)
        parent[first] = parent[second] = joined
        heapq.heappush(heap, (weight[joined], joined))
    return weight, heavy, light, parent


def _levels(
    heavy: Int64Array, light: Int64Array, num_leaves: int, root: int
) -> tuple[Int64Array, list[Int64Array]]:
    depth = np.zeros(root + 1, np.int64)
    levels = []
    nodes = np.array([root] if num_leaves > 1 else [], np.int64)
    while len(nodes):
        levels.append(nodes)
        children = np.concatenate([heavy[nodes], light[nodes]])
        depth[children] = len(levels)
        nodes = children[children >= num_leaves]
    return depth, levels


def _scaled(n: Int64Array, times: _Int64s, over: _Int64s, plus: _Int64s) -> Int64Array:
    """floor((n * times + plus) / over) of numbers >= 0.

    Exact for n and the result < 2**56, `times` and `over` <= 2**46, and -2**46 < `plus` < 2**46.

    A float estimate of n * times / over is off by less than 2**5, so what it leaves of the sum is
    below 2**52, and comes out right although the products wrap around at 2**64. Dividing that by
    `over` mends the estimate, whatever its rounding was.
    """
    estimate: Int64Array = (n * (times / over)).astype(np.int64)
    left = n * times
    left -= estimate * over
    left += plus
    left //= over
    estimate += left
    return estimate
