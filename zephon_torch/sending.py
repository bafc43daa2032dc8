"""What cannot be sent to a worker process or back: told in place of a hang or a riddle."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from zephon_torch.errors import ConfigurationError

_PLAIN = {int, float, bool, str, bytes, type(None)}
_FEW = 32  # parts that are looked at; sending more costs more than a parcel does


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)


class _WithoutTensors(pickle.Pickler):
    """Pickles all but tensors, which torch sends in ways of its own."""

    def reducer_override(self, obj: Any) -> Any:
        return (int, ()) if isinstance(obj, torch.Tensor) else NotImplemented


def is_plain(value: Any, depth: int = 3) -> bool:
    """Whether something can be sent for certain: tensors and plain values, few and not deep."""
    kind = type(value)
    if kind is torch.Tensor:
        return not value.requires_grad and value.layout is torch.strided
    if kind in _PLAIN:
        return True
    if not depth or kind not in (tuple, list, dict) or len(value) > _FEW:
        return False
    parts = (*value, *value.values()) if kind is dict else value
    return all(is_plain(part, depth - 1) for part in parts)


class Parcel:
    """A value on its way to another process, where the value itself arrives.

    What cannot be pickled a queue drops, and whoever waits for it hangs. Here something else goes
    in its place.

    Args:
        value: what to send.
        instead: from why it cannot be sent, what to send in its place.
    """

    def __init__(self, value: Any, instead: Callable[[str], Any]) -> None:
        self._value, self._instead = value, instead

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            packed = ForkingPickler.dumps(self._value)
        except Exception as error:
            packed = ForkingPickler.dumps(self._instead(_words(error)))
        return pickle.loads, (bytes(packed),)


def cannot_start(error: Exception, parts: Mapping[str, Any]) -> ConfigurationError | None:
    """What to raise where worker processes could not be started; None if no part is to blame.

    Args:
        error: what starting them raised.
        parts: what is sent to a worker, under the names that the user knows.
    """
    cause = error.__context__ if isinstance(error, Warning) else error  # torch warns as it fails
    guilty = [
        f"{name} ({part!r})"
        for name, part in parts.items()
        if (found := _why_not(part)) is not None and _words(found) == _words(cause)
    ]
    if not guilty:
        return None
    told = ConfigurationError(
        f"{' and '.join(guilty)} cannot be sent to worker processes ({_words(cause)}): with this "
        "start method they get everything by pickle. Define functions and classes at the top level "
        'of a module, or use multiprocessing_context="fork", num_threads= or num_workers=0'
    )
    told.__cause__ = error
    return told


def _why_not(value: Any) -> Exception | None:
    try:
        _WithoutTensors(_Nowhere()).dump(value)
    except Exception as error:
        return error
    return None


def _words(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"
