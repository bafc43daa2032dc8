"""Where a run stands: one counter, what a load has staged, and what ``set_epoch`` asked for.

Rules, all of them here:

- a load only stages; the first batch of a new iterator adopts it. Until then the state is what was
  loaded, so load-then-save is the identity, and a first batch that fails loses nothing;
- an iterator begins the current epoch at 0 unless something is staged; the state stays where it
  was (after a ``break``: at the break) until its first batch;
- after the last batch of an epoch the state already says (epoch + 1, 0);
- who iterates the batch sampler instead of the loader begins the epoch at 0 and moves no state: an
  error while a state is staged, or once a trainer has prepared the loader;
- ``set_epoch(e)`` with the current epoch has no effect; with another one the next iterator starts
  (e, 0);
- between a load and the first batch the checkpoint wins, with a warning where `e` is ahead of it.
  Whoever called counts otherwise than the checkpoint, so later calls are shifted by the difference:
  no epoch comes twice and none is left out. Lightning Fabric, for one, counts from 0 in every
  process (``_FabricDataLoader.__iter__``).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from zephon_torch.errors import ConfigurationError, StateError
from zephon_torch.work.identity.progress import Progress
from zephon_torch.work.sharing.items import WorkItem
from zephon_torch.work.sharing.splitter import ChunkSplitter


@dataclass(frozen=True, slots=True)
class _Staged:
    """A state that waits for the next iterator."""

    state: Progress | Sequence[int]  # words are read later: setting a module's state never raises
    strict: bool
    route: str

    def progress(self) -> Progress:
        if isinstance(self.state, Progress):
            return self.state
        return Progress.from_words(self.state)


class Cursor:
    """The counter of a loader.

    Args:
        splitter: deals out the work; its lanes are set here.
        lanes: lanes as the user gave them; None takes those of a loaded state.
    """

    def __init__(self, splitter: ChunkSplitter, lanes: int | None) -> None:
        self._splitter, self._lanes_given = splitter, lanes
        self._identity = splitter.source.identity
        self._epoch = self._delivered = 0
        self._lanes = splitter.lanes
        self._next_epoch: int | None = None
        self._asked: int | None = None  # the last set_epoch since a load
        self._shift = 0  # from the epochs of set_epoch to ours
        self._staged: dict[str, _Staged] = {}
        self.behind = 0  # batches that were handed over and are not in use yet: 0 or 1
        self._last: tuple[int, int] | None = None  # start of the last batch of a running iteration
        self.is_prepared = False  # a trainer, which saves the state, has prepared the loader

    @property
    def place(self) -> tuple[int, int]:
        """(epoch, delivered) as the state says it."""
        if self._staged:
            progress = self._latest().progress()
            return progress.epoch, progress.delivered
        return self._here

    @property
    def loads(self) -> tuple[object, ...]:
        """The loads that wait for an iterator, for comparison by identity."""
        return tuple(self._staged.values())

    @property
    def has_loads(self) -> bool:
        """Whether there are any."""
        return bool(self._staged)

    def progress(self, behind: int | None = None) -> Progress:
        """The state. After a load and before the first batch: what was loaded.

        Args:
            behind: 1: the state before the last batch, which a wrapper that fetches one batch ahead
                still holds, unless it has come to the end; None: as :attr:`behind` says.
        """
        is_behind = self.behind if behind is None else behind
        held = self._last if is_behind and not self._staged else None
        epoch, delivered = self.place if held is None else held
        here = Progress.at(self._identity, epoch=epoch, delivered=delivered, lanes=self._lanes)
        if not self._staged:
            return here
        loaded = self._latest().progress()
        if not self._is_strict:
            return replace(here, lanes=self._lanes_for(loaded))
        if loaded.fingerprint == here.fingerprint:
            return replace(here, lanes=loaded.lanes)
        return loaded

    def stage(
        self, state: Progress | Sequence[int], *, strict: bool = True, route: str = "loader"
    ) -> None:
        """Put a state in wait. `route` says whose it is: the loader's own, or the model's."""
        self._asked = None
        self._staged.pop(route, None)
        self._staged[route] = _Staged(self._known(state), strict, route)
        with contextlib.suppress(StateError):  # told by check()
            self._splitter.show_epoch(self.place[0])

    def _known(self, state: Progress | Sequence[int]) -> Progress | Sequence[int]:
        """A state of this plan in the plan's own spelling; any other, sound or not, as it is."""
        try:
            progress = state if isinstance(state, Progress) else Progress.from_words(state)
        except StateError:  # told by check()
            return state
        known = progress.on(self._identity)
        return known if known is not progress else state

    def check(self) -> None:
        """Raise if the staged state cannot be adopted.

        Raises:
            StateError: a corrupt state, lanes that differ from the ones given, or two routes that
                disagree; :class:`~zephon_torch.PlanMismatch`: it belongs to another plan.
        """
        if not self._staged:
            return
        found = {route: staged.progress() for route, staged in self._staged.items()}
        places = {(p.epoch, p.delivered) for p in found.values()}
        plans = {(p.lanes, p.fingerprint) for p in found.values()}
        if len(places) > 1 or (self._is_strict and len(plans) > 1):
            words = " and ".join(f"the {route} {progress!r}" for route, progress in found.items())
            raise StateError(
                f"two states were restored and they disagree: {words}. Restore the progress by one "
                "route, or bind(..., restore=False)"
            )
        progress = self._latest().progress()
        if self._is_strict:
            # where both routes have brought the state, the loader's can say what differs
            max(found.values(), key=lambda one: len(one.description)).check(self._identity)
            if progress.delivered > self._splitter.source.total_samples:
                raise StateError(
                    f"the state says that {progress.delivered} samples were delivered, an epoch "
                    f"has {self._splitter.source.total_samples}"
                )
        # what is asked of the splitter from now on, as by loader.batch(step), is of that state
        self._splitter.lanes = self._lanes_for(progress)

    def begin(self) -> tuple[int, int]:
        """(epoch, delivered) where a new iterator starts. Nothing moves before :meth:`adopt`."""
        self.check()
        if self._staged:
            epoch, delivered = self.place
            return (epoch + 1, 0) if self._is_over(delivered) else (epoch, delivered)
        self._splitter.lanes = self._lanes
        return self._epoch if self._next_epoch is None else self._next_epoch, 0

    @property
    def left_of_this_order(self) -> int:
        """Samples after which a loop over the epoch that comes next was left; 0 after a whole one.

        The order of the files begins anew as it was meant to, so there it is 0 too.
        """
        is_restart = not self._staged and self._next_epoch in (None, self._epoch)
        return self._delivered if is_restart and self._splitter.shuffle else 0

    def adopt(self, epoch: int, delivered: int) -> None:
        """An iterator that started there has come to its first batch: the state counts from it."""
        self._lanes = self._splitter.lanes
        if self._staged:
            self._shift = 0 if self._asked is None else epoch - self._asked
            self._next_epoch = None
        elif self._next_epoch == epoch:  # else it was asked for since, and comes next
            self._next_epoch = None
        self._asked = None
        self._move_to(epoch, delivered)
        self._staged.clear()  # last: an interrupt before it leaves the load in wait

    def matches_staged(self) -> bool:
        """Whether the staged state is where the run stands anyway; if so it is dropped."""
        self.check()
        staged = self._latest().progress()
        found = staged.epoch, staged.delivered
        is_here = found in (self._here, self._last if self.behind else None)
        if not is_here or staged.lanes != self._lanes:
            return False
        self._staged.clear()
        return True

    def refuse_uncounted(self) -> None:
        """Raise if batches that are not counted here would go unnoticed.

        Raises:
            ConfigurationError: they would.
        """
        if not self._staged and not self.is_prepared:
            return
        raise ConfigurationError(
            "another loader reads this one's batch_sampler: it would begin the epoch at its start "
            f"and not move the progress, which is {self.progress()!r}. If that is "
            "skip_first_batches(loader, n): a restored state is already at the right batch, so "
            "iterate the loader itself; where a trainer calls it, as transformers' does, or no "
            "state was restored, use zephon_torch.Skippable(loader) in place of the loader"
        )

    @property
    def delivered_next(self) -> int:
        """Delivered samples ahead of the next batch: 0 where the epoch has no batch left."""
        delivered = self.place[1]
        return 0 if self._is_over(delivered) else delivered

    def end_epoch(self, epoch: int) -> None:
        """An iterator has come to the end of an epoch, whether or not its last batch came."""
        if self._epoch == epoch:
            self._move_to(epoch + 1, 0)

    def end_iteration(self) -> None:
        """An iterator has said that no batch follows: whoever fetches ahead now holds none."""
        self._last = None

    def advance(self, item: WorkItem) -> None:
        """Count a batch that is handed over. The end of an epoch is the start of the next."""
        if item.is_last or item.epoch != self._epoch:
            self._move_to(*((item.epoch + 1, 0) if item.is_last else (item.epoch, item.stop)))
        else:
            self._delivered = item.stop
        self._last = item.epoch, item.start

    def set_epoch(self, epoch: int) -> None:
        """Ask for an epoch; see the rules above."""
        if self._staged:
            self._asked, loaded = epoch, self.place[0]
            if epoch > loaded:
                warnings.warn(
                    f"set_epoch({epoch}) after a state of epoch {loaded} was loaded and before its "
                    "first batch: the checkpoint wins, the run goes on in epoch "
                    f"{loaded}",
                    stacklevel=4,
                )
            return
        epoch = max(0, epoch + self._shift)
        self._next_epoch = epoch if epoch != self._epoch else None
        self._splitter.show_epoch(epoch)

    @property
    def _here(self) -> tuple[int, int]:
        """(epoch, delivered) without regard to loads."""
        if self._delivered == 0 and self._next_epoch is not None:
            return self._next_epoch, 0
        return self._epoch, self._delivered

    def _latest(self) -> _Staged:
        return next(reversed(self._staged.values()))

    @property
    def _is_strict(self) -> bool:
        """Whether the plan still has to be the staged state's: nobody has accepted another one."""
        return all(staged.strict for staged in self._staged.values())

    def _lanes_for(self, progress: Progress) -> int:
        given = self._lanes_given
        if given is None or given == progress.lanes:
            return progress.lanes
        if self._is_strict:
            raise StateError(
                f"the state has lanes={progress.lanes}, the loader was given lanes={given}: leave "
                "lanes= out to go on as before, or load with strict=False"
            )
        return given

    def _is_over(self, delivered: int) -> bool:
        total = self._splitter.source.total_samples
        return delivered > 0 and self._splitter.steps_between(delivered, total) <= 0

    def _move_to(self, epoch: int, delivered: int) -> None:
        self._epoch, self._delivered, self._last = epoch, delivered, None
        self._splitter.show_epoch(epoch if self._next_epoch is None else self._next_epoch)
