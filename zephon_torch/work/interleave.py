"""Which dataset stands at each offset inside a chunk.

The split tree's counts at the two ends of a chunk give every dataset an exact quota; here the
quotas are spread over the chunk. A *piece* is what is spread: a chunk, or the part of a chunk
before the end of the plan or between two departures of ``exhausted_policy="redistribute"``. A piece
knows its chunk number k, its first position and its quotas. Samples of one dataset keep their
order. ``key`` is ``text_key("zephon_torch/interleave/1", str(seed))``.

``balanced``
    The tree again, item by item. Each node sends its items to its two children at the rate of its
    weights, from a phase of its own that moves from chunk to chunk by a Weyl step: chunks that are
    consumed side by side (lanes) must not show one dataset at one offset all at once. One item may
    be flipped to the other child to meet the quotas. For a node of weight W, whose heavy child has
    weight w, so ``rate = (2**32 * w + W // 2) // W``, and whose quota is Q, q of it for that child:

    - ``fraction = alpha[depth] * k + subkey(key, node)`` modulo 2**64, where alpha[d] is the
      fractional part of the square root of the (d + 1)-th prime (2, 3, 5, ...), cut to 64 bits, and
      from depth 63 on that of the 64th prime, 311; the root has depth 0;
    - ``phase = Q + ((fraction >> 32) * (2**32 - 2 * Q) >> 32)``;
    - before its n-th item (counted from 0), ``heavy(n) = (n * rate + phase) >> 32`` items have gone
      to the heavy child; item n goes there if ``heavy(n + 1) > heavy(n)``;
    - heavy(Q) is q, or one less, or one more. If it is one less, one of the ``a = Q - heavy(Q)``
      items that went to the light child goes to the heavy one instead; if it is one more, one of
      the ``a = heavy(Q)`` the other way. It is one of the last sixteenth of these: the m-th of them
      (counted from 0), ``m = a - 1 - ((mix(fraction) >> 32) * ceil(a / 16) >> 32)``.

    So each node keeps its rate through nearly all of the chunk, and what the phases have spread
    over the lanes stays spread. (Scaling the rate to the quota, or flipping anywhere in the chunk,
    lets lanes bunch up again towards its middle or its end, with the rounding of the quotas.)
``shuffle``
    Offset o takes the label at place ``permute(o, n, subkey(key, first position))`` of the n labels
    of the piece sorted by dataset: a uniform shuffle with exact quotas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from zephon_torch.arithmetic.apportion import SplitTree
from zephon_torch.arithmetic.permutation import Int64Array, U, UInt64Array, mix, permute, subkeys

_PRIMES = [p for p in range(2, 312) if all(p % q for q in range(2, math.isqrt(p) + 1))]
_ALPHA = np.array([math.isqrt(p << 128) & ((1 << 64) - 1) for p in _PRIMES], U)
_ONE = 1 << 32
_S32 = U(32)
_LATE_PART = 16  # a flipped item is one of the last 1/16: late enough, and not all at one offset


@dataclass(frozen=True, slots=True)
class Pieces:
    """P pieces of one split tree.

    Attributes:
        chunk: int64[P], chunk number of each piece.
        start: int64[P], first position of each piece.
        quotas: int64[P, D], items of each leaf in each piece: differences of the tree's counts.
    """

    tree: SplitTree
    chunk: Int64Array
    start: Int64Array
    quotas: Int64Array


@dataclass(frozen=True, slots=True)
class _Spread:
    """How each node spreads its items, int64[P, nodes]; for leaves only the quota means anything.

    Attributes:
        quota: items.
        phase: of the heavy child, in units of 2**-32.
        more: items that the quota wants beyond the rate, -1, 0 or 1.
        flipped: number of the item that goes to the other child, -1 where there is none.
    """

    quota: Int64Array
    phase: Int64Array
    more: Int64Array
    flipped: Int64Array


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
    spread = _spread(pieces, key)
    phases, mores, flips = (a.ravel() for a in (spread.phase, spread.more, spread.flipped))
    leaf, rank = np.empty_like(offset), np.empty_like(offset)
    place, base = np.arange(len(offset)), row * (tree.root + 1)
    node, n = np.full_like(offset, tree.root), offset
    while len(place):
        cell, rate = base + node, tree.rate[node]
        scaled, flipped = n * rate + phases[cell], flips[cell]
        to_heavy = ((scaled & (_ONE - 1)) >= _ONE - rate) ^ (n == flipped)
        passed = (scaled >> 32) + mores[cell] * (n > flipped)
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

    Node by node: several times faster than a path per element where there are few leaves. Two
    int64[n].
    """
    tree = pieces.tree
    one = Pieces(tree, *(a[row : row + 1] for a in (pieces.chunk, pieces.start, pieces.quotas)))
    spread = _spread(one, key)
    phases, flips = spread.phase[0].tolist(), spread.flipped[0].tolist()
    numbers = np.arange(int(spread.quota[0, tree.root]))
    leaf, rank = np.empty_like(numbers), np.empty_like(numbers)
    todo = [(tree.root, numbers)]
    while todo:
        node, offsets = todo.pop()
        if node < tree.num_leaves:
            leaf[offsets], rank[offsets] = node, numbers[: len(offsets)]
            continue
        rate = int(tree.rate[node])
        to_heavy = (numbers[: len(offsets)] * rate + phases[node]) & (_ONE - 1) >= _ONE - rate
        if flips[node] >= 0:
            to_heavy[flips[node]] ^= True
        todo += [(int(tree.heavy[node]), offsets[to_heavy])]
        todo += [(int(tree.light[node]), offsets[~to_heavy])]
    return leaf, rank


def balanced_offset(
    pieces: Pieces, key: int, row: Int64Array, leaf: int, rank: Int64Array
) -> Int64Array:
    """Inverse of :func:`balanced_at` for one leaf: int64[m] offsets of its rank-th items."""
    tree = pieces.tree
    if tree.num_leaves == 1:
        return rank
    spread = _spread(pieces, key)
    node, n = leaf, rank
    while node != tree.root:
        above = tree.parent[node]
        is_heavy = bool(tree.heavy[above] == node)
        phase, flipped = spread.phase[row, above], spread.flipped[row, above]
        more = spread.more[row, above] * (1 if is_heavy else -1)
        rate = int(tree.rate[above])
        # items of this child before the flipped one, by the rate alone
        before = (flipped * rate + phase) >> 32
        before = before if is_heavy else flipped - before
        gained, lost = more > 0, more < 0
        by_rate = n - (gained & (n > before)) + (lost & (n >= before))
        item = _item(by_rate, rate, phase, is_heavy)
        n = np.where(gained & (n == before), flipped, item)
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


def _spread(pieces: Pieces, key: int) -> _Spread:
    tree = pieces.tree
    quota = np.zeros((len(pieces.chunk), tree.root + 1), np.int64)
    quota[:, : tree.num_leaves] = pieces.quotas
    for nodes in reversed(tree.levels):
        quota[:, nodes] = quota[:, tree.heavy[nodes]] + quota[:, tree.light[nodes]]
    fraction = _weyl(tree, key, pieces.chunk)
    room = U(_ONE) - U(2) * quota.astype(U)
    phase = quota + (((fraction >> _S32) * room) >> _S32).astype(np.int64)
    by_rate = (quota * tree.rate + phase) >> 32
    more = quota[:, tree.heavy] - by_rate
    more[:, : tree.num_leaves] = 0
    flipped = np.full_like(quota, -1)
    cell = np.nonzero(more)
    flipped[cell] = _flipped(
        fraction[cell], quota[cell], by_rate[cell], tree.rate[cell[1]], phase[cell], more[cell] < 0
    )
    return _Spread(quota, phase, more, flipped)


def _flipped(
    fraction: UInt64Array,
    quota: Int64Array,
    by_rate: Int64Array,
    rate: Int64Array,
    phase: Int64Array,
    from_heavy: npt.NDArray[np.bool_],
) -> Int64Array:
    """Number of the item that goes to the other child than by the rate."""
    choices = np.where(from_heavy, by_rate, quota - by_rate)
    last_part = -(-choices // _LATE_PART)
    from_end = ((mix(fraction) >> _S32) * last_part.astype(U)) >> _S32
    chosen = choices - 1 - from_end.astype(np.int64)
    return np.where(from_heavy, _item(chosen, rate, phase, True), _item(chosen, rate, phase, False))


def _item(nth: Int64Array, rate: Int64Array | int, phase: Int64Array, of_heavy: bool) -> Int64Array:
    """Number of the nth item (from 0) that goes to one child by the rate alone."""
    if not of_heavy:
        rate, phase = _ONE - rate, _ONE - 1 - phase
    item: Int64Array = -((phase - (nth + 1) * _ONE) // np.maximum(rate, 1)) - 1
    return item


def _weyl(tree: SplitTree, key: int, chunk: Int64Array) -> UInt64Array:
    step = _ALPHA[np.minimum(tree.depth, len(_ALPHA) - 1)]
    start = subkeys(np.array([key], U), np.arange(tree.root + 1))
    return step * chunk.astype(U)[:, None] + start
