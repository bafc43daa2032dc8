"""What the pipeline makes of a work item."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from zephon_torch.work.plan import Pointers


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that could not be decoded or transformed.

    Attributes:
        where: dataset, file and record in words.
        error: type and message of what it raised.
    """

    where: str
    error: str


class Made(NamedTuple):
    """A batch, and where it differs from its work item.

    A tuple, because torch's memory pinning looks into tuples.

    Attributes:
        data: the batch.
        pointers: pointers of its samples.
        valid: bool[b], which of them are real; None where all are.
        bad: records that were left out or replaced.
    """

    data: Any
    pointers: Pointers
    valid: npt.NDArray[np.bool_] | None
    bad: tuple[BadRecord, ...] = ()
