"""Which dataset stands at each offset inside a chunk.

The split tree's counts at the two ends of a chunk give every dataset an exact quota; here the
quotas are spread over the chunk. A *piece* is what is spread: a chunk, or the part of a chunk
before the end of the plan or between two departures of ``exhausted_policy="redistribute"``. A piece
knows its chunk number k, its first position and its quotas. Samples of one dataset keep their
order.

``balanced``
    The same tree over the quotas: a node with quota Q, whose heavy child has quota q, has passed

        heavy(n) = floor((n * q + phase) / Q)

    of its first n items on to it. The phase belongs to the node and moves from chunk to chunk by a
    Weyl step, so that chunks that are consumed side by side (lanes) do not show one dataset at one
    offset all at once: with ``fraction = alpha[depth] * k + subkey(key, node)`` modulo 2**64,
    ``phase = (fraction >> 32) * Q >> 32``. The root has depth 0; alpha[d] is the fractional part of
    the square root of the (d + 1)-th prime (2, 3, 5, ...), cut to 64 bits; from depth 63 on it is
    that of the 64th prime, 311. ``key`` is ``text_key("zephon_torch/interleave/1", str(seed))``.
``shuffle``
    Offset o takes the label at place ``permute(o, n, subkey(key, first position))`` of the n labels
    of the piece sorted by dataset: a uniform shuffle with exact quotas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from zephon_torch.work.apportion import SplitTree
from zephon_torch.work.permutation import Int64Array, U, UInt64Array, permute, subkeys

_PRIMES = [p for p in range(2, 312) if all(p % q for q in range(2, math.isqrt(p) + 1))]
_ALPHA = np.array([math.isqrt(p << 128) & ((1 << 64) - 1) for p in _PRIMES], U)


@dataclass(frozen=True, slots=True)
class Pieces:
    """P pieces of one split tree.

    Attributes:
        chunk: int64[P], chunk number of each piece.
        start: int64[P], first position of each piece.
        quotas: int64[P, D], items of each leaf in each piece.
    """

    tree: SplitTree
    chunk: Int64Array
    start: Int64Array
    quotas: Int64Array


def balanced_at(
    pieces: Pieces, key: int, row: Int64Array, offset: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Leaf at each (piece, offset), and its rank among the piece's items of that leaf.

    Args:
        row: int64[m], which of the pieces.
        offset: int64[m], in [0, quota of the piece).

    Returns:
        (leaf, rank), int64[m] each. Pure; one path down the tree per element.
    """
    tree = pieces.tree
    if tree.num_leaves == 1:
        return np.zeros_like(offset), offset
    quota, phase = _node_tables(pieces, key)
    heavy_quota = quota[:, tree.heavy].ravel()
    quota, phase = quota.ravel(), phase.ravel()
    leaf, rank = np.empty_like(offset), np.empty_like(offset)
    num_nodes, place = tree.root + 1, np.arange(len(offset))
    base, node, n = row * num_nodes, np.full_like(offset, tree.root), offset
    while len(place):
        cell = base + node
        whole, part = quota[cell], heavy_quota[cell]
        scaled = n * part + phase[cell]
        passed = scaled // whole
        to_heavy = scaled - passed * whole >= whole - part  # one more item makes one more heavy
        n = np.where(to_heavy, passed, n - passed)
        node = np.where(to_heavy, tree.heavy[node], tree.light[node])
        at_leaf = node < tree.num_leaves
        done = place[at_leaf]
        leaf[done], rank[done] = node[at_leaf], n[at_leaf]
        inner = ~at_leaf
        place, base, node, n = place[inner], base[inner], node[inner], n[inner]
    return leaf, rank


def balanced_labels(pieces: Pieces, key: int, row: int) -> tuple[Int64Array, Int64Array]:
    """Leaf and rank at every offset of one piece, as :func:`balanced_at` gives them.

    Node by node, computing only the places of the child with the smaller quota: several times
    faster than a path per element where there are few leaves. Two int64[n].
    """
    tree = pieces.tree
    one = Pieces(tree, *(a[row : row + 1] for a in (pieces.chunk, pieces.start, pieces.quotas)))
    quotas, phases = (table[0].tolist() for table in _node_tables(one, key))
    numbers = np.arange(quotas[tree.root] + 1)
    leaf, rank = np.empty(len(numbers) - 1, np.int64), np.empty(len(numbers) - 1, np.int64)
    todo = [(tree.root, numbers[:-1])]
    while todo:
        node, offsets = todo.pop()
        if node < tree.num_leaves:
            leaf[offsets], rank[offsets] = node, numbers[: len(offsets)]
            continue
        heavy, light = int(tree.heavy[node]), int(tree.light[node])
        few, many, shift = light, heavy, quotas[node] - 1 - phases[node]
        if quotas[heavy] < quotas[light]:
            few, many, shift = heavy, light, phases[node]
        if quotas[few] == 0:
            todo.append((many, offsets))
            continue
        places = _places(numbers[1 : quotas[few] + 1], quotas[node], quotas[few], shift)
        rest = np.ones(len(offsets), bool)
        rest[places] = False
        todo += [(few, offsets[places]), (many, offsets[rest])]
    return leaf, rank


def _places(numbers: Int64Array, whole: int, part: int, shift: int) -> Int64Array:
    """Index, among the items of a node, of the first, second ... item of one child."""
    return (numbers * whole + (part - 1 - shift)) // part - 1


def balanced_offset(
    pieces: Pieces, key: int, row: Int64Array, leaf: int, rank: Int64Array
) -> Int64Array:
    """Inverse of :func:`balanced_at` for one leaf: int64[m] offsets of its rank-th items."""
    tree = pieces.tree
    if tree.num_leaves == 1:
        return rank
    quota, phase = _node_tables(pieces, key)
    node, n = leaf, rank
    while node != tree.root:
        above = tree.parent[node]
        whole, part, shift = quota[row, above], quota[row, node], phase[row, above]
        if tree.heavy[above] != node:
            shift = whole - 1 - shift
        n = -((shift - (n + 1) * whole) // part) - 1
        node = above
    return n


def shuffled_labels(pieces: Pieces, key: int, row: int) -> tuple[Int64Array, Int64Array]:
    """Leaf and rank at every offset of one piece: two int64[n]. Pure, O(n log n)."""
    quotas = pieces.quotas[row]
    length = int(quotas.sum())
    keys = subkeys(np.array([key], U), pieces.start[row : row + 1])
    slot = permute(np.arange(length), np.array([length]), keys)
    leaf = np.repeat(np.arange(len(quotas)), quotas)[slot]
    by_leaf = np.argsort(leaf, kind="stable")
    rank = np.empty(length, np.int64)
    rank[by_leaf] = np.arange(length) - np.repeat(np.cumsum(quotas) - quotas, quotas)
    return leaf, rank


def _node_tables(pieces: Pieces, key: int) -> tuple[Int64Array, Int64Array]:
    """Quota and phase of every node in every piece, int64[P, nodes] each."""
    tree = pieces.tree
    quota = np.zeros((len(pieces.chunk), tree.root + 1), np.int64)
    quota[:, : tree.num_leaves] = pieces.quotas
    for nodes in reversed(tree.levels):
        quota[:, nodes] = quota[:, tree.heavy[nodes]] + quota[:, tree.light[nodes]]
    fraction = _weyl(tree, key, pieces.chunk)
    phase = ((fraction >> U(32)) * quota.astype(U)) >> U(32)
    return quota, phase.astype(np.int64)


def _weyl(tree: SplitTree, key: int, chunk: Int64Array) -> UInt64Array:
    step = _ALPHA[np.minimum(tree.depth, len(_ALPHA) - 1)]
    start = subkeys(np.array([key], U), np.arange(tree.root + 1))
    return step * chunk.astype(U)[:, None] + start
