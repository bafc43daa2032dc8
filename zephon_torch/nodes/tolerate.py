"""Goes on past records that cannot be decoded or transformed, the same way everywhere.

``skip``
    The batch comes without them; if none is left, one substitute stands in, marked as not real.
``substitute``
    Another sample of the same dataset stands in: a pure function of the pointer, the epoch and the
    try, so it is the same on any engine, rank and resume. After 16 tries the error is raised.

Only what decoding or user code raises counts as a bad record. An error of the storage, or of a
package that is missing, is raised always: whether it happens again is not a property of the data,
and a resume would not be exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from zephon_torch.arithmetic.permutation import subkey, text_key
from zephon_torch.errors import RecordError, ZephonError
from zephon_torch.io.datasets.dataset import Samples, samples_of
from zephon_torch.nodes.batches import BadRecord
from zephon_torch.nodes.fetch import Fetcher
from zephon_torch.nodes.transform import Transform
from zephon_torch.work.plan.plan import Pointers
from zephon_torch.work.sharing.items import WorkItem

OnError: TypeAlias = Literal["raise", "skip", "substitute"]

_TRIES = 16


@dataclass(frozen=True, slots=True)
class _Failed:
    """Stands in a list of samples for one that could not be read."""

    error: Exception


@dataclass(slots=True)
class Tolerated:
    """The rest of a batch without its bad records.

    Attributes:
        samples: its samples.
        pointers: where they come from.
        valid: which of them are real.
        bad: what was left out or replaced, where it was real.
        is_whole: whether all samples are those of the work item.
    """

    samples: list[Any]
    pointers: Pointers
    valid: list[bool]
    bad: list[BadRecord]
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Reads and transforms samples of which some may be bad.

    Attributes:
        mode: "skip" or "substitute".
        seed: the run's seed.
    """

    fetcher: Fetcher
    transform: Transform | None
    mode: OnError
    seed: int

    def read(self, pointers: Pointers) -> Samples:
        """Samples; what could not be decoded is remembered in its place."""
        try:
            return self.fetcher.read(pointers)
        except Exception as error:
            if not _is_bad_record(error):
                raise
        return [self._read_one(pointers[i : i + 1]) for i in range(len(pointers))]

    def finish(self, item: WorkItem, samples: Samples) -> Tolerated:
        """Transformed samples, without or with substitutes for the bad ones."""
        real = [True] * len(samples) if item.valid is None else item.valid.tolist()
        kept = Tolerated([], item.pointers[:0], [], [])
        chosen: list[Pointers] = []
        for i, sample in enumerate(samples):
            pointer, valid = item.pointers[i : i + 1], real[i]
            done = self._transformed(sample, pointer, item.epoch)
            if isinstance(done, _Failed):
                kept.is_whole = False
                if valid:  # padding repeats a sample that is noted where it is real
                    kept.bad.append(self._note(pointer, done.error))
                last = self.mode == "skip" and i == len(samples) - 1 and not kept.samples
                if self.mode == "skip" and not last:
                    continue
                pointer, done = self._substitute(pointer, item.epoch, done.error)
                valid = valid and self.mode == "substitute"
            kept.samples.append(done)
            kept.valid.append(valid)
            chosen.append(pointer)
        columns = zip(*(pointer.arrays() for pointer in chosen), strict=True)
        kept.pointers = Pointers(*(np.concatenate(column) for column in columns))
        return kept

    def _read_one(self, pointer: Pointers) -> Any:
        try:
            return samples_of(self.fetcher.read(pointer))[0]
        except Exception as error:
            if not _is_bad_record(error):
                raise
            return _Failed(error)

    def _transformed(self, sample: Any, pointer: Pointers, epoch: int) -> Any:
        if self.transform is None or isinstance(sample, _Failed):
            return sample
        try:
            return self.transform([sample], pointer, epoch, self.fetcher.name)[0]
        except Exception as error:
            # no storage is behind it here: decoders of images raise OSError for a bad image
            if not isinstance(error, OSError) and not _is_bad_record(error):
                raise
            return _Failed(error)

    def _substitute(self, pointer: Pointers, epoch: int, error: Exception) -> tuple[Pointers, Any]:
        for attempt in range(_TRIES):
            other = self._other(pointer, epoch, attempt)
            done = self._transformed(self._read_one(other), other, epoch)
            if not isinstance(done, _Failed):
                return other, done
        error.add_note(f"and {_TRIES} samples of the same dataset that were tried instead are bad")
        raise error

    def _other(self, pointer: Pointers, epoch: int, attempt: int) -> Pointers:
        number, shard, sample, pass_index = (int(column[0]) for column in pointer.arrays())
        dataset = self.fetcher.datasets[number]
        key = text_key("zephon_torch/substitute/1", str(self.seed), dataset.name)
        chosen = subkey(key, epoch, pass_index, shard, sample, attempt) % len(dataset)
        ends = np.cumsum(dataset.shard_num_samples)
        other = int(np.searchsorted(ends, chosen, side="right"))
        within = chosen - int(ends[other] - dataset.shard_num_samples[other])
        return Pointers(*(np.array([n]) for n in (number, other, within, pass_index)))

    def _note(self, pointer: Pointers, error: Exception) -> BadRecord:
        number, shard, sample, _ = (int(column[0]) for column in pointer.arrays())
        return BadRecord(
            self.fetcher.name(number, shard, sample), f"{type(error).__name__}: {error}"
        )


def _is_bad_record(error: Exception) -> bool:
    if isinstance(error, RecordError):
        return True
    return not isinstance(error, ZephonError | OSError | MemoryError)
