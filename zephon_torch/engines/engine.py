"""Runs the pipeline over ordered work items: inline, in threads, or in worker processes.

The three engines give the same batches in the same order; they hold no state of the run, so a run
may change its engine at any resume. Threads are started here, processes in ``processes.py``, and
nowhere else. What crosses to them is a work item, what comes back is a whole batch.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeAlias

from zephon_torch.engines.processes import WorkerEngine, WorkerOptions
from zephon_torch.nodes.batches import Made
from zephon_torch.nodes.pipeline import Pipeline
from zephon_torch.nodes.windows import FOR_CALLER, FOR_READER, FOR_USER_CODE, FOR_WORKER, Windows
from zephon_torch.support import waits
from zephon_torch.work.sharing.items import WorkItem

_Window: TypeAlias = Sequence[WorkItem]


class Run(Protocol):
    """One pass over work items.

    ``next()`` gives (item, batch) in order, or (item, error) with what reading or user code raised
    on it, and then goes on with the item after it. (None, error) is an error of no batch: nothing
    is lost. What ``next()`` *raises*, such as an interrupt (Ctrl-C), leaves a run in the middle of
    something: it is given up, and another one begins at the same item.
    """

    def __next__(self) -> tuple[WorkItem | None, Made | Exception]:
        """Return the next item's batch or error; StopIteration after the last."""
        ...

    def close(self) -> None:
        """Give up what was prefetched."""
        ...


class Engine(Protocol):
    """Makes runs."""

    def run(self, items: Iterator[WorkItem], seed: int, batch_size: int) -> Run:
        """Begin a pass over work items.

        Args:
            items: them.
            seed: for global generators of processes it starts.
            batch_size: samples of an item, but for an incomplete last one.
        """
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
        depth: batches in flight, for each worker where there are any; None: 2 windows, or with
            several threads some more than these.
        workers: worker processes, if their number is not 0.
    """
    formats = {dataset.format for dataset in pipeline.fetcher.datasets}
    is_inline = num_threads == 0 or (num_threads is None and formats <= _IN_MEMORY)
    finish_here = num_threads is None
    if workers.num_workers:
        most = FOR_USER_CODE if pipeline.has_user_code else FOR_WORKER
    elif is_inline:
        most = FOR_CALLER
    else:
        most = FOR_READER if finish_here or not pipeline.has_user_code else FOR_USER_CODE
    windows = Windows.over(pipeline.fetcher, most)
    if depth is not None:
        windows = windows.at_most(depth // 2)
    if workers.num_workers:
        return WorkerEngine(pipeline, windows, workers)
    if is_inline:
        return InlineEngine(pipeline, windows)
    return ThreadEngine(
        pipeline, windows, num_threads=num_threads or 1, depth=depth, finish_here=finish_here
    )


class InlineEngine:
    """Everything in the caller's thread, one batch at a time.

    Args:
        pipeline: what to run.
        windows: of batches that are read together; each is finished when it is asked for.
    """

    def __init__(self, pipeline: Pipeline, windows: Windows) -> None:
        self._pipeline, self._windows = pipeline, windows

    def run(self, items: Iterator[WorkItem], seed: int, batch_size: int) -> Run:
        """Begin a pass."""
        return _InlineRun(self._pipeline, self._windows.cut(items, batch_size))

    def close(self) -> None:
        """Nothing to end."""


class _InlineRun:
    def __init__(self, pipeline: Pipeline, windows: Iterator[Sequence[WorkItem]]) -> None:
        self._pipeline, self._windows = pipeline, windows
        self._ready: deque[tuple[WorkItem, Any]] = deque()
        self._stop = threading.Event()

    def __next__(self) -> tuple[WorkItem, Made | Exception]:
        if not self._ready:
            items = next(self._windows)
            with waits.wanted_until(self._stop.is_set):
                placed = self._pipeline.place_window(items)
            self._ready.extend(zip(items, placed, strict=True))
        item, read = self._ready.popleft()
        if isinstance(read, Exception):
            return item, read
        return item, self._pipeline.finish_or_why_not(item, read)

    def close(self) -> None:
        self._stop.set()
        self._ready.clear()


class ThreadEngine:
    """Background threads of this process, some windows ahead.

    Args:
        pipeline: what to run.
        windows: of batches that a thread makes in one go.
        num_threads: threads.
        depth: batches in flight; None: 2 windows, or with several threads some more than these.
        finish_here: run user code (transform, collate) in the consumer's thread, so that only
            reading and decoding happen beside it. User code in a thread would race with the model
            for global random state, and would miss the consumer's grad and autocast modes.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        windows: Windows,
        *,
        num_threads: int,
        depth: int | None,
        finish_here: bool,
    ) -> None:
        self._pipeline, self._windows = pipeline, windows
        self._num_threads, self._depth, self._finish_here = num_threads, depth, finish_here
        self._pool: ThreadPoolExecutor | None = None
        self._pid = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pool": None}

    def run(self, items: Iterator[WorkItem], seed: int, batch_size: int) -> Run:
        """Begin a pass."""
        windows, threads = self._windows.cut(items, batch_size), self._num_threads
        if self._depth is None:
            depth = _DEPTH if threads == 1 else threads + 2 + threads // 4
        else:
            depth = max(1, self._depth // self._windows.batches(batch_size))
        return _ThreadRun(self, self._pipeline, windows, depth, self._finish_here)

    def submit(
        self, function: Callable[[_Window], Any], window: _Window, stop: threading.Event
    ) -> Future[Any]:
        """Queue one call, given up once an event is set.

        The pool is made anew after a fork, where its threads do not exist.
        """
        if self._pool is None or self._pid != os.getpid():
            self._pid = os.getpid()
            self._pool = ThreadPoolExecutor(self._num_threads, thread_name_prefix="zephon-reader")
        return self._pool.submit(_unless_over, function, window, stop)

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
        windows: Iterator[_Window],
        depth: int,
        finish_here: bool,
    ) -> None:
        self._engine, self._pipeline, self._windows = engine, pipeline, windows
        self._function = pipeline.read_window if finish_here else pipeline.make_window
        self._depth, self._finish_here = depth, finish_here
        self._in_flight: deque[tuple[_Window, Future[Any]]] = deque()
        self._ready: deque[tuple[WorkItem, Any]] = deque()
        self._pid = os.getpid()
        self._stop = threading.Event()
        # whoever drops the run wants no more
        weakref.finalize(self, _give_up, self._in_flight, self._stop)

    def __next__(self) -> tuple[WorkItem, Made | Exception]:
        if not self._ready:
            self._take_window()
        item, result = self._ready.popleft()
        if not self._finish_here or isinstance(result, Exception):
            return item, result
        return item, self._pipeline.finish_or_why_not(item, result)

    def _take_window(self) -> None:
        """Wait for the next window, after seeing to it that others follow."""
        if self._pid != os.getpid():
            self._submit_again()
        while len(self._in_flight) < self._depth:
            window = next(self._windows, None)
            if window is None:
                break
            self._in_flight.append((window, self._submit(window)))
        if not self._in_flight:
            raise StopIteration
        window, future = self._in_flight.popleft()
        failure = future.exception()  # in no `try`: a signal's handler may raise while this waits
        results = future.result() if failure is None else _of_each(failure, window)
        self._ready.extend(zip(window, results, strict=True))

    def _submit_again(self) -> None:
        """After a fork: what was in flight belongs to threads that this process does not have."""
        self._pid = os.getpid()
        windows = [window for window, _ in self._in_flight]
        self._in_flight.clear()
        for window in windows:
            self._in_flight.append((window, self._submit(window)))

    def _submit(self, window: _Window) -> Future[Any]:
        return self._engine.submit(self._function, window, self._stop)

    def close(self) -> None:
        self._ready.clear()
        _give_up(self._in_flight, self._stop)


def _of_each(failure: BaseException, window: _Window) -> list[Exception]:
    """An exception of all batches; what is no batch's own is raised."""
    if not isinstance(failure, Exception):
        raise failure
    return [failure] * len(window)


def _give_up(in_flight: deque[tuple[_Window, Future[Any]]], stop: threading.Event) -> None:
    stop.set()
    while in_flight:
        in_flight.popleft()[1].cancel()


def _unless_over(function: Callable[[_Window], Any], window: _Window, stop: threading.Event) -> Any:
    """Call, but not while the interpreter exits: it would wait for all that is queued."""
    if stop.is_set() or waits.is_exiting():
        raise CancelledError
    with waits.wanted_until(stop.is_set):
        return function(window)
