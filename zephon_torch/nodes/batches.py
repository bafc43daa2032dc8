"""Finished batches, and the bad records left out of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zephon_torch.work.plan.plan import Pointers


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that could not be decoded or transformed.

    Attributes:
        where: dataset, file and record in words.
        error: type and message of what it raised.
    """

    where: str
    error: str


class Mended(NamedTuple):
    """Pointers and validity of a batch from which bad records were removed or replaced.

    Attributes:
        pointers: pointers of its samples.
        valid: bool[b], which of them are real; None where all are.
        bad: records that were left out or replaced.
    """

    pointers: Pointers
    valid: npt.NDArray[np.bool_] | None
    bad: tuple[BadRecord, ...]

    @property
    def num_samples(self) -> int:
        """Samples of the batch."""
        return len(self.pointers)


class Made(NamedTuple):
    """A batch, as it also travels from worker processes.

    A tuple, because torch's memory pinning looks into tuples.

    Attributes:
        data: the batch.
        mended: None where its samples are those of its work item.
    """

    data: Any
    mended: Mended | None = None
