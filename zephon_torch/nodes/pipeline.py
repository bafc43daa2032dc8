"""The pure function from a work item to a batch, in two stages.

``read`` touches storage and decodes; ``finish`` runs user code. Engines may run the two in
different places, the bytes are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import NoneType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from zephon_torch.errors import ConfigurationError, StorageError, WorkerError
from zephon_torch.io.cache.copies import ShardCopies
from zephon_torch.io.datasets.dataset import Samples, samples_of
from zephon_torch.io.formats.map_style import came_as_one
from zephon_torch.io.formats.rows.mapped import PlacedRows
from zephon_torch.nodes.batches import Made, Mended
from zephon_torch.nodes.collate import Collate, Pointed
from zephon_torch.nodes.fetch import ROWS, Fetcher
from zephon_torch.nodes.tolerate import OnError, Tolerance
from zephon_torch.nodes.transform import Functions, Transform
from zephon_torch.work.plan.plan import Pointers
from zephon_torch.work.sharing.items import WorkItem, pointers_of
from zephon_torch.work.sources.static_mixture import WorkSource


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Work item -> batch. Picklable if the user's functions and datasets are.

    Attributes:
        tolerance: what to do about bad records; None raises.
        is_plain: whether a batch of rows is nothing but a tensor of them.
    """

    fetcher: Fetcher
    transform: Transform | None
    collate: Collate
    tolerance: Tolerance | None = None
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        is_plain = not self.has_user_code and self.tolerance is None and not self.collate.provenance
        object.__setattr__(self, "is_plain", is_plain)

    def __call__(self, item: WorkItem) -> Made:
        """Both stages."""
        return self.finish(item, self.read(item))

    def read(self, item: WorkItem) -> Samples:
        """Samples of a work item as they are stored."""
        return self._read(item.pointers)

    def place_window(self, items: Sequence[WorkItem]) -> list[Any]:
        """As :meth:`read_window`, but rows are gathered when they are finished."""
        if self.tolerance is not None:
            return self.read_window(items)
        return self._window(items, self.fetcher.place)

    def read_window(self, items: Sequence[WorkItem]) -> list[Any]:
        """For each of consecutive items what :meth:`read` gives or raises; read in one go."""
        return self._window(items, self._read)

    def _window(
        self, items: Sequence[WorkItem], read_all: Callable[[Pointers], Samples | PlacedRows]
    ) -> list[Any]:
        if len(items) == 1:
            return self._one_by_one(items)
        try:
            read = read_all(pointers_of(items))
        except StorageError as error:  # the store's: each of them would wait for all its tries
            return [error] * len(items)
        except Exception:  # of one of them
            return self._one_by_one(items)
        sizes = [item.num_samples for item in items]
        if isinstance(read, np.ndarray) and sizes[0] == sizes[-1]:  # only the last may be shorter
            return list(read.reshape(len(items), sizes[0], *read.shape[1:]))
        return [
            read[stop - size : stop] for size, stop in zip(sizes, accumulate(sizes), strict=True)
        ]

    def make_window(self, items: Sequence[WorkItem]) -> list[Made | Exception]:
        """For each of consecutive items its batch, or what reading or user code raised on it."""
        return self.finish_window(items, self.read_window(items))

    def finish_window(
        self, items: Sequence[WorkItem], read: Sequence[Samples | Exception]
    ) -> list[Made | Exception]:
        """For each of consecutive items what :meth:`finish` gives or raises, or its error."""
        return [
            samples if isinstance(samples, Exception) else self.finish_or_why_not(item, samples)
            for item, samples in zip(items, read, strict=True)
        ]

    def finish_or_why_not(self, item: WorkItem, read: Samples | PlacedRows) -> Made | Exception:
        """Return the batch that :meth:`finish` makes, or its error."""
        try:
            return self.finish(item, read)
        except Exception as error:
            return error

    @property
    def has_user_code(self) -> bool:
        """Whether finishing a batch runs functions of the user."""
        return self.transform is not None or self.collate.function is not None

    def _read(self, pointers: Pointers) -> Samples:
        reader = self.fetcher if self.tolerance is None else self.tolerance
        return reader.read(pointers)

    def _one_by_one(self, items: Sequence[WorkItem]) -> list[Samples | Exception]:
        """For each of consecutive items what :meth:`read` gives or raises.

        The first error of the storage stands for those behind it, too: each would wait for all its
        tries.
        """
        results: list[Samples | Exception] = []
        for item in items:
            try:
                results.append(self._read(item.pointers))
            except StorageError as error:
                return results + [error] * (len(items) - len(results))
            except Exception as error:
                results.append(error)
        return results

    def finish(self, item: WorkItem, read: Samples | PlacedRows) -> Made:
        """Transform and collate."""
        if isinstance(read, PlacedRows):
            read = read.gather()
        samples = samples_of(read)
        if samples is read and isinstance(samples, np.ndarray) and not _owns_memory(samples):
            samples = samples.copy()  # of a window, or of the ring
        if self.is_plain and isinstance(samples, np.ndarray):
            return Made(torch.from_numpy(samples))
        if self.tolerance is not None:
            return self._finish_tolerantly(self.tolerance, item, samples)
        if self.transform is not None:
            samples = self.transform(samples, item.pointers, item.epoch, self.fetcher.name)
        return Made(self._collate(samples, item))

    def _finish_tolerantly(self, tolerance: Tolerance, item: WorkItem, samples: Samples) -> Made:
        kept = tolerance.finish(item, samples)
        if kept.is_whole:
            return Made(self._collate(kept.samples, item))
        valid = None if all(kept.valid) else np.array(kept.valid)
        data = self._collate(kept.samples, kept)
        return Made(data, Mended(kept.pointers, valid, tuple(kept.bad)))

    def _collate(self, samples: Samples, source: Pointed) -> Any:
        try:
            batch = self.collate(samples, source)
        except Exception as error:
            self._explain_none(samples, source, error)
            raise
        if isinstance(samples[0], str | bytes):  # torch takes a list of texts with None in it
            self._explain_none(samples, source)
        return batch

    def _explain_none(
        self, samples: Samples, source: Pointed, error: Exception | None = None
    ) -> None:
        """Name the record of a None that torch's default_collate was to join.

        Raises:
            WorkerError: a transform returned it, to leave the sample out perhaps.
        """
        kinds = [] if self.collate.function is not None else list(map(type, samples))
        if NoneType not in kinds or (error is None and self.transform is None):
            return
        at = kinds.index(NoneType)
        name = self.fetcher.name(*(int(column[at]) for column in source.pointers.arrays()[:3]))
        if self.transform is not None:
            raise WorkerError(f"transform returned None for {name}{_NOT_A_FILTER}") from error
        if error is not None:
            error.add_note(f"one of the samples is None, {name}{_NOT_A_FILTER}")


_NOT_A_FILTER = (
    ": samples are not left out so, for the plan has counted each of them. Raise an exception for "
    'it and give on_error="skip", which counts what it leaves out; or leave such records out of '
    "the data; or give a collate_fn that takes None"
)


def _owns_memory(rows: npt.NDArray[Any]) -> bool:
    """Whether the memory is that of these rows alone, if under another type or shape."""
    owner = rows if rows.base is None else rows.base
    is_array = isinstance(owner, np.ndarray)
    return is_array and owner.flags.owndata and owner.nbytes == rows.nbytes


def make_pipeline(
    source: WorkSource,
    transform: Functions | None,
    takes_rng: bool,
    collate_fn: Callable[[list[Any]], Any] | None,
    on_error: OnError,
    provenance: bool,
    copies: ShardCopies | None = None,
) -> Pipeline:
    """The pipeline over a source's datasets that a loader's arguments ask for."""
    if provenance and collate_fn is None:
        _check_provenance(source, transform)
    fetcher = Fetcher(source.datasets, copies)
    user = None if transform is None else Transform(transform, takes_rng, source.seed, source.names)
    tolerance = None if on_error == "raise" else Tolerance(fetcher, user, on_error, source.seed)
    joins_rows = all(came_as_one(dataset.samples) for dataset in source.datasets)
    collate = Collate(collate_fn, source.names, provenance, joins_rows)
    return Pipeline(fetcher, user, collate, tolerance)


def _check_provenance(source: WorkSource, transform: Functions | None) -> None:
    """Refuse rows, which have no key for it, before the first batch."""
    for dataset in source.datasets:
        of_this = transform.get(dataset.name) if isinstance(transform, Mapping) else transform
        if dataset.format in ROWS and of_this is None:
            raise ConfigurationError(
                f"provenance=True adds a key to each batch, but samples of dataset "
                f"{dataset.name!r} are rows, of format {dataset.format!r}: make dicts of them in "
                "transform=, or leave provenance= out and use loader.pointers"
            )
