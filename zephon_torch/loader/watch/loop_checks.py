"""Warnings for loops that would otherwise go wrong silently.

Each loop has its checks: made when it begins, asked at its second batch, at its end, and when it is
dropped. They cost nothing per batch.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

from zephon_torch.errors import WorldError
from zephon_torch.loader.watch import attendance
from zephon_torch.loader.watch.same_order import SideBySide

if TYPE_CHECKING:
    from zephon_torch.loader.iteration import Iteration
    from zephon_torch.loader.loader import DataLoader

_TO_THE_LOOP = 6  # frames from a warning at the second batch to the `for` of the user


class LoopChecks:
    """Checks of one loop, made before its first batch.

    Args:
        loop: the loop.
        loader: its loader.
        start: epoch and delivered samples ahead of its first batch.
        is_of_all_ranks: whether all ranks must begin at that place.
    """

    def __init__(
        self, loop: Iteration, loader: DataLoader, start: tuple[int, int], is_of_all_ranks: bool
    ) -> None:
        self._loader, self._start = loader, start
        self._is_of_all_ranks = is_of_all_ranks
        self._said = ""  # by the first of all ranks, once it was asked
        self._left = loader._cursor.left_of_this_order
        is_shuffled = loader._splitter.shuffle
        self._repeats_a_look = is_shuffled and 0 < self._left <= loader._splitter.global_batch_size
        self._beside = SideBySide(loop, loader, start[0]) if is_shuffled else None
        self._roll = loader._splitter.world.begin(loader.source.fingerprint, start[0])

    def second_batch(self) -> None:
        """Tell of what is known once a loop is more than a look at one batch.

        Raises:
            WorldError: another rank has begun elsewhere; at each call.
        """
        loader = self._loader
        if self._left and not self._repeats_a_look:
            self._tell_once(
                f"the loop before this one was left after {self._left} samples of epoch "
                f"{self._start[0]}; this one began the same epoch anew, in the same order. For "
                "short epochs give max_samples= to the work source, for a new order call "
                "loader.set_epoch(), to go on load the state: loader.load_state_dict("
                "loader.state_dict())",
                _TO_THE_LOOP,
            )
        if self._beside is not None:
            self._beside.check(_TO_THE_LOOP)
            self._beside = None
        if self._is_of_all_ranks:
            self._compare_with_other_ranks(loader)
        attendance.look_again(self._roll)

    def end(self) -> None:
        """Note that the epoch was gone through to its end."""
        attendance.look_again(self._roll)
        if self._roll is not None:
            attendance.note_end(self._roll, repr(self._loader))

    def dropped_after_one_batch(self) -> None:
        """Tell of a second look at the same batch: the loop has gone, and had only that one."""
        if self._repeats_a_look and not sys.is_finalizing():
            self._tell_once(
                "next(iter(loader)) gave the same batch again: each iter() begins epoch "
                f"{self._start[0]} anew, in the same order. Keep one iterator and call next() on "
                "it, or use a for loop; loader.peek(n) is for looking, loader.set_epoch() for a "
                "new order",
                3,
            )

    def _tell_once(self, words: str, stacklevel: int) -> None:
        if "again" not in self._loader._told:
            self._loader._told.add("again")
            warnings.warn(words, stacklevel=stacklevel + 1)

    def _compare_with_other_ranks(self, loader: DataLoader) -> None:
        splitter, (epoch, delivered) = loader._splitter, self._start
        plan = loader.source.identity.fingerprint[:16]
        words = (
            f"plan {plan}, epoch {epoch}, {delivered} samples delivered, {splitter.lanes} lanes, "
            f"global batches of {splitter.global_batch_size}"
        )
        said = self._said = self._said or splitter.world.first_said(words)
        if said != words:
            raise WorldError(
                f"ranks do not go on from the same place: this one (rank {splitter.rank}) from "
                f"{words}; another one from {said}. Make the loader with the same data, seed and "
                "batch size and load the checkpoint on every rank (DDP sends weights from rank 0, "
                "but not this); give rank= and num_replicas= to a loader that not all ranks iterate"
            )
