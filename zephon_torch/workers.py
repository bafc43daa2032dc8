"""torch's own worker processes as an engine: whole batches of the pipeline in each.

torch's DataLoader moves the batches: its watchdog, shared memory and shutdown are the most tested
code there is for that (small tensors go a shorter way, see ``sending.py``). It sees a map-style
dataset whose keys are work items.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any, Self

import torch
import torch.utils.data
from torch._utils import ExceptionWrapper

from zephon_torch.errors import WorkerError
from zephon_torch.nodes.made import Made
from zephon_torch.nodes.pipeline import Pipeline
from zephon_torch.sending import Parcel, cannot_start
from zephon_torch.work.items import WorkItem

_WORKER_DIED = "DataLoader worker"  # how torch's messages begin
_TIMED_OUT = "DataLoader timed out"
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
    """Worker processes, each running whole batches of the pipeline.

    Attributes:
        is_sound: False while torch's iterator runs. An interrupt leaves it so: a batch may be lost
            or half read from a pipe, and torch would wait for it for ever. The processes are then
            replaced, persistent or not.
    """

    def __init__(self, pipeline: Pipeline, options: WorkerOptions) -> None:
        self._pipeline, self._options = pipeline, options
        self._feed = _Feed()
        self.is_sound = True
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
        if not self.is_sound:
            self.close()
        elif not self._options.persistent_workers:
            self._shut_down()
        self._generator.manual_seed(seed)
        self._feed.handing = _Handing(items)
        if self._loader is None:
            self._loader = self._make_loader()
        iterator = self._start(self._loader)
        self._iterator = weakref.ref(iterator)
        return _WorkerRun(self, iterator, self._feed.handing.out)

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
            worker_init_fn=_Beginning(options.worker_init_fn),
            multiprocessing_context=options.multiprocessing_context,
            persistent_workers=options.persistent_workers,
        )

    def _start(self, loader: torch.utils.data.DataLoader[Any]) -> Any:
        self.is_sound = False
        wakes = self._options.persistent_workers and self._running() is not None
        try:
            with nullcontext() if wakes else _interrupts_held():
                iterator = iter(loader)
        except Exception as error:
            if _tells_of_death(error):  # a persistent worker died between two runs
                raise self.died(error) from error
            told = cannot_start(error, self._sent())
            if told is not None:
                raise told from error
            raise
        self.is_sound = True
        return iterator

    def _sent(self) -> dict[str, Any]:
        """What each worker is sent, under the names that the user knows."""
        transform = self._pipeline.transform
        return {
            "transform": None if transform is None else transform.function,
            "collate_fn": self._pipeline.collate.function,
            "worker_init_fn": self._options.worker_init_fn,
            **{f"dataset {dataset.name!r}": dataset for dataset in self._pipeline.fetcher.datasets},
        }

    def died(self, error: Exception) -> WorkerError:
        """What to raise after a worker's death; a later run starts new processes."""
        self.close()
        told = WorkerError(
            f"a worker process died ({error}): it may have run out of memory, been killed, or "
            "failed on its way (then it wrote why on stderr). Start a new iterator; a saved state "
            "goes on at the next sample"
        )
        told.__cause__ = error
        return told

    def _running(self) -> Any:
        """The iterator of torch, if anybody holds it."""
        return self._iterator() if self._iterator is not None else None

    def _shut_down(self) -> None:
        """End the processes, the way torch does."""
        iterator = self._running()
        if iterator is None:  # torch's iterator has ended them in its __del__
            return
        try:
            iterator._shutdown_workers()
        except RuntimeError as error:
            # One crashed before or on its way out: it was to end anyway. torch's handler of the
            # signal says so once for all processes of an iterator, and the others are ended.
            if not _tells_of_death(error):
                raise

    def close(self) -> None:
        """End the processes."""
        self.is_sound = False  # until it is done: an interrupt may come
        self._shut_down()
        self._loader, self._iterator, self.is_sound = None, None, True


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back, also in processes that are started meanwhile, until they ignore it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _tells_of_death(error: Exception) -> bool:
    return isinstance(error, RuntimeError) and str(error).startswith(_WORKER_DIED)


class _WorkerRun:
    """Pairs what comes back from the workers with the items that went out, in order."""

    def __init__(self, engine: WorkerEngine, results: Any, handed_out: deque[WorkItem]) -> None:
        self._engine, self._results, self._handed_out = engine, results, handed_out
        self._over: Exception | None = None  # why the processes have ended

    def __next__(self) -> tuple[WorkItem | None, Made | Exception]:
        if self._over is not None:
            return None, self._over
        self._engine.is_sound = False
        try:
            made = next(self._results)
        except StopIteration:
            self._engine.is_sound = True
            raise
        except (RuntimeError, OSError, EOFError) as error:
            return None, self._of_no_batch(error)
        self._engine.is_sound = True
        if not isinstance(made, _Failure):
            return self._handed_out.popleft(), made
        if made.is_of_batch:
            return self._handed_out.popleft(), made.exception()
        self._engine.close()
        self._over = made.exception()
        return None, self._over

    def _of_no_batch(self, error: Exception) -> Exception:
        """What torch's iterator itself raised, if nothing is lost by it; else it is raised on."""
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
        self._results = iter(())
        self._handed_out.clear()


class _Handing:
    """Iterates over work items and notes what goes out."""

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


@dataclass(frozen=True, slots=True)
class _Failure:
    """An exception in a worker, sent as a value: what torch itself raises is no batch's.

    Attributes:
        error: type, message and the worker's traceback.
        is_of_batch: False: worker_init_fn raised it, so the worker makes no batch at all.
    """

    error: ExceptionWrapper
    is_of_batch: bool

    @classmethod
    def caught(cls, *, is_of_batch: bool = True) -> Self:
        """The exception that is being handled."""
        worker = torch.utils.data.get_worker_info()
        where = f"in DataLoader worker process {worker.id if worker else 0}"
        return cls(ExceptionWrapper(where=where), is_of_batch)  # type: ignore[no-untyped-call]

    @classmethod
    def unsendable(cls, why: str) -> Self:
        """In place of a batch that cannot be sent."""
        try:
            raise WorkerError(
                f"a batch cannot be sent from its worker process ({why}): let transform and "
                "collate_fn return tensors and plain values, or use num_workers=0"
            )
        except WorkerError:
            return cls.caught()

    def of_known_type(self, _why: str) -> Self:
        """In place of itself, where the exception's own class cannot be sent: its words can."""
        self.error.exc_type = WorkerError
        return self

    def exception(self) -> Exception:
        """The exception as it is to be raised."""
        try:
            self.error.reraise()  # type: ignore[no-untyped-call]
        except Exception as error:
            if isinstance(error, self.error.exc_type) or type(error) is RuntimeError:
                return error
        # its class cannot be made from a message
        name, where, text = self.error.exc_type.__name__, self.error.where, self.error.exc_msg
        return RuntimeError(f"Caught {name} {where}.\nOriginal {text}")


class _Batches(torch.utils.data.Dataset[Any]):
    """What torch takes for a map-style dataset: its keys are work items."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self.broken: _Failure | None = None

    @property
    def given(self) -> Any:
        """What the user knows as the dataset, in this process."""
        known = {
            dataset.name: dataset if dataset.samples is None else dataset.samples
            for dataset in self._pipeline.fetcher.datasets
        }
        return known if len(known) > 1 else next(iter(known.values()))

    def __getitem__(self, item: WorkItem) -> Parcel:
        failure = self.broken
        if failure is None:
            try:
                return Parcel(self._pipeline(item), _Failure.unsendable)
            except Exception:
                failure = _Failure.caught()
        return Parcel(failure, failure.of_known_type)


@dataclass(frozen=True, slots=True)
class _Beginning:
    """What a worker process does first: in place of the user's worker_init_fn, which it calls."""

    function: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        # Ctrl-C goes to all processes of a terminal; the main one decides whether these end
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        trainer = multiprocessing.parent_process()
        if trainer is not None and trainer.pid != os.getppid():
            # a fork server stands between them, and torch's watchdog watches that
            threading.Thread(target=_end_with, args=(trainer,), daemon=True).start()
        info = torch.utils.data.get_worker_info()
        assert info is not None
        batches = info.dataset
        assert isinstance(batches, _Batches)
        object.__setattr__(info, "dataset", batches.given)  # of a frozen object
        try:
            if self.function is not None:
                self.function(worker_id)
        except Exception:
            batches.broken = _Failure.caught(is_of_batch=False)


def _end_with(process: BaseProcess) -> None:
    process.join()
    os._exit(1)


def _as_is(result: Any) -> Any:
    return result
