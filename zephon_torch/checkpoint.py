"""The data's progress inside a model's own state dict.

A parameterless child module carries 16 integers as its extra state, so that every way of saving a
model (``torch.save``, DCP, FSDP's full and sharded state dicts, safetensors) saves them too, and
loading the model puts the data back where it was. Contract: ``Module.get_extra_state`` and
``Module.set_extra_state`` of torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from zephon_torch.errors import ConfigurationError, StateError
from zephon_torch.work.progress import NUM_WORDS, Progress

_NAME = "data_progress"
_EXTRA_STATE = "_extra_state"
V = TypeVar("V")


class _Bindable(Protocol):
    """What a loader offers to be bound."""

    @property
    def progress(self) -> Progress: ...

    def stage_words(self, words: Sequence[int]) -> None: ...


class DataProgress(nn.Module):
    """Carries a loader's progress in a model's state dict, as one int64[16] CPU tensor.

    Put there by :func:`bind`; a model may also make one itself, to be loaded before the loader
    exists, and bind it later. Setting its state only stages it in the loader, which goes on from
    there at its next ``iter()`` and checks it then. Copies and pickles keep the integers and drop
    the loader.

    Args:
        restore: False ignores what is loaded: a warm start on other data.
    """

    def __init__(self, *, restore: bool = True) -> None:
        super().__init__()
        self.restore = restore
        self.loader: _Bindable | None = None
        self._words: list[int] | None = None
        self._loaded: list[int] = []
        self.register_load_state_dict_pre_hook(_tolerate_absence)  # type: ignore[no-untyped-call]

    def bind(self, loader: _Bindable) -> None:
        """Follow a loader; hands it what was loaded before."""
        self.loader = loader
        if self._words is not None and self.restore:
            loader.stage_words(self._words)
        self._words = None

    def forward(self, value: Any) -> Any:
        """Hand on what came: in an ``nn.Sequential``, children are called one after the other."""
        return value

    def words(self) -> list[int]:
        """The integers a checkpoint would carry now; all zero if there is nothing to say."""
        if self.loader is not None:
            try:
                return self.loader.progress.to_words()
            except StateError:  # told at the loader's next use; the weights can be saved
                return _sixteen(self._loaded)
        return _sixteen(self._words or [])

    def get_extra_state(self) -> torch.Tensor:
        """Progress as an int64[16] tensor on the CPU. No collective, microseconds."""
        # the device is named because models are also built under torch.device("meta")
        return torch.tensor(self.words(), dtype=torch.int64, device="cpu")

    def set_extra_state(self, state: Any) -> None:
        """Stage what was loaded. Never raises: a model must not be left half loaded."""
        words = self._loaded = _words_of(state)
        if not self.restore or _is_absent(state) or (words and not any(words)):
            return
        if self.loader is None:
            self._words = words
        else:
            self.loader.stage_words(words)

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProgress:
        return _detached(self.restore, self.words(), self.training)

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (self.restore, self.words(), self.training)

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        try:
            return "" if self.loader is None else repr(self.loader.progress)
        except StateError as error:
            return str(error)


def bind(
    model: nn.Module, loader: _Bindable, name: str = _NAME, restore: bool = True
) -> DataProgress:
    """Carry a loader's progress in a model's state dict.

    Call it on the model itself, before DDP, FSDP or torch.compile wrap it. Checkpoints from before
    load as they are (``strict=True`` too) and leave the loader where it is.

    Args:
        model: gets a child module without parameters or buffers.
        loader: a :class:`zephon_torch.DataLoader`.
        name: of the child.
        restore: False ignores what is loaded, before or after: a warm start on other data.

    Returns:
        The child.

    Raises:
        ConfigurationError: the model has another attribute of that name, follows another loader
            under it, or is wrapped already; or the loader is wrapped, or is not one of ours.

    Example:
        >>> import torch
        >>> from zephon_torch import DataLoader, bind
        >>> loader = DataLoader(list(range(10)), batch_size=2)
        >>> model = torch.nn.Linear(1, 1)
        >>> _ = bind(model, loader)
        >>> _ = next(iter(loader))
        >>> model.state_dict()["data_progress._extra_state"][2].item()  # samples delivered
        2
    """
    is_ddp = isinstance(model, nn.parallel.DistributedDataParallel)
    # those of torch.compile and of Lightning Fabric, whose wrapper does not save its own children
    if is_ddp or hasattr(model, "_orig_mod") or hasattr(model, "_forward_module"):
        raise ConfigurationError(
            f"the model is wrapped already ({type(model).__name__}): bind the model itself, before "
            "it is wrapped, so that its keys are the same with and without the wrapping"
        )
    if not hasattr(loader, "stage_words"):
        raise ConfigurationError(
            f"a {type(loader).__name__} cannot be bound: bind the zephon_torch.DataLoader itself, "
            "before it is wrapped (Lightning Fabric's setup_dataloaders wraps it)"
        )
    child = getattr(model, name, None)
    if child is None:
        child = DataProgress(restore=restore)
        model.add_module(name, child)
    elif not isinstance(child, DataProgress):
        raise ConfigurationError(
            f"the model has an attribute {name!r} already, a {type(child).__name__}: give bind() "
            "another name="
        )
    elif child.loader is not None and child.loader is not loader:
        raise ConfigurationError(
            f"the model's {name!r} carries the progress of another loader: give this one a name= "
            f"of its own, or call model.{name}.bind(loader) to put it in the other's place"
        )
    child.restore = child.restore and restore
    child.bind(loader)
    return child


def strip(state_dict: Mapping[str, V], name: str = _NAME) -> dict[str, V]:
    """A model's state dict without the data's progress, for a model that has none."""
    suffix = f"{name}.{_EXTRA_STATE}"
    return {
        key: value
        for key, value in state_dict.items()
        if key != suffix and not key.endswith(f".{suffix}")
    }


def _is_absent(state: Any) -> bool:
    """Whether the checkpoint had no entry: None, or what torch's `set_model_state_dict` puts there.

    With full_state_dict=True that function fills entries that are missing with the model's own, and
    has an object of a private class `_EXTRA_STATE` for an extra state.
    """
    return state is None or type(state).__name__ == "_EXTRA_STATE"


def _words_of(state: Any) -> list[int]:
    """The integers of an extra state; none where it holds anything else, which is told later."""
    if not isinstance(state, torch.Tensor):
        return []
    try:
        return [int(word) for word in state.detach().flatten().tolist()]
    except (OverflowError, ValueError, TypeError, RuntimeError, NotImplementedError):
        return []  # infinity, NaN, complex, or a tensor without data


def _sixteen(words: list[int]) -> list[int]:
    """Unreadable words as they were loaded, as far as a tensor of 16 words can hold them."""
    held = [max(-(1 << 63), min(word, (1 << 63) - 1)) for word in words[:NUM_WORDS]]
    return held + [0] * (NUM_WORDS - len(held))


def _tolerate_absence(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: object
) -> None:
    """Let checkpoints without progress load: an absent entry becomes one that sets nothing."""
    state_dict.setdefault(prefix + _EXTRA_STATE, None)


def _detached(restore: bool, words: list[int], training: bool) -> DataProgress:
    copy = DataProgress(restore=restore)
    copy._words = words if any(words) else None
    return copy.train(training)
