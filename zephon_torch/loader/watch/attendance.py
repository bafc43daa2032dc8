"""Epochs that one rank goes through to the end and other ranks never begin.

With torch.distributed up, each rank's loader gives its share of the samples. So ``if rank == 0:
evaluate(loader)`` sees a part of the data, without a word. Ranks count in torch.distributed's store
which epochs they begin: one short message when an epoch begins, one when it has ended, no
collective. A rank that is slow has not begun yet either. So who finds at its end that others are
missing looks again later, and warns only once that tells something: all ranks have begun something
later, or much time has passed, or the process ends.
"""

from __future__ import annotations

import atexit
import os
import time
import warnings
from dataclasses import dataclass, field

from zephon_torch.work.sharing.world import Roll

_LATE_SECONDS = 600.0  # NCCL's default timeout: a rank as late as that would have ended the run


@dataclass(frozen=True, slots=True)
class _Missed:
    """An epoch that other ranks had not begun when this one had gone through it."""

    roll: Roll
    number: int  # of times that this rank had gone through it
    loader: str
    pid: int = field(default_factory=os.getpid)
    ended: float = field(default_factory=time.monotonic)


_missed: _Missed | None = None  # the first that is not cleared up
_has_warned = False  # once in a process is enough


def note_end(roll: Roll, loader: str) -> None:
    """Note that this rank has gone through an epoch.

    Args:
        roll: the epoch's.
        loader: what it was an epoch of, in words.
    """
    global _missed
    number = roll.end()
    if _has_warned or _missed is not None:
        return
    num_begun = roll.num_begun(number)
    if num_begun is not None and num_begun < roll.num_ranks:
        _missed = _Missed(roll, number, loader)
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)


def look_again(later: Roll | None) -> None:
    """See whether the ranks that were missing have come, or certainly never will.

    Args:
        later: the epoch of the loop that is under way here.
    """
    missed = _missed
    if missed is None or later is None:
        return
    num_begun = missed.roll.num_begun(missed.number)
    if num_begun is None:
        return
    waited = time.monotonic() - missed.ended
    if num_begun >= missed.roll.num_ranks:
        _clear()
    elif later.begun > missed.ended and later.num_begun(later.number) == later.num_ranks:
        _warn(missed, num_begun, "though all ranks have begun another one since")
    elif waited > _LATE_SECONDS:
        _warn(missed, num_begun, f"{waited:.0f} seconds later")


def _at_exit() -> None:
    missed = _missed
    if missed is not None and missed.pid == os.getpid():
        num_begun = missed.roll.num_begun(missed.number)
        if num_begun is not None and num_begun < missed.roll.num_ranks:
            _warn(missed, num_begun, "when this process ended")


def _clear() -> None:
    global _missed
    _missed = None


def _warn(missed: _Missed, num_begun: int, when: str) -> None:
    global _has_warned
    _has_warned = True
    _clear()
    roll = missed.roll
    others = "no other rank" if num_begun == 1 else f"only {num_begun} of {roll.num_ranks} ranks"
    warnings.warn(
        f"rank {roll.rank} of {roll.num_ranks} has gone through epoch {roll.epoch} of "
        f"{missed.loader}, which {others} had begun {when}. Each rank gets its share of the "
        f"samples alone, here 1 of {roll.num_ranks} parts: what one rank is to see as a whole, an "
        "evaluation under `if rank == 0:` say, needs DataLoader(..., rank=0, num_replicas=1); "
        "otherwise iterate on every rank",
        stacklevel=3,
    )
