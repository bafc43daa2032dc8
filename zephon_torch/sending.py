"""What cannot be sent to a worker process or back: told in place of a hang or a riddle."""

from __future__ import annotations

import pickle
from typing import Any

import torch

from zephon_torch.errors import WorkerError


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)


class _WithoutTensors(pickle.Pickler):
    """Pickles all but tensors, which torch sends in ways of its own."""

    def reducer_override(self, obj: Any) -> Any:
        return (int, ()) if isinstance(obj, torch.Tensor) else NotImplemented


def check_it_can_be_sent(batch: Any) -> None:
    """Raise for a batch that cannot be pickled: torch's queue drops it, and its reader hangs.

    Raises:
        WorkerError: it cannot.
    """
    error = _why_not(batch)
    if error is not None:
        raise WorkerError(
            f"a batch cannot be sent from its worker process ({_words(error)}): "
            "let transform and collate_fn return tensors and plain values, or use num_workers=0"
        ) from error


def _why_not(value: Any) -> Exception | None:
    try:
        _WithoutTensors(_Nowhere()).dump(value)
    except Exception as error:
        return error
    return None


def _words(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"
