"""Messages between processes; what cannot be pickled becomes an error, not a hang."""

from __future__ import annotations

import io
import multiprocessing as mp
import os
import pickle
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

import torch

from zephon_torch.errors import ConfigurationError

# Tensors of a message that travel in it, in bytes; those beyond go through shared memory. Handing a
# segment over takes a connection and a map for each tensor, about as long as copying this much.
_IN_MESSAGE_BYTES = 256 << 10


class PrivateGenerator(torch.Generator):
    """A generator of random numbers whose state is nobody's business: a copy is a new one.

    torch pickles a generator with its state in shared memory, which a process that is being
    spawned cannot open yet.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return PrivateGenerator, ()


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return len(data)


class _WithoutTensors(pickle.Pickler):
    """Pickles all but tensors, which torch sends in ways of its own."""

    def reducer_override(self, obj: Any) -> Any:
        return (int, ()) if isinstance(obj, torch.Tensor) else NotImplemented


class Parcel:
    """A value on its way to another process, packed where it is made: it arrives as itself.

    What cannot be pickled a queue drops, and whoever waits for it hangs. Here something else goes
    in its place. Small tensors are copied into the message and own their memory where they arrive;
    the others are shared as torch shares them, a descriptor each.

    Args:
        value: what to send.
        instead: from why it cannot be sent, what to send in its place.
    """

    __slots__ = ("_packed",)

    def __init__(self, value: Any, instead: Callable[[str], Any]) -> None:
        try:
            self._packed = _packed(value)
        except Exception as error:
            self._packed = _packed(instead(_words(error)))

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._packed,)


class _Packer(ForkingPickler):
    """Pickles for another process."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        tensors = _Tensors(self.dispatch_table[torch.Tensor])
        self.dispatch_table = {**self.dispatch_table, torch.Tensor: tensors}


class _Tensors:
    """Reduces the tensors of one message."""

    def __init__(self, share: Callable[[torch.Tensor], Any]) -> None:
        self._share, self._left = share, _IN_MESSAGE_BYTES

    def __call__(self, tensor: torch.Tensor) -> Any:
        if tensor.is_conj() or tensor.is_neg():  # marks that would be lost on the way
            tensor = tensor.resolve_conj().resolve_neg()
        if not _is_its_bytes(tensor) or tensor.nbytes > self._left:
            return self._share(tensor)
        self._left -= tensor.nbytes
        content: Any = tensor.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(content), tensor.dtype, tuple(tensor.shape))


def _is_its_bytes(tensor: torch.Tensor) -> bool:
    """Whether memory, type and shape say all about a tensor."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.requires_grad
        and not tensor.is_quantized
        and tensor.nbytes > 0
    )


def _tensor(content: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(content, dtype=dtype).view(shape)


def _packed(value: Any) -> bytes:
    file = io.BytesIO()
    _Packer(file).dump(value)
    return file.getvalue()


def cannot_start(error: Exception, parts: Mapping[str, Any]) -> ConfigurationError | None:
    """Return the error for worker processes that could not start; None if no part is to blame.

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


class _InMain(_WithoutTensors):
    """Notes the classes and functions that a pickle names in ``__main__``."""

    def __init__(self) -> None:
        super().__init__(_Nowhere())
        self.names: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__":
            self.names.add(obj.__qualname__)
        return super().reducer_override(obj)


def cannot_import(parts: Mapping[str, Any], context: str | BaseContext | None) -> str | None:
    """Say that a worker could not import what it runs, if that is why it died.

    Args:
        parts: what is sent to a worker, under the names that the user knows.
        context: torch's ``multiprocessing_context``.

    Returns:
        None where processes are forked, so that they have it already, or where ``__main__`` is a
        file, which they run themselves.
    """
    method = context if isinstance(context, str) else (context or mp).get_start_method()
    if method == "fork" or _main_is_file():
        return None
    named = {name: found for name, part in parts.items() if (found := _names_in_main(part))}
    if not named:
        return None
    told = " and ".join(f"{name} needs {', '.join(sorted(of))}" for name, of in named.items())
    return (
        f"{told}, which this interactive session (a notebook's cell, say) defines: a process that "
        f"is started by {method!r} cannot import it. Put it into a module, a .py file that you "
        'import; or use multiprocessing_context="fork", num_threads= or num_workers=0'
    )


def _main_is_file() -> bool:
    """Whether a process that is started can make a ``__main__`` like this one's."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None) or ""
    return getattr(main, "__spec__", None) is not None or os.path.exists(path)


def _names_in_main(value: Any) -> set[str]:
    pickler = _InMain()
    with suppress(Exception):  # what cannot be pickled did not kill it
        pickler.dump(value)
    return pickler.names


def _why_not(value: Any) -> Exception | None:
    try:
        _WithoutTensors(_Nowhere()).dump(value)
    except Exception as error:
        return error
    return None


def _words(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"
