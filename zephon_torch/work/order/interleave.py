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

import itertools
import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from zephon_torch.arithmetic.apportion import SplitTree
from zephon_torch.arithmetic.permutation import U, UInt64Array, mix, permute, subkeys
from zephon_torch.arithmetic.runs import Int64Array, runs_of

_PRIMES = [p for p in range(2, 312) if all(p % q for q in range(2, math.isqrt(p) + 1))]
_ALPHA = np.array([math.isqrt(p << 128) & ((1 << 64) - 1) for p in _PRIMES], U)
_ONE = 1 << 32
_S32 = U(32)
_NEVER = 1 << 62
_FEW_STRETCHES = 2
_MANY_LEAVES = 128  # beyond, a path per element is faster than node by node
_LATE_PART = 16  # a flipped item is one of the last 1/16: late enough, and not all at one offset

_Group: TypeAlias = tuple[int, Int64Array, Int64Array]  # a leaf, the places and ranks of its items


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
    """How each node spreads its items, int64[nodes, P]; for leaves only the quota means anything.

    Attributes:
        quota: items.
        phase: of the heavy child, in units of 2**-32.
        more: items that the quota wants beyond the rate, -1, 0 or 1.
        flipped: number of the item that goes to the other child, past all items where there is
            none.
    """

    quota: Int64Array
    phase: Int64Array
    more: Int64Array
    flipped: Int64Array


def balanced_at(
    pieces: Pieces, key: int, row: Int64Array, offset: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Leaf at each (piece, offset), and its rank among the piece's items of that leaf.

    Args:
        row: int64[m], which of the pieces.
        offset: int64[m], in [0, quota of the piece).

    Returns:
        (place, leaf, rank), int64[m] each, leaf by leaf: element place[i] is at leaf[i]. (Where
        `offset` is made of two stretches of numbers, first all leaves of the one, then of the
        other.) Elements of one leaf keep their order. Pure.
    """
    tree, place = pieces.tree, np.arange(len(offset))
    if tree.num_leaves == 1:
        return place, np.zeros_like(offset), offset
    spread = _spread(pieces, key)
    if tree.num_leaves > min(_MANY_LEAVES, len(offset)):
        return _level_by_level(tree, spread, row, offset)
    stretches = runs_of(offset - place, runs_of(row))
    if len(stretches) > _FEW_STRETCHES:
        return _joined(_node_by_node(tree, spread, row, offset))
    found: list[_Group] = []
    for first, stop in itertools.pairwise([*stretches.tolist(), len(offset)]):
        found += _of_stretch(tree, spread, int(row[first]), int(offset[first]), place[first:stop])
    return _joined(found)


def _joined(groups: list[_Group]) -> tuple[Int64Array, Int64Array, Int64Array]:
    leaves, places, ranks = zip(*groups, strict=True)
    leaf = np.repeat(np.array(leaves), np.array([len(place) for place in places]))
    return np.concatenate(places), leaf, np.concatenate(ranks)


def _of_stretch(
    tree: SplitTree, spread: _Spread, row: int, offset: int, place: Int64Array
) -> list[_Group]:
    """:func:`balanced_at` for offsets that follow each other in one piece.

    Their items follow each other in every node, so a number says which: the first. And 32 bits of
    what an item has passed show where it goes.
    """
    heavy, light, rates = tree.heavy.tolist(), tree.light.tolist(), tree.rate.tolist()
    phases, mores, flips = (a[:, row].tolist() for a in (spread.phase, spread.more, spread.flipped))
    numbers = np.arange(len(place), dtype=np.uint32)
    done: list[_Group] = []
    todo = [(tree.root, offset, place)]
    while todo:
        node, first, place = todo.pop()
        if node < tree.num_leaves or not len(place):
            done.append((node, place, np.arange(first, first + len(place))))
            continue
        passed = first * rates[node] + phases[node]
        parts = numbers[: len(place)] * np.uint32(rates[node] & (_ONE - 1))
        parts += np.uint32(passed & (_ONE - 1))
        to_heavy = parts >= np.uint32(_ONE - rates[node])
        flipped = flips[node] - first
        if 0 <= flipped < len(place):
            to_heavy[flipped] ^= True
        sent = (passed >> 32) + (mores[node] if flipped < 0 else 0)
        todo.append((heavy[node], sent, place.take(to_heavy.nonzero()[0])))
        np.logical_not(to_heavy, out=to_heavy)
        todo.append((light[node], first - sent, place.take(to_heavy.nonzero()[0])))
    return done


def _node_by_node(
    tree: SplitTree, spread: _Spread, row: Int64Array, offset: Int64Array
) -> list[_Group]:
    """:func:`balanced_at`, each node once for all of its elements."""
    heavy, light, rates = tree.heavy.tolist(), tree.light.tolist(), tree.rate.tolist()
    flips = np.flatnonzero(spread.more.any(axis=1)).tolist()
    one_piece = spread.phase.shape[1] == 1
    done: list[_Group] = []
    todo = [(tree.root, np.arange(len(offset)), offset)]
    while todo:
        node, place, n = todo.pop()
        if node < tree.num_leaves or not len(n):
            done.append((node, place, n))
            continue
        rate, piece = rates[node], None if one_piece else row.take(place)
        passed = n * rate
        passed += spread.phase[node] if piece is None else spread.phase[node].take(piece)
        to_heavy = (passed & (_ONE - 1)) >= _ONE - rate
        passed >>= 32
        if node in flips:
            flipped = spread.flipped[node] if piece is None else spread.flipped[node].take(piece)
            late = (n >= flipped).nonzero()[0]  # few: a flip is late in its piece
            at = 0 if piece is None else piece[late]
            after = n[late] > spread.flipped[node][at]
            to_heavy[late] ^= ~after
            passed[late] += spread.more[node][at] * after
        chosen = to_heavy.nonzero()[0]
        todo.append((heavy[node], place.take(chosen), passed.take(chosen)))
        n = n - passed
        chosen = (~to_heavy).nonzero()[0]
        todo.append((light[node], place.take(chosen), n.take(chosen)))
    return done


def _level_by_level(
    tree: SplitTree, spread: _Spread, row: Int64Array, offset: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """:func:`balanced_at`, one path down for each element: faster where leaves are many."""
    phases, mores, flips = (a.ravel() for a in (spread.phase, spread.more, spread.flipped))
    num_pieces = spread.phase.shape[1]
    leaf, rank = np.empty_like(offset), np.empty_like(offset)
    place, node, n = np.arange(len(offset)), np.full_like(offset, tree.root), offset
    while len(place):
        cell, rate = node * num_pieces + row, tree.rate.take(node)
        passed = n * rate
        passed += phases.take(cell)
        to_heavy = (passed & (_ONE - 1)) >= _ONE - rate
        passed >>= 32
        late = (n >= flips.take(cell)).nonzero()[0]
        after = n[late] > flips[cell[late]]
        to_heavy[late] ^= ~after
        passed[late] += mores[cell[late]] * after
        n = np.where(to_heavy, passed, n - passed)
        node = np.where(to_heavy, tree.heavy.take(node), tree.light.take(node))
        done = (node < tree.num_leaves).nonzero()[0]
        leaf[place.take(done)], rank[place.take(done)] = node.take(done), n.take(done)
        inner = (node >= tree.num_leaves).nonzero()[0]
        place, row, node, n = (a.take(inner) for a in (place, row, node, n))
    return by_leaf(leaf, rank, tree.num_leaves)


def by_leaf(
    leaf: Int64Array, rank: Int64Array, num_leaves: int
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """(place, leaf, rank) leaf by leaf, from the leaf and rank of each element."""
    place = np.argsort(leaf.astype(np.min_scalar_type(num_leaves)), kind="stable")
    return place, leaf[place], rank[place]


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
        phase, flipped = spread.phase[above, row], spread.flipped[above, row]
        more = spread.more[above, row] * (1 if is_heavy else -1)
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
    ahead = np.zeros((tree.num_leaves + 1, len(pieces.chunk)), np.int64)
    np.cumsum(pieces.quotas.T[tree.walk], axis=0, out=ahead[1:])
    quota = ahead[tree.last] - ahead[tree.first]
    fraction = _weyl(tree, key, pieces.chunk)
    room = U(_ONE) - U(2) * quota.astype(U)
    phase = quota + (((fraction >> _S32) * room) >> _S32).astype(np.int64)
    by_rate = (quota * tree.rate[:, None] + phase) >> 32
    more = quota[tree.heavy] - by_rate
    more[: tree.num_leaves] = 0
    flipped = np.full_like(quota, _NEVER)
    cell = np.nonzero(more)
    flipped[cell] = _flipped(
        fraction[cell], quota[cell], by_rate[cell], tree.rate[cell[0]], phase[cell], more[cell] < 0
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
    return step[:, None] * chunk.astype(U) + start[:, None]
