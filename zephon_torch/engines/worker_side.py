"""Code of a worker process: it makes windows of batches; and its first steps.

Exceptions travel back as values: what torch itself raises is no batch's.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.utils.data
from torch._utils import ExceptionWrapper

from zephon_torch.engines import leash
from zephon_torch.engines.messages import Parcel
from zephon_torch.engines.ring import RowRing
from zephon_torch.errors import WorkerError
from zephon_torch.nodes.batches import Made
from zephon_torch.nodes.pipeline import Pipeline
from zephon_torch.work.sharing.items import WorkItem, packed, unpacked


class Task:
    """A window of batches to be made.

    Attributes:
        number: of the window in its run.
        items: its work items.
    """

    def __init__(self, number: int, items: Sequence[WorkItem]) -> None:
        self.number, self.items = number, items

    def __reduce__(self) -> tuple[Any, ...]:
        return _task, (self.number, *packed(self.items))


def _task(number: int, *fields: Any) -> Task:
    return Task(number, unpacked(*fields))


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception in a worker, sent as a value: what torch itself raises is no batch's.

    Attributes:
        error: type, message and the worker's traceback.
        is_of_batch: False: worker_init_fn raised it, so the worker makes no batch at all.
    """

    error: ExceptionWrapper
    is_of_batch: bool

    @classmethod
    def of(cls, error: Exception, *, is_of_batch: bool = True) -> Self:
        """Make the value that is sent for an exception."""
        worker = torch.utils.data.get_worker_info()
        where = f"in DataLoader worker process {worker.id if worker else 0}"
        info = type(error), error, error.__traceback__
        return cls(ExceptionWrapper(info, where), is_of_batch)  # type: ignore[no-untyped-call]

    @classmethod
    def unsendable(cls, why: str) -> Self:
        """In place of a batch that cannot be sent."""
        return cls.of(
            WorkerError(
                f"a batch cannot be sent from its worker process ({why}): let transform and "
                "collate_fn return tensors and plain values, or use num_workers=0"
            )
        )

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


class InRing(NamedTuple):
    """Sent in place of batches whose rows stand in the ring.

    Attributes:
        number: of their window.
        sizes: rows of each.
    """

    number: int
    sizes: list[int]


class Counted(NamedTuple):
    """Sent in place of what a worker made of a window, where its cache of shards did something.

    Attributes:
        results: what it made.
        counts: of `CacheStats`, since the last time.
    """

    results: InRing | list[Parcel]
    counts: tuple[float, ...]


class Batches(torch.utils.data.Dataset[Any]):
    """A map-style dataset for torch's loader: its keys are tasks.

    Args:
        pipeline: makes the batches.
        ring: takes rows, where finishing a batch runs no code of the user.
    """

    def __init__(self, pipeline: Pipeline, ring: RowRing | None) -> None:
        self._pipeline, self._ring = pipeline, ring
        self.broken: Failure | None = None
        self._counts: tuple[float, ...] = ()

    @property
    def given(self) -> Any:
        """The dataset that the user gave, in this process."""
        known = {
            dataset.name: dataset if dataset.samples is None else dataset.samples
            for dataset in self._pipeline.fetcher.datasets
        }
        return known if len(known) > 1 else next(iter(known.values()))

    def begin(self) -> None:
        """Count from here on, in a process whose counts begin with those of the trainer."""
        copies = self._pipeline.fetcher.copies
        if copies is not None:
            self._counts = copies.stats.counts()

    def __getitem__(self, task: Task) -> InRing | list[Parcel] | Counted:
        results = self._made(task)
        copies = self._pipeline.fetcher.copies
        if copies is None:
            return results
        before, self._counts = self._counts, copies.stats.counts()
        counts = tuple(now - then for now, then in zip(self._counts, before, strict=True))
        return Counted(results, counts) if any(counts) else results

    def _made(self, task: Task) -> InRing | list[Parcel]:
        if self.broken is not None:
            return [_parcel(self.broken)] * len(task.items)
        read = self._pipeline.read_window(task.items)
        sizes = None if self._ring is None else self._ring.put(task.number, read)
        if sizes is not None:
            return InRing(task.number, sizes)
        return [_parcel(made) for made in self._pipeline.finish_window(task.items, read)]


def _parcel(made: Made | Exception | Failure) -> Parcel:
    if isinstance(made, Exception):
        made = Failure.of(made)
    return Parcel(made, made.of_known_type if isinstance(made, Failure) else Failure.unsendable)


@dataclass(slots=True)
class Beginning:
    """First steps of a worker process, in place of the user's worker_init_fn, which it calls.

    Attributes:
        function: worker_init_fn.
        reader: of the leash that it is started with.
    """

    function: Callable[[int], None] | None
    reader: Any = None

    def __call__(self, worker_id: int) -> None:
        """Prepare for signals and for the end of the main process, then call it."""
        # Ctrl-C goes to all processes of a terminal; the main one decides whether these end
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        leash.obey(self.reader)
        info = torch.utils.data.get_worker_info()
        assert info is not None
        batches = info.dataset
        assert isinstance(batches, Batches)
        batches.begin()
        object.__setattr__(info, "dataset", batches.given)  # of a frozen object
        try:
            if self.function is not None:
                self.function(worker_id)
        except Exception as error:
            batches.broken = Failure.of(error, is_of_batch=False)
