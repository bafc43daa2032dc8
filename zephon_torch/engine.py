"""Runs the pipeline over ordered work items: inline, in threads, or in worker processes.

The three engines give the same batches in the same order; they hold no state of the run, so a run
may change its engine at any resume. Threads are started here, processes in ``workers.py``, and
nowhere else. What crosses to them is a work item, what comes back is a whole batch.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Protocol

from zephon_torch.nodes.made import Made
from zephon_torch.nodes.pipeline import Pipeline
from zephon_torch.work.splitter import WorkItem
from zephon_torch.workers import WorkerEngine, WorkerOptions


class Run(Protocol):
    """One pass over work items.

    ``next()`` gives (item, batch) in order, or (item, error) with what reading or user code raised
    on it, and then goes on with the item after it. (None, error) is an error of no batch: nothing
    is lost. What ``next()`` *raises*, such as an interrupt (Ctrl-C), leaves a run in the middle of
    something: it is given up, and another one begins at the same item.
    """

    def __next__(self) -> tuple[WorkItem | None, Made | Exception]:
        """What became of the next item; StopIteration after the last."""
        ...

    def close(self) -> None:
        """Give up what was prefetched."""
        ...


class Engine(Protocol):
    """Makes runs."""

    def run(self, items: Iterator[WorkItem], seed: int) -> Run:
        """Begin a pass over work items; `seed` is for global generators of processes it starts."""
        ...

    def close(self) -> None:
        """End all threads and processes; a later run starts new ones."""
        ...


_IN_MEMORY = {"memory", "torch"}  # formats for which a thread of our own would gain nothing
_DEPTH = 2


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

    def run(self, items: Iterator[WorkItem], seed: int) -> Run:
        """Begin a pass."""
        return _InlineRun(self._pipeline, items)

    def close(self) -> None:
        """Nothing to end."""


class _InlineRun:
    def __init__(self, pipeline: Pipeline, items: Iterator[WorkItem]) -> None:
        self._pipeline, self._items = pipeline, items

    def __next__(self) -> tuple[WorkItem, Made | Exception]:
        item = next(self._items)
        try:
            return item, self._pipeline(item)
        except Exception as error:
            return item, error

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

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pool": None}

    def run(self, items: Iterator[WorkItem], seed: int) -> Run:
        """Begin a pass."""
        return _ThreadRun(self, self._pipeline, items, self._depth, self._finish_here)

    def submit(self, function: Callable[[WorkItem], Any], item: WorkItem) -> Future[Any]:
        """Queue one call. The pool is made anew after a fork, where its threads do not exist."""
        if self._pool is None or self._pid != os.getpid():
            self._pid = os.getpid()
            self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="zephon-reader")
        return self._pool.submit(_unless_exiting, function, item)

    def close(self) -> None:
        """Wait for the batches in flight and end the threads."""
        pool, self._pool = self._pool, None  # first: an interrupt may end the waiting
        if pool is not None and self._pid == os.getpid():
            pool.shutdown(wait=True, cancel_futures=True)


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
        self._pid = os.getpid()
        weakref.finalize(self, _cancel, self._in_flight)  # whoever drops the run wants no more

    def __next__(self) -> tuple[WorkItem, Made | Exception]:
        if self._pid != os.getpid():
            self._submit_again()
        while len(self._in_flight) < self._depth:
            item = next(self._items, None)
            if item is None:
                break
            self._in_flight.append((item, self._engine.submit(self._function, item)))
        if not self._in_flight:
            raise StopIteration
        item, future = self._in_flight.popleft()
        failure = future.exception()  # in no `try`: a signal's handler may raise while this waits
        if isinstance(failure, Exception):
            return item, failure
        if not self._finish_here or failure is not None:
            return item, future.result()
        try:
            return item, self._pipeline.finish(item, future.result())
        except Exception as error:
            return item, error

    def _submit_again(self) -> None:
        """After a fork: what was in flight belongs to threads that this process does not have."""
        self._pid = os.getpid()
        items = [item for item, _ in self._in_flight]
        self._in_flight.clear()
        self._in_flight.extend((item, self._engine.submit(self._function, item)) for item in items)

    def close(self) -> None:
        _cancel(self._in_flight)


def _cancel(in_flight: deque[tuple[WorkItem, Future[Any]]]) -> None:
    while in_flight:
        in_flight.popleft()[1].cancel()


def _unless_exiting(function: Callable[[WorkItem], Any], item: WorkItem) -> Any:
    """Call, but not while the interpreter exits: it would wait for all that is queued."""
    if not threading.main_thread().is_alive():
        raise CancelledError
    return function(item)
