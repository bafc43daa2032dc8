"""Makes a batch of samples: the user's collate_fn, or torch's default with clearer errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

from zephon_torch.errors import ConfigurationError, DatasetError, WorkerError
from zephon_torch.io.datasets.dataset import Samples
from zephon_torch.io.formats.map_style import came_as_one
from zephon_torch.work.plan.plan import Pointers

_PROVENANCE = "provenance"


class Pointed(Protocol):
    """A thing with pointers: a work item, or the rest of one without its bad records."""

    @property
    def pointers(self) -> Pointers:
        """Pointers of its samples."""
        ...


@dataclass(frozen=True, slots=True)
class Collate:
    """Samples to batch.

    Attributes:
        function: the user's collate_fn, which gets a list (of the rows of one TensorDict, a
            TensorDict, as from torch); None for torch's default.
        names: names of the datasets that ``Pointers.dataset`` counts in.
        provenance: whether dict batches get where their samples come from.
        joins_rows: whether samples are rows of TensorDicts.
    """

    function: Callable[[list[Any]], Any] | None
    names: tuple[str, ...]
    provenance: bool = False
    joins_rows: bool = False

    def __call__(self, samples: Samples, source: Pointed) -> Any:
        """A batch; of an array of rows a tensor of them, in its memory.

        Args:
            samples: its samples.
            source: knows their pointers, should anybody ask.

        Raises:
            DatasetError: samples with different keys, or rows of whole and of other numbers, and
                no collate_fn.
            ConfigurationError: provenance, and samples that are no dicts.
            WorkerError: the collate_fn raised StopIteration, or made something that provenance
                cannot be added to.
        """
        batch = self._collated(samples, source)
        if not self.provenance:
            return batch
        if self.function is None and not isinstance(batch, MutableMapping):
            raise ConfigurationError(
                f"provenance=True adds a key to each batch, but the batch is a "
                f"{type(batch).__name__}, for samples of dataset "
                f"{self.names[source.pointers.dataset[0]]!r} are {type(samples[0]).__name__}: make "
                "dicts of them in transform=, or leave provenance= out and use loader.pointers"
            )
        return _with_provenance(batch, source.pointers)

    def _collated(self, samples: Samples, source: Pointed) -> Any:
        try:
            if self.joins_rows and (rows := _as_one(samples)) is not None:
                return rows if self.function is None else self.function(rows)
            if self.function is not None:
                return self.function(list(samples))
            if isinstance(samples, np.ndarray):
                return torch.from_numpy(samples)
            self._check_keys(samples, source)
            self._check_rows(samples, source)
            return self._joined(samples, source)
        except StopIteration as error:
            raise WorkerError(
                "collate_fn raised StopIteration: a plain next() in it ran dry; give next() a "
                "default"
            ) from error

    def _joined(self, samples: list[Any], source: Pointed) -> Any:
        try:
            return default_collate(samples)
        except Exception as error:
            numbers = source.pointers.dataset.tolist()
            names = sorted({repr(self.names[number]) for number in numbers})
            error.add_note(
                f"torch's default_collate cannot join these samples of {', '.join(names)}: give a "
                "transform that makes them alike, or a collate_fn"
            )
            raise

    def _check_keys(self, samples: Sequence[Any], source: Pointed) -> None:
        first = samples[0]
        if not isinstance(first, Mapping):
            return
        for i, sample in enumerate(samples):
            if isinstance(sample, Mapping) and sample.keys() == first.keys():
                continue
            pointers = source.pointers
            has = sorted(map(str, sample)) if isinstance(sample, Mapping) else type(sample).__name__
            raise DatasetError(
                f"samples of one batch have different keys: dataset "
                f"{self.names[pointers.dataset[0]]!r} {sorted(map(str, first))}, dataset "
                f"{self.names[pointers.dataset[i]]!r} {has}. Give a transform that makes them "
                "alike, or a collate_fn"
            )

    def _check_rows(self, samples: Sequence[Any], source: Pointed) -> None:
        """Numbers of different types in one batch: torch rounds them, and not in every process."""
        first = samples[0]
        for i, row in enumerate(samples):
            if not isinstance(row, np.ndarray) or not isinstance(first, np.ndarray):
                return
            if row.dtype != first.dtype:
                pointers = source.pointers
                raise DatasetError(
                    f"samples of one batch are rows of different numbers: dataset "
                    f"{self.names[pointers.dataset[0]]!r} {first.dtype}, dataset "
                    f"{self.names[pointers.dataset[i]]!r} {row.dtype}. Give a transform that makes "
                    "them alike, or a collate_fn"
                )


def _as_one(samples: Any) -> Any:
    """Rows of TensorDicts as one; None for anything else that a transform has made of them."""
    if came_as_one(samples):
        return samples
    return torch.stack(list(samples)) if all(map(came_as_one, samples)) else None


def _with_provenance(batch: Any, pointers: Pointers) -> Any:
    if not isinstance(batch, MutableMapping):
        raise WorkerError(
            f"provenance=True adds a key to each batch, but the batch is a {type(batch).__name__}: "
            "make dicts, or leave provenance= out and use loader.pointers"
        )
    if _PROVENANCE in batch:
        raise WorkerError(
            f"provenance=True adds the key {_PROVENANCE!r}, which the batch has already: rename "
            "it in transform or collate_fn, or use loader.pointers"
        )
    batch[_PROVENANCE] = torch.from_numpy(np.stack(pointers.arrays()[:3], axis=1))
    return batch
