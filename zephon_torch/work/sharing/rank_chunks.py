"""The chunks of one rank as a torchdata node."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from zephon_torch.errors import WorldError
from zephon_torch.work.identity.identity import PlanIdentity
from zephon_torch.work.sources.static_mixture import ChunkNode, WorkChunk

if TYPE_CHECKING:
    from zephon_torch.work.sharing.splitter import ChunkSplitter


class RankChunks(ChunkNode):
    """A torchdata node over the chunks of one rank, round by round and lane by lane.

    Rank r of W owns lanes [r * L / W, (r + 1) * L / W). In the last, shorter round its chunks are
    the pieces of these lanes; their ``start`` and ``stop`` say which positions they cover.
    """

    _counted = "rank_chunks"

    def __init__(self, splitter: ChunkSplitter) -> None:
        super().__init__()
        self._source, self._lanes = splitter.source, splitter.lanes
        rank, num_replicas = splitter.rank, splitter.num_replicas
        if self._lanes % num_replicas:
            raise WorldError(
                f"{num_replicas} ranks cannot each own whole lanes of {self._lanes}: set lanes= to "
                "a multiple of the number of ranks, or use DataLoader, which shares chunks"
            )
        self._split = (self._lanes, num_replicas)
        self._per_round = self._lanes // num_replicas
        self._first_lane = rank * self._per_round
        total, round_size = self._source.total_samples, self._lanes * self._source.chunk_size
        self._num_rounds: int | float = (
            math.inf if isinstance(total, float) else total // round_size
        )
        # pieces of the last round: `piece` positions each, one more for the first `longer` lanes
        rest = 0 if isinstance(total, float) else total % round_size
        self._piece, self._longer = divmod(rest, self._lanes)

    @property
    def identity(self) -> PlanIdentity:
        """Identity of the plan."""
        return self._source.identity

    def _has(self, index: int) -> bool:
        number, own_lane = divmod(index, self._per_round)
        if number < self._num_rounds:
            return True
        lane = self._first_lane + own_lane
        return number == self._num_rounds and (self._piece > 0 or lane < self._longer)

    def _item(self, index: int, epoch: int) -> WorkChunk:
        number, own_lane = divmod(index, self._per_round)
        lane = self._first_lane + own_lane
        k = number * self._lanes + lane
        if number < self._num_rounds:
            return self._source.chunk(k, epoch)
        start = number * self._lanes * self._source.chunk_size
        start += lane * self._piece + min(lane, self._longer)
        stop = start + self._piece + (lane < self._longer)
        pointers = self._source.pointers(np.arange(start, stop), epoch)
        return WorkChunk(k, epoch, start, stop, pointers, self._source.names)
