"""Runs the pipeline over ordered work items: inline, in threads, or in worker processes.

The three engines give the same batches in the same order; they hold no state of the run, so a run
may change its engine at any resume. This file is the only one that starts threads or processes.
What crosses to a thread or process is a work item, what comes back is a whole batch.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any, Protocol

import torch
import torch.utils.data
from torch._utils import ExceptionWrapper

from zephon_torch.errors import WorkerError
from zephon_torch.nodes.pipeline import Pipeline
from zephon_torch.work.splitter import WorkItem


class Run(Protocol):
    """One pass over work items.

    ``next()`` gives (item, batch) in order. What reading or user code raised is raised at the batch
    it belongs to, and the next call goes on with the batch after it. An interrupt (Ctrl-C) loses
    nothing: the next call gives the batch that was interrupted.
    """

    def __next__(self) -> tuple[WorkItem, Any]:
        """The next batch; StopIteration after the last."""
        ...

    def close(self) -> None:
        """Give up what was prefetched."""
        ...


class Engine(Protocol):
    """Makes runs."""

    def run(self, items: Iterator[WorkItem]) -> Run:
        """Begin a pass over work items."""
        ...

    def close(self) -> None:
        """End all threads and processes; a later run starts new ones."""
        ...


_IN_MEMORY = {"memory", "torch"}  # formats for which a thread of our own would gain nothing
_DEPTH = 2
_WORKER_DIED = "DataLoader worker"  # how torch's message begins


def make_engine(
    pipeline: Pipeline, *, num_threads: int | None, depth: int | None, workers: WorkerOptions
) -> Engine:
    """The engine that a loader's arguments ask for.

    Args:
        pipeline: what to run.
        num_threads: None: one thread that reads ahead, or none for datasets in memory; 0: inline;
            N: N threads that also run user code.
        depth: batches in flight; None: 2, or with several threads two more than these.
        workers: worker processes, if their number is not 0.
    """
    if workers.num_workers:
        return WorkerEngine(pipeline, workers)
    formats = {dataset.format for dataset in pipeline.fetcher.datasets}
    if num_threads == 0 or (num_threads is None and formats <= _IN_MEMORY):
        return InlineEngine(pipeline)
    threads = num_threads or 1
    return ThreadEngine(
        pipeline,
        num_threads=threads,
        depth=depth or (_DEPTH if threads == 1 else threads + 2),
        finish_here=num_threads is None,
    )


class InlineEngine:
    """Everything in the caller's thread, one batch at a time."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def run(self, items: Iterator[WorkItem]) -> Run:
        """Begin a pass."""
        return _InlineRun(self._pipeline, items)

    def close(self) -> None:
        """Nothing to end."""


class _InlineRun:
    def __init__(self, pipeline: Pipeline, items: Iterator[WorkItem]) -> None:
        self._pipeline, self._items = pipeline, items
        self._item: WorkItem | None = None

    def __next__(self) -> tuple[WorkItem, Any]:
        if self._item is None:
            self._item = next(self._items)
        item = self._item
        try:
            batch = self._pipeline(item)
        except Exception:
            self._item = None
            raise
        self._item = None
        return item, batch

    def close(self) -> None:
        pass


class ThreadEngine:
    """Background threads of this process, `depth` batches ahead.

    Args:
        pipeline: what to run.
        num_threads: threads.
        depth: batches in flight.
        finish_here: run user code (transform, collate) in the consumer's thread, so that only
            reading and decoding happen beside it. User code in a thread would race with the model
            for global random state, and would miss the consumer's grad and autocast modes.
    """

    def __init__(
        self, pipeline: Pipeline, *, num_threads: int, depth: int, finish_here: bool
    ) -> None:
        self._pipeline, self._num_threads, self._depth = pipeline, num_threads, depth
        self._finish_here = finish_here
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0

    def run(self, items: Iterator[WorkItem]) -> Run:
        """Begin a pass."""
        return _ThreadRun(self, self._pipeline, items, self._depth, self._finish_here)

    def submit(self, function: Callable[[WorkItem], Any], item: WorkItem) -> Future[Any]:
        """Queue one call. The pool is made anew after a fork, where its threads do not exist."""
        if self._pool is None or self._pid != os.getpid():
            self._pid = os.getpid()
            self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="zephon-reader")
        return self._pool.submit(function, item)

    def close(self) -> None:
        """Wait for the batches in flight and end the threads."""
        if self._pool is not None and self._pid == os.getpid():
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool = None


class _ThreadRun:
    def __init__(
        self,
        engine: ThreadEngine,
        pipeline: Pipeline,
        items: Iterator[WorkItem],
        depth: int,
        finish_here: bool,
    ) -> None:
        self._engine, self._pipeline, self._items = engine, pipeline, items
        self._function = pipeline.read if finish_here else pipeline.__call__
        self._depth, self._finish_here = depth, finish_here
        self._in_flight: deque[tuple[WorkItem, Future[Any]]] = deque()

    def __next__(self) -> tuple[WorkItem, Any]:
        while len(self._in_flight) < self._depth:
            item = next(self._items, None)
            if item is None:
                break
            self._in_flight.append((item, self._engine.submit(self._function, item)))
        if not self._in_flight:
            raise StopIteration
        item, future = self._in_flight[0]
        try:
            batch = future.result()
            if self._finish_here:
                batch = self._pipeline.finish(item, batch)
        except Exception:
            self._in_flight.popleft()
            raise
        self._in_flight.popleft()
        return item, batch

    def close(self) -> None:
        while self._in_flight:
            self._in_flight.popleft()[1].cancel()


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
    seed: int


class WorkerEngine:
    """torch's own worker processes, each running whole batches of the pipeline.

    torch's DataLoader moves the batches: its watchdog, shared memory and shutdown are the most
    tested code there is for that. It sees a map-style dataset whose keys are work items.
    """

    def __init__(self, pipeline: Pipeline, options: WorkerOptions) -> None:
        self._pipeline, self._options = pipeline, options
        self._feed = _Feed()
        self._loader: torch.utils.data.DataLoader[Any] | None = None
        # weak: an iterator that nobody holds any more ends its processes
        self._iterator: weakref.ref[Any] | None = None

    def run(self, items: Iterator[WorkItem]) -> Run:
        """Begin a pass; starts the processes, or wakes the persistent ones."""
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
        # a private generator: iter() of torch's loader would draw from the global one
        generator = torch.Generator().manual_seed(options.seed % (1 << 63))
        return torch.utils.data.DataLoader(
            _Batches(self._pipeline),
            batch_size=None,
            sampler=self._feed,
            collate_fn=_as_is,
            generator=generator,
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
        if shut_down is not None:  # torch's iterator otherwise ends them in its __del__
            shut_down()

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
                batch = result.batch_or_raise()
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
        return not all(worker.is_alive() for worker in getattr(self._results, "_workers", ()))

    def close(self) -> None:
        self._results = iter(())
        self._handed_out.clear()


@dataclass(frozen=True, slots=True)
class _Result:
    """What a worker made of the item that begins at `start`: a batch or an error."""

    start: int
    batch: Any
    error: ExceptionWrapper | None

    def batch_or_raise(self) -> Any:
        if self.error is not None:
            self.error.reraise()  # type: ignore[no-untyped-call]
        return self.batch


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

    Its values are (start, batch, error): an error travels as a value, so that it stays with its
    batch whatever else torch's iterator raises.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __getitem__(self, item: WorkItem) -> tuple[int, Any, ExceptionWrapper | None]:
        try:
            return item.start, self._pipeline(item), None
        except Exception:
            worker = torch.utils.data.get_worker_info()
            where = f"in DataLoader worker process {worker.id if worker else 0}"
            error = ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]
            return item.start, None, error


def _as_is(result: Any) -> Any:
    return result
