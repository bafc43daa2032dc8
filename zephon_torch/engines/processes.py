"""torch's own worker processes as an engine: whole batches of the pipeline in each.

torch's DataLoader moves the batches: its watchdog, shared memory and shutdown are the most tested
code there is for that (small tensors go a shorter way, see ``messages.py``, and rows another one,
``ring.py``). It sees a map-style dataset whose keys are windows of work items.
"""

from __future__ import annotations

import signal
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from typing import Any

import torch
import torch.utils.data

from zephon_torch.engines.leash import GRACE_SECONDS, Leash, signals_held, start_helpers
from zephon_torch.engines.messages import PrivateGenerator, cannot_import, cannot_start
from zephon_torch.engines.ring import RowRing, make_ring
from zephon_torch.engines.worker_side import Batches, Beginning, Counted, Failure, InRing, Task
from zephon_torch.errors import DatasetError, WorkerError
from zephon_torch.io.datasets.dataset import Dataset
from zephon_torch.nodes.batches import Made
from zephon_torch.nodes.pipeline import Pipeline
from zephon_torch.nodes.windows import Windows
from zephon_torch.work.sharing.items import WorkItem

_WORKER_DIED = "DataLoader worker"  # how torch's messages begin
_TIMED_OUT = "DataLoader timed out"
_DEATH_SEEN_WITHIN = 2.0  # seconds
_TORCH_PREFETCH = 2  # torch's default


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
    """Worker processes, each running whole batches of the pipeline.

    Attributes:
        is_sound: False while torch's iterator runs. An interrupt leaves it so: a batch may be lost
            or half read from a pipe, and torch would wait for it for ever. The processes are then
            replaced, persistent or not.
    """

    def __init__(self, pipeline: Pipeline, windows: Windows, options: WorkerOptions) -> None:
        self._pipeline, self._options = pipeline, options
        self._ring: RowRing | None = None
        self._windows = windows
        self._feed = _Feed()
        self._beginning = Beginning(options.worker_init_fn)
        self._leash: Leash | None = None
        self.is_sound = True
        # a private one: iter() of torch's loader would draw from the global generator
        self._generator = PrivateGenerator()
        self._loader: torch.utils.data.DataLoader[Any] | None = None
        # weak: an iterator that nobody holds any more ends its processes
        self._iterator: weakref.ref[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "_feed": _Feed(),
            "_beginning": Beginning(self._options.worker_init_fn),
            "_leash": None,
            "_loader": None,
            "_iterator": None,
            "_ring": None,
        }

    def run(self, items: Iterator[WorkItem], seed: int, batch_size: int) -> _WorkerRun:
        """Begin a pass; starts the processes, or wakes the persistent ones.

        `seed` seeds the workers' global generators, as torch does from its own global one.
        """
        if not self.is_sound:
            self.close()
        elif not self._options.persistent_workers:
            self._shut_down()
        self._generator.manual_seed(seed)
        self._feed.handing = _Handing(self._windows.cut(items, batch_size))
        if self._loader is None:
            self._loader = self._make_loader(batch_size)
        iterator = self._start(self._loader)
        self._iterator = weakref.ref(iterator)
        run = _WorkerRun(self, self._pipeline, self._ring, iterator, self._feed.handing.out)
        if self._leash is not None and not self._options.persistent_workers:
            # nobody holds the run any more: torch ends its processes in a __del__, after this
            weakref.finalize(run, self._leash.let_go).atexit = False
        return run

    def _make_loader(self, batch_size: int) -> torch.utils.data.DataLoader[Any]:
        options, batches = self._options, self._windows.batches(batch_size)
        prefetch = options.prefetch_factor
        if prefetch is not None:
            prefetch = max(1, prefetch // batches)
        num_outstanding = options.num_workers * (prefetch or _TORCH_PREFETCH)
        if not options.pin_memory:  # torch pins what comes through its queue
            self._ring = make_ring(self._pipeline, batches * batch_size, num_outstanding)
        return torch.utils.data.DataLoader(
            Batches(self._pipeline, self._ring),
            batch_size=None,
            sampler=self._feed,
            collate_fn=_as_is,
            generator=self._generator,
            num_workers=options.num_workers,
            prefetch_factor=prefetch,
            pin_memory=options.pin_memory,
            timeout=options.timeout,
            worker_init_fn=self._beginning,
            multiprocessing_context=options.multiprocessing_context,
            persistent_workers=options.persistent_workers,
        )

    def _start(self, loader: torch.utils.data.DataLoader[Any]) -> Any:
        self.is_sound = False
        wakes = self._options.persistent_workers and self._running() is not None
        try:
            if wakes:
                iterator = iter(loader)
            else:
                iterator = self._start_processes(loader)
        except Exception as error:
            if _tells_of_death(error):  # a persistent worker died between two runs
                raise self.died(error) from error
            told = cannot_start(error, self._sent())
            if told is not None:
                raise told from error
            raise
        self.is_sound = True
        return iterator

    def _start_processes(self, loader: torch.utils.data.DataLoader[Any]) -> Any:
        start_helpers(self._options.multiprocessing_context)
        self._leash = leash = Leash()
        self._beginning.reader = leash.reader
        try:
            with signals_held():
                iterator: Any = iter(loader)
                leash.hold(iterator._workers)
        except BaseException:
            leash.let_go()  # of those that were started; nothing else would end them
            raise
        return iterator

    def _sent(self) -> dict[str, Any]:
        """The parts that each worker is sent, under the names that the user knows."""
        transform = self._pipeline.transform
        return {
            "transform": None if transform is None else transform.function,
            "collate_fn": self._pipeline.collate.function,
            "worker_init_fn": self._options.worker_init_fn,
            **{f"dataset {dataset.name!r}": dataset for dataset in self._pipeline.fetcher.datasets},
        }

    def died(self, error: Exception) -> WorkerError:
        """Return the error for a worker's death; a later run starts new processes."""
        by_bus_error = self._bus_error()
        self.close()
        told = WorkerError(f"a worker process died ({error}): {self._cause(by_bus_error)}")
        told.__cause__ = error
        return told

    def _cause(self, by_bus_error: bool) -> str:
        """Why a worker died, as far as can be known, and what to do."""
        go_on = "Start a new iterator; a saved state goes on at the next sample"
        if by_bus_error and (change := _changed_file(self._pipeline.fetcher.datasets)):
            return (
                f"a file was cut short or written over while the worker read it ({change}). {go_on}"
            )
        return cannot_import(self._sent(), self._options.multiprocessing_context) or (
            "it may have run out of memory, been killed, or failed on its way (then it wrote why "
            f"on stderr). {go_on}"
        )

    def _bus_error(self) -> bool:
        """Whether a worker died of a map whose file ends before the place that it touched."""
        workers = getattr(self._running(), "_workers", ())
        return any(worker.exitcode == -signal.SIGBUS for worker in workers)

    def _running(self) -> Any:
        """The iterator of torch, if anybody holds it."""
        return self._iterator() if self._iterator is not None else None

    def _shut_down(self) -> None:
        """End the processes, the way torch does; those that do not end are killed."""
        iterator = self._running()
        if iterator is None or self._leash is None:  # torch has ended them in its __del__
            return
        try:
            with self._leash.killed_after(GRACE_SECONDS):
                iterator._shutdown_workers()
        except RuntimeError as error:
            # One crashed before or on its way out: it was to end anyway. torch's handler of the
            # signal says so once for all processes of an iterator, and the others are ended.
            if not _tells_of_death(error):
                raise

    def give_up(self, results: Any) -> None:
        """End the processes behind a run, if they serve no other one."""
        if not self._options.persistent_workers and results is self._running():
            self._shut_down()

    def close(self) -> None:
        """End the processes."""
        self.is_sound = False  # until it is done: an interrupt may come
        self._shut_down()
        self._loader = self._iterator = self._ring = None
        self.is_sound = True


def _tells_of_death(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and str(error).startswith(_WORKER_DIED)


def _changed_file(datasets: Sequence[Dataset]) -> DatasetError | None:
    """The first local file that is not as it was; workers map such."""
    for dataset in datasets:
        for shard in range(dataset.num_shards):
            try:
                if dataset.remote_file(shard) is None:
                    dataset.check_unchanged(shard)
            except DatasetError as error:
                return error
    return None


class _WorkerRun:
    """Pairs what comes back from the workers with the items that went out, in order."""

    def __init__(
        self,
        engine: WorkerEngine,
        pipeline: Pipeline,
        ring: RowRing | None,
        results: Any,
        handed_out: deque[Sequence[WorkItem]],
    ) -> None:
        self._engine, self._pipeline, self._ring = engine, pipeline, ring
        self._results, self._handed_out = results, handed_out
        self._ready: deque[tuple[WorkItem, Any]] = deque()
        self._over: Exception | None = None  # why the processes have ended

    def __next__(self) -> tuple[WorkItem | None, Made | Exception]:
        if not self._ready:
            error = self._over or self._take_window()
            if error is not None:
                return None, error
        item, result = self._ready.popleft()
        if isinstance(result, Made):
            return item, result
        if isinstance(result, Failure):
            return item, result.exception()
        return item, self._pipeline.finish_or_why_not(item, result)

    def _take_window(self) -> Exception | None:
        """Wait for the next window; returns what is no batch's own."""
        self._engine.is_sound = False
        try:
            results = next(self._results)
        except StopIteration:
            self._engine.is_sound = True
            raise
        except (RuntimeError, OSError, EOFError) as error:
            return self._of_no_batch(error)
        self._engine.is_sound = True
        copies = self._pipeline.fetcher.copies
        if copies is not None and isinstance(results, Counted):
            results, counts = results
            copies.stats.add(counts)
        if isinstance(results, InRing):
            assert self._ring is not None
            results = self._ring.get(*results)
        elif isinstance(results[0], Failure) and not results[0].is_of_batch:
            self._engine.close()
            self._over = results[0].exception()
            return self._over
        self._ready.extend(zip(self._handed_out.popleft(), results, strict=True))
        return None

    def _of_no_batch(self, error: Exception) -> Exception:
        """Return an error of torch's iterator if no batch is lost by it; else raise it."""
        if str(error).startswith(_TIMED_OUT):
            self._engine.is_sound = True
            return error
        if not self._is_death(error):
            raise error
        self._over = self._engine.died(error)
        return self._over

    def _is_death(self, error: Exception) -> bool:
        """Whether a worker's death is behind it: also one in the middle of handing a batch over."""
        if isinstance(error, RuntimeError):
            return _tells_of_death(error)
        # a batch that cannot be fetched: its worker may be about to be seen as dead
        sentinels = [worker.sentinel for worker in getattr(self._results, "_workers", ())]
        return bool(wait(sentinels, timeout=_DEATH_SEEN_WITHIN)) if sentinels else False

    def close(self) -> None:
        self._engine.give_up(self._results)
        self._results = iter(())
        self._handed_out.clear()
        self._ready.clear()


class _Handing:
    """Makes tasks of windows and notes what goes out."""

    def __init__(self, windows: Iterator[Sequence[WorkItem]]) -> None:
        self._windows = enumerate(windows)
        self.out: deque[Sequence[WorkItem]] = deque()

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        task = Task(*next(self._windows))
        self.out.append(task.items)
        return task


class _Feed:
    """A sampler for torch's loader: the tasks of the current run."""

    handing: _Handing

    def __iter__(self) -> Iterator[Task]:
        return self.handing


def _as_is(result: Any) -> Any:
    return result
