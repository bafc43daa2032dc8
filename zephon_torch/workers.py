"""torch's own worker processes as an engine: whole batches of the pipeline in each.

torch's DataLoader moves the batches: its watchdog, shared memory and shutdown are the most tested
code there is for that. It sees a map-style dataset whose keys are work items.
"""

from __future__ import annotations

import io
import pickle
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from typing import Any

import torch
import torch.utils.data
from torch._utils import ExceptionWrapper

from zephon_torch.errors import WorkerError
from zephon_torch.nodes.made import Made
from zephon_torch.nodes.pipeline import Pipeline
from zephon_torch.work.splitter import WorkItem

_WORKER_DIED = "DataLoader worker"  # how torch's message begins
_DEATH_SEEN_WITHIN = 2.0  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Options of torch's DataLoader for its worker processes, under torch's names."""

    num_workers: int
    prefetch_factor: int | None
    pin_memory: bool
    timeout: float
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: str | BaseContext | None
    persistent_workers: bool


class WorkerEngine:
    """Worker processes, each running whole batches of the pipeline."""

    def __init__(self, pipeline: Pipeline, options: WorkerOptions) -> None:
        self._pipeline, self._options = pipeline, options
        self._feed = _Feed()
        # a private one: iter() of torch's loader would draw from the global generator
        self._generator = torch.Generator()
        self._loader: torch.utils.data.DataLoader[Any] | None = None
        # weak: an iterator that nobody holds any more ends its processes
        self._iterator: weakref.ref[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_feed": _Feed(), "_loader": None, "_iterator": None}

    def run(self, items: Iterator[WorkItem], seed: int) -> _WorkerRun:
        """Begin a pass; starts the processes, or wakes the persistent ones.

        `seed` seeds the workers' global generators, as torch does from its own global one.
        """
        self._generator.manual_seed(seed)
        self._feed.handing = _Handing(items)
        if self._loader is None:
            self._loader = self._make_loader()
        elif not self._options.persistent_workers:
            self._shut_down()
        try:
            iterator = iter(self._loader)
        except RuntimeError as error:  # a persistent worker died between two runs
            if str(error).startswith(_WORKER_DIED):
                raise self.died(error) from error
            raise
        self._iterator = weakref.ref(iterator)
        return _WorkerRun(self, self._pipeline, iterator, self._feed.handing.out)

    def _make_loader(self) -> torch.utils.data.DataLoader[Any]:
        options = self._options
        return torch.utils.data.DataLoader(
            _Batches(self._pipeline),
            batch_size=None,
            sampler=self._feed,
            collate_fn=_as_is,
            generator=self._generator,
            num_workers=options.num_workers,
            prefetch_factor=options.prefetch_factor,
            pin_memory=options.pin_memory,
            timeout=options.timeout,
            worker_init_fn=options.worker_init_fn,
            multiprocessing_context=options.multiprocessing_context,
            persistent_workers=options.persistent_workers,
        )

    def died(self, error: Exception) -> WorkerError:
        """What to raise after a worker's death; a later run starts new processes."""
        for _ in range(self._options.num_workers + 1):
            try:
                self.close()
                break
            except RuntimeError:  # torch's signal handler raises until each dead worker is reaped
                continue
        return WorkerError(
            f"a worker process died ({error}): it may have run out of memory or been killed. Start "
            "a new iterator; a saved state goes on at the next sample"
        )

    def _shut_down(self) -> None:
        iterator = self._iterator() if self._iterator is not None else None
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down is None:  # torch's iterator otherwise ends them in its __del__
            return
        try:
            shut_down()
        except RuntimeError as error:  # a worker crashed on its way out: it was to end anyway
            if not str(error).startswith(_WORKER_DIED):
                raise

    def close(self) -> None:
        """End the processes."""
        self._shut_down()
        self._loader = None


class _WorkerRun:
    """Pairs what comes back from the workers with the items that went out, by their start.

    What torch's iterator itself raises (a time-out, a signal handler's exception in the middle of
    it) belongs to no batch. If it makes torch lose a batch, that one is made here.
    """

    def __init__(
        self, engine: WorkerEngine, pipeline: Pipeline, results: Any, handed_out: deque[WorkItem]
    ) -> None:
        self._engine, self._pipeline, self._results = engine, pipeline, results
        self._handed_out = handed_out
        self._early: _Result | None = None
        self._dead: WorkerError | None = None

    def __next__(self) -> tuple[WorkItem, Any]:
        if self._dead is not None:
            raise self._dead
        if self._early is None:
            self._early = self._receive()
        if not self._handed_out:
            raise StopIteration
        item = self._handed_out[0]
        try:
            if self._early is None or self._early.start != item.start:
                batch = self._pipeline(item)
            else:
                result, self._early = self._early, None
                batch = result.made_or_raise(item)
        except Exception:
            self._handed_out.popleft()
            raise
        self._handed_out.popleft()
        return item, batch

    def _receive(self) -> _Result | None:
        try:
            return _Result(*next(self._results))
        except StopIteration:
            return None
        except (RuntimeError, OSError, EOFError) as error:
            if not self._is_death(error):
                raise
            self._dead = self._engine.died(error)
            raise self._dead from error

    def _is_death(self, error: Exception) -> bool:
        """Whether a worker's death is behind it: also one in the middle of handing a batch over."""
        if isinstance(error, RuntimeError):
            return str(error).startswith(_WORKER_DIED)
        # a batch that cannot be fetched: its worker may be about to be seen as dead
        sentinels = [worker.sentinel for worker in getattr(self._results, "_workers", ())]
        return bool(wait(sentinels, timeout=_DEATH_SEEN_WITHIN)) if sentinels else False

    def close(self) -> None:
        self._results = iter(())
        self._handed_out.clear()


@dataclass(frozen=True, slots=True)
class _Result:
    """What a worker made of the item that begins at `start`: a batch or an error."""

    start: int
    data: Any
    rest: tuple[Any, ...] | None
    error: ExceptionWrapper | None

    def made_or_raise(self, item: WorkItem) -> Made:
        if self.error is not None:
            self.error.reraise()  # type: ignore[no-untyped-call]
        rest = (item.pointers, item.valid) if self.rest is None else self.rest
        return Made(self.data, *rest)


class _Handing:
    """Iterates over work items and notes what goes out; goes on after an exception in the items."""

    def __init__(self, items: Iterator[WorkItem]) -> None:
        self._items = items
        self.out: deque[WorkItem] = deque()

    def __iter__(self) -> Iterator[WorkItem]:
        return self

    def __next__(self) -> WorkItem:
        item = next(self._items)
        self.out.append(item)
        return item


class _Feed:
    """What torch takes for a sampler: the work items of the current run."""

    handing: _Handing

    def __iter__(self) -> Iterator[WorkItem]:
        return self.handing


class _Batches(torch.utils.data.Dataset[Any]):
    """What torch takes for a map-style dataset: its keys are work items.

    Its values are (start, data, rest, error). `rest` is what else was made, None where that is the
    item's own: it need not travel back. An error travels as a value, so that it stays with its
    batch whatever else torch's iterator raises.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._is_checked = False

    def __getitem__(self, item: WorkItem) -> tuple[int, Any, Any, ExceptionWrapper | None]:
        try:
            made = self._pipeline(item)
            if not self._is_checked:
                _check_it_can_be_sent(made)
                self._is_checked = True
            data, *rest = made
            return item.start, data, None if made.pointers is item.pointers else rest, None
        except Exception:
            worker = torch.utils.data.get_worker_info()
            where = f"in DataLoader worker process {worker.id if worker else 0}"
            error = ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]
            return item.start, None, None, error


class _WithoutTensors(pickle.Pickler):
    """Pickles all but tensors, which torch sends in ways of its own."""

    def reducer_override(self, obj: Any) -> Any:
        return (int, ()) if isinstance(obj, torch.Tensor) else NotImplemented


def _check_it_can_be_sent(batch: Any) -> None:
    """Raise for a batch that cannot be pickled: torch's queue drops it, and its reader hangs."""
    try:
        _WithoutTensors(io.BytesIO()).dump(batch)
    except Exception as error:
        raise WorkerError(
            f"a batch cannot be sent from its worker process ({type(error).__name__}: {error}): "
            "let transform and collate_fn return tensors and plain values, or use num_workers=0"
        ) from error


def _as_is(result: Any) -> Any:
    return result
