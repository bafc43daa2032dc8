"""Iterating a loader's batches for something else than the run: nothing moves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from zephon_torch.arithmetic.permutation import text_key
from zephon_torch.engine import Run
from zephon_torch.prepared import on_device
from zephon_torch.settings import engine_of, pins_here

if TYPE_CHECKING:
    from zephon_torch.loader import DataLoader


class Uncounted:
    """Batches of a loader that do not count. Each iteration begins where the run stands then.

    Args:
        loader: the loader.
        num_batches: of those that come next, at most; None: all of the current epoch.
    """

    def __init__(self, loader: DataLoader, num_batches: int | None = None) -> None:
        self._loader, self._num_batches = loader, num_batches

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
            return loader.epoch, 0
        live = None if loader._live is None else loader._live()
        if live is not None and live.goes_on:
            assert live.position is not None
            return live.position
        return loader._cursor.begin()

    def __repr__(self) -> str:
        what = "epoch" if self._num_batches is None else f"next {self._num_batches} batches"
        return f"Uncounted({what} of {self._loader!r})"


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
