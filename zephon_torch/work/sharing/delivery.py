"""The order of delivery: how the plan is dealt out to lanes, global batches and ranks.

``delivered`` counts the samples of an epoch in the order in which they are handed out, 0 .. N - 1.
With L lanes and chunks of C positions:

- **Rounds.** Round j covers positions [j * L * C, (j + 1) * L * C). Inside it, item i goes to lane
  ``i % L`` at offset ``i // L``; a lane's segment of the round is chunk ``j * L + lane``. The last
  round, if it is shorter, is cut into L contiguous pieces whose sizes differ by at most one, longer
  ones first. So ``delivered`` -> position is a bijection, and with L = 1 the identity.
- **Global batches.** The items [start, stop) of one global batch stand lane by lane, and in order
  of delivery inside a lane. Rank r of W takes places [r * b, (r + 1) * b) of its n items, where
  b is n / W, rounded up. So set and order of a global batch are the same for every W, and what
  an incomplete one lacks is missing at the end of its last ranks.

Pure functions on int64 arrays.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from zephon_torch.arithmetic.permutation import Int64Array

BoolArray: TypeAlias = npt.NDArray[np.bool_]


def positions_of(delivered: Int64Array, *, lanes: int, chunk_size: int, length: int) -> Int64Array:
    """Plan position of each delivered index, int64[n] -> int64[n].

    Args:
        delivered: indices in [0, length).
        lanes: L.
        chunk_size: C.
        length: positions of the epoch.
    """
    if lanes == 1:
        return delivered
    round_size = lanes * chunk_size
    start = delivered // round_size * round_size
    item = delivered - start
    offset = item // lanes
    lane = item - offset * lanes
    positions = start + offset
    positions += lane * chunk_size
    # pieces of the last round: `piece` positions each, and one more for the first few
    last_start = length // round_size * round_size
    piece, longer = divmod(length - last_start, lanes)
    last = (start == last_start).nonzero()[0]
    if len(last):
        lane = lane[last]
        positions[last] = last_start + lane * piece + np.minimum(lane, longer) + offset[last]
    return positions


def items_of(starts: Int64Array, size: int, places: Int64Array, lanes: int) -> Int64Array:
    """Delivered index at places of global batches of one size.

    Args:
        starts: int64[n], first delivered index of each global batch.
        size: its number of items.
        places: int64[b], places in each batch, in [0, size).
        lanes: L.

    Returns:
        int64[n, b]. What stands at a place depends on the start only by its lane, of which batches
        that follow each other have few.
    """
    if lanes == 1:
        return starts[:, None] + places
    first, which = np.unique(starts % lanes, return_inverse=True)
    ahead = _ahead(first[:, None], size, places, lanes)
    return ahead[which] + starts[:, None]


def _ahead(first: Int64Array, size: int, places: Int64Array, lanes: int) -> Int64Array:
    """How far behind its start, in lane `first`, a batch has the item of each place.

    Lane l holds ``size // L`` items of the batch, and one more for the ``size % L`` lanes from
    `first` on, cyclically. In the order of lanes these make up to four runs: wrapped lanes with one
    more, lanes without, lanes with one more, lanes without.
    """
    each, more = divmod(size, lanes)
    wrapped = np.maximum(first + more - lanes, 0)
    # where each run begins: as a lane, and as a place
    lane_1, lane_2, lane_3 = wrapped, first, first + more - wrapped
    place_1 = wrapped * (each + 1)
    place_2 = place_1 + (lane_2 - lane_1) * each
    place_3 = place_2 + (lane_3 - lane_2) * (each + 1)
    run = 0 + (places >= place_1) + (places >= place_2) + (places >= place_3)
    lane_start = _by_run(run, lane_1, lane_2, lane_3)
    place_start = _by_run(run, place_1, place_2, place_3)
    held = np.where(run % 2 == 0, each + 1, max(each, 1))
    lane, nth = np.divmod(places - place_start, held)
    lane += lane_start
    ahead: Int64Array = (lane - first) % lanes + nth * lanes
    return ahead


def _by_run(
    run: Int64Array, first: Int64Array, second: Int64Array, third: Int64Array
) -> Int64Array:
    chosen: Int64Array = np.where(
        run < 2, np.where(run == 0, 0, first), np.where(run == 2, second, third)
    )
    return chosen


def rank_places(size: int, *, rank: int, num_replicas: int) -> tuple[Int64Array, BoolArray | None]:
    """Places of a global batch that a rank takes, and which of them are real.

    Every rank gets ``ceil(size / num_replicas)`` places. Where its own slice is shorter, the rest
    repeats its last item, or the global batch's last one if it has none: the padding of a global
    batch stands at its end, where frameworks that gather and cut off expect it.

    Returns:
        (places int64[b], valid bool[b]); valid is None where all are real.
    """
    wanted = -(-size // num_replicas)
    start, stop = min(rank * wanted, size), min((rank + 1) * wanted, size)
    places: Int64Array = np.arange(start, stop)
    if stop - start == wanted:
        return places, None
    filler = stop - 1 if stop > start else size - 1
    places = np.concatenate([places, np.full(wanted - len(places), filler)])
    return places, np.arange(wanted) < stop - start
