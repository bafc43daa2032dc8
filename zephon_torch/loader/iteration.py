"""One pass of the training loop over an epoch: from the engine's batches to the loop."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from zephon_torch.arithmetic.permutation import text_key
from zephon_torch.bridges.accelerate import Prepared, prepared
from zephon_torch.bridges.lightning import load_forgotten_state
from zephon_torch.engines.engine import Run
from zephon_torch.engines.look_ahead import Ahead
from zephon_torch.errors import StaleIteratorError, StorageError
from zephon_torch.loader.settings import pins_here
from zephon_torch.loader.watch.loop_checks import LoopChecks
from zephon_torch.loader.watch.skipping import SkipWatch
from zephon_torch.nodes.batches import Made
from zephon_torch.work.sharing.items import WorkItem

if TYPE_CHECKING:
    from zephon_torch.loader.loader import DataLoader


class Iteration(Iterator[Any]):
    """The iterator of a loader. Begins at its first ``next()``.

    It is the only one that moves its loader: the cursor, the pointers and the statistics.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._loader, self._cursor = loader, loader._cursor
        self._run: Run | None = None
        self._ahead: Ahead | None = None
        self._start = self._place = (0, 0)  # epoch and delivered: of the first batch, of the next
        self._is_cut = False  # whether the last call was, by what is no batch's own: an interrupt
        self._loads: tuple[object, ...] = ()
        self._is_adopted = False  # whether the state counts from `start`: since the first batch
        self._is_under_way = False  # whether it is more than a look at one batch
        self._checks: LoopChecks | None = None
        self._is_over = False  # whether the last batch of the epoch was handed over
        self._ended = False
        self._prepared: Prepared | None = None
        self._skips: SkipWatch | None = None
        self._pins = pins_here(loader, stacklevel=3)
        self._lock = threading.RLock()

    def __next__(self) -> Any:
        with self._lock:  # several threads may share an iterator, as torch's
            return self._next()

    def _next(self) -> Any:
        if self._ended:
            raise StopIteration
        begun = time.perf_counter()
        if self._skips is not None and self._skips.is_over(begun):
            self._skips = None
        run = self._run
        if run is None or self._is_cut or not self._is_under_way or not self._is_current():
            run = self._made_ready()
        self._is_cut = True
        try:
            item, made = run.__next__()
        except StopIteration:
            self._end()
            raise
        if isinstance(made, Exception):
            self._fail(item, made)
        assert item is not None
        batch = made.data
        if self._pins:
            batch = torch.utils.data._utils.pin_memory.pin_memory(batch)  # type: ignore[no-untyped-call]
        if self._prepared is not None:
            batch = self._prepared.hand_over(batch, is_last=item.is_last)
        self._loader.stats.wait_seconds += time.perf_counter() - begun
        self._count(item, made)
        self._is_cut = False
        if self._skips is not None:
            self._skips.returned()
        return batch

    def _is_current(self) -> bool:
        """Whether nothing has happened to the loader since the last batch."""
        live = self._loader._live
        return live is not None and live() is self and not self._cursor.has_loads

    def _made_ready(self) -> Run:
        """The run to take the next batch of, after checks that mostly have nothing to find."""
        if not self._is_under_way:
            load_forgotten_state(self._loader)
        if self._run is None:
            self._run = self._begin()
        self._check_live()
        if not self._is_under_way and self._is_adopted:
            self._get_under_way()
        if self._is_cut:  # the batch may be anywhere: go on at its place with a new run
            self._close_run()
            self._run = self._run_from(self._place)
        return self._run

    def _fail(self, item: WorkItem | None, error: Exception) -> NoReturn:
        """Raise the error that came in the place of a batch.

        The next call goes on behind the batch; after an error of the storage it tries the batch
        again, with a new run: nothing is wrong with the data.
        """
        if not isinstance(error, StorageError):
            self._is_cut = False
            if item is not None:
                self._place = item.epoch, item.stop
        try:
            raise error
        finally:
            del error  # its traceback holds this frame

    def __len__(self) -> int:
        return len(self._loader)

    def __del__(self) -> None:
        # the batch may have been the only one of a look: told here, because nothing comes after
        checks = getattr(self, "_checks", None)
        if checks is not None and self._is_adopted and not (self._is_under_way or self._is_over):
            checks.dropped_after_one_batch()

    @property
    def loader(self) -> DataLoader:
        """The loader whose batches these are."""
        return self._loader

    @property
    def position(self) -> tuple[int, int] | None:
        """Epoch and delivered samples after the last batch; None before the first, and once over.

        An older loop than the loader's newest one has none either.
        """
        live = self._loader._live
        is_live = live is not None and live() is self
        return self._place if is_live and self._is_adopted and not self._ended else None

    @property
    def goes_on(self) -> bool:
        """Whether a batch of its epoch is to come of it."""
        is_on = self.position is not None and not self._is_over
        return is_on and not self._cursor.has_loads

    def close(self) -> None:
        """Give up what was prefetched; a later ``next()`` goes on at its place, with a new run."""
        if self._run is not None:
            self._is_cut = True
        self._close_run()

    def _close_run(self) -> None:
        if self._run is not None:
            self._run.close()
        if self._ahead is not None:
            self._ahead.close()

    def _begin(self) -> Run:
        loader = self._loader
        self._start, self._loads = self._cursor.begin(), self._cursor.loads
        self._place = self._start
        is_of_all_ranks = loader._live is None or bool(self._loads)
        previous = loader._live() if loader._live is not None else None
        if previous is not None:
            previous.close()
        if self._loads:
            self._skips = SkipWatch.after(self._start[1], loader._splitter.global_batch_size)
        loader._renew_engine()
        run = self._run_from(self._start)
        loader._live = weakref.ref(self)
        self._checks = LoopChecks(self, loader, self._start, is_of_all_ranks)
        self._prepared = prepared(loader)
        if self._prepared is not None:
            self._prepared.begin()
        return run

    def _run_from(self, place: tuple[int, int]) -> Run:
        splitter = self._loader._splitter
        # not the same on two ranks or after a resume, as with torch's own seeds
        words = (splitter.seed, splitter.rank, *place)
        seed = text_key("zephon_torch/workers/1", *map(str, words)) >> 1
        items = splitter.items(*place)
        copies = self._loader._pipeline.fetcher.copies
        if copies is not None:
            self._ahead = Ahead(copies, self._loader.datasets)
            items = self._ahead.look_at(items)
        return self._loader._engine.run(items, seed, splitter.batch_size)

    def _check_live(self) -> None:
        live = self._loader._live
        if live is None or live() is not self:
            raise StaleIteratorError(
                "this iterator cannot go on: a newer one of the same loader has begun, or the "
                "loader was closed. Use one iterator at a time, and loader.batch(step) or "
                "loader.peek(n) to look at other batches"
            )
        if self._is_adopted:
            is_current = not self._cursor.has_loads or self._cursor.matches_staged()
        else:
            loads = self._cursor.loads
            # none in wait, but standing there: an interrupt came just after they were adopted
            is_current = loads == self._loads or (not loads and self._cursor.place == self._start)
        if not is_current:
            raise StaleIteratorError(
                "a state was loaded while this iterator was running: start a new one with iter()"
            )

    def _get_under_way(self) -> None:
        assert self._checks is not None
        self._checks.second_batch()
        self._is_under_way = True

    def _adopt(self) -> None:
        self._cursor.adopt(*self._start)
        self._is_adopted = True

    def _end(self) -> None:
        self._ended = True
        if self._ahead is not None:
            self._ahead.close()
        if self._prepared is not None:
            self._prepared.end()
        if not self._is_adopted:
            self._adopt()
        if not self._is_over:  # its last batch was one that could not be made
            self._cursor.end_epoch(self._start[0])
        self._cursor.end_iteration()
        if self._checks is not None:
            self._checks.end()

    def _count(self, item: WorkItem, made: Made) -> None:
        """Count a batch that is handed over."""
        stats, source = self._loader.stats, item if made.mended is None else made.mended
        if made.mended is not None:
            stats.note_bad(made.mended.bad)
        stats.batches += 1
        stats.samples += source.num_samples if source.valid is None else int(source.valid.sum())
        self._loader._in_hand.take(source)
        if not self._is_adopted:
            self._adopt()
        if self._ahead is not None:
            self._ahead.reached(item)
        self._is_over = item.is_last
        self._cursor.advance(item)  # last: an interrupt before it gives the batch again
        self._place = item.epoch, item.stop
