"""Iterating a loader's batches for something else than the run: nothing moves."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from zephon_torch.arithmetic.permutation import text_key
from zephon_torch.bridges.accelerate import on_device
from zephon_torch.engines.engine import Run
from zephon_torch.errors import StorageError
from zephon_torch.loader.settings import engine_of, pins_here
from zephon_torch.support import checks
from zephon_torch.work.identity.progress import MAX_EPOCH

if TYPE_CHECKING:
    from zephon_torch.loader.loader import DataLoader


def batch_of(loader: DataLoader, step: int, epoch: int | None) -> Any:
    """The batch of one step, made in this process; see ``DataLoader.batch``."""
    loader._settle()
    step, epoch = checks.integer("step", step), _checked_epoch(epoch)
    num_steps = loader._splitter.num_steps
    if step < -len(loader) if step < 0 else step >= num_steps:
        raise IndexError(f"step {step} of an epoch of {num_steps} steps")
    step = step + len(loader) if step < 0 else step
    item = loader._splitter.item(step, loader.epoch if epoch is None else epoch)
    return loader._pipeline(item).data


class Uncounted:
    """Batches of a loader that do not count. Each iteration begins where the run stands then.

    Args:
        loader: the loader.
        num_batches: of those that come next, at most; None: all of an epoch.
        epoch: which one; None: the current one.
    """

    def __init__(
        self, loader: DataLoader, *, num_batches: int | None = None, epoch: int | None = None
    ) -> None:
        self._loader, self._epoch = loader, _checked_epoch(epoch)
        if num_batches is not None:
            num_batches = checks.integer("num_batches", num_batches, minimum=0)
        self._num_batches = num_batches

    def __iter__(self) -> UncountedIteration:
        self._loader._settle()
        return UncountedIteration(self._loader, self._place(), self._num_batches)

    def __len__(self) -> int:
        """Batches that iterating gives.

        Raises:
            TypeError: an epoch that never ends, of which all are asked for.
        """
        loader = self._loader
        if self._num_batches is None:
            return len(loader)
        loader._settle()
        left = loader._splitter.steps_between(self._place()[1], loader.source.total_samples)
        return int(min(left, self._num_batches))

    def _place(self) -> tuple[int, int]:
        """Epoch and delivered samples ahead of the first batch."""
        loader = self._loader
        if self._num_batches is None:
            return loader.epoch if self._epoch is None else self._epoch, 0
        live = None if loader._live is None else loader._live()
        if live is not None and live.goes_on:
            assert live.position is not None
            return live.position
        return loader._cursor.begin()

    def __repr__(self) -> str:
        what = "epoch" if self._num_batches is None else f"next {self._num_batches} batches"
        return f"Uncounted({what} of {self._loader!r})"


def _checked_epoch(epoch: int | None) -> int | None:
    if epoch is None:
        return None
    return checks.integer("epoch", epoch, minimum=0, maximum=MAX_EPOCH)


class UncountedIteration(Iterator[Any]):
    """One pass over such batches, through an engine of its own: the loader's may be running.

    Args:
        loader: the loader.
        place: epoch and delivered samples ahead of the first batch.
        num_batches: batches at most; None: to the end of the epoch.
    """

    def __init__(self, loader: DataLoader, place: tuple[int, int], num_batches: int | None) -> None:
        self._loader, self._place, self._left = loader, place, num_batches
        self._engine = engine_of(loader, persistent_workers=False)
        self._run: Run | None = None
        self._ended, self._pins = False, pins_here(loader, stacklevel=3)
        if loader._uncounted is None:
            loader._uncounted = weakref.WeakSet()
        loader._uncounted.add(self)

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        run, self._run = self._run or self._run_on(), None
        try:
            item, made = run.__next__()
        except StopIteration:
            self._ended = True
            self._engine.close()
            raise
        if isinstance(made, StorageError):  # the batch is tried again, as that of a loop
            run.close()
            raise made
        if item is not None:
            self._place = item.epoch, item.stop
            self._left = None if self._left is None else self._left - 1
        self._run = run  # only now: an interrupt leaves a run in the middle, and another goes on
        if isinstance(made, Exception):
            raise made
        return self._handed_over(made.data)

    def close(self) -> None:
        """End threads and processes; a later ``next()`` goes on at its place, with new ones."""
        if self._run is not None:
            self._run.close()
        self._run = None
        self._engine.close()

    def _run_on(self) -> Run:
        splitter = self._loader._splitter
        words = (splitter.seed, splitter.rank, *self._place)
        seed = text_key("zephon_torch/uncounted/1", *map(str, words)) >> 1
        items = islice(splitter.items(*self._place), self._left)
        return self._engine.run(items, seed, splitter.batch_size)

    def _handed_over(self, batch: Any) -> Any:
        if self._pins:
            batch = torch.utils.data._utils.pin_memory.pin_memory(batch)  # type: ignore[no-untyped-call]
        return on_device(batch) if self._loader._cursor.is_prepared else batch
