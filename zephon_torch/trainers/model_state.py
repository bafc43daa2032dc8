"""The data's progress inside a model's own state dict.

A parameterless child module carries 16 integers as its extra state, so that every way of saving a
model (``torch.save``, DCP, FSDP's full and sharded state dicts, safetensors) saves them too, and
loading the model puts the data back where it was. Contract: ``Module.get_extra_state`` and
``Module.set_extra_state`` of torch.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.context import get_spawning_popen
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import nn

from zephon_torch.errors import ConfigurationError, StateError
from zephon_torch.trainers.hidden import Hidden, hide_in
from zephon_torch.work.identity.progress import NUM_WORDS, Progress

_NAME = "data_progress"
_EXTRA_STATE = "_extra_state"
_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)
# where the wrappers of torch.compile, of Lightning Fabric (which does not save its own children)
# and of FSDP1 hold the model
_INNER = ("_orig_mod", "_forward_module", "_fsdp_wrapped_module")
V = TypeVar("V")


class _Bindable(Protocol):
    """The parts of a loader that `bind` uses."""

    @property
    def progress(self) -> Progress: ...

    def stage_words(self, words: Sequence[int]) -> None: ...


class DataProgress(Hidden):
    """Carries a loader's progress in a model's state dict, as one int64[16] CPU tensor.

    Put there by :func:`bind`; a model may also make one itself, to be loaded before the loader
    exists, and bind it later. Setting its state only stages it in the loader, which goes on from
    there at its next ``iter()`` and checks it then. Copies and pickles keep the integers and drop
    the loader, except on the way to a process that is being spawned, where both go on together.

    Args:
        restore: False ignores what is loaded: a warm start on other data.
    """

    __jit_unused_properties__: ClassVar = ["_extra_state"]  # torch.jit.script compiles the others

    def __init__(self, *, restore: bool = True) -> None:
        super().__init__()
        self.restore = restore
        self.loader: _Bindable | None = None
        self._words: list[int] | None = None
        self._loaded: list[int] = []
        self._model: weakref.ref[nn.Module] | None = None  # that it was put into
        self._has_warned = False  # of adapters
        self._buffers = _Slot(self)
        self.register_load_state_dict_pre_hook(_tolerate_absence)  # type: ignore[no-untyped-call]

    def bind(self, loader: _Bindable) -> None:
        """Follow a loader; hands it what was loaded before."""
        self.loader = loader
        if self._words is not None and self.restore:
            loader.stage_words(self._words)
        self._words = None

    def forward(self, value: Any) -> Any:
        """Hand on what came: a rebuilt model may call its children one after the other."""
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
        self._warn_of_adapters()
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

    @property
    def _extra_state(self) -> torch.Tensor:
        """As a buffer, for whoever sets a model's tensors one by one."""
        return self.get_extra_state()

    def _warn_of_adapters(self) -> None:
        """Warn where a PEFT model will save its adapters only."""
        model = None if self._model is None else self._model()
        if self._has_warned or model is None or "peft" not in sys.modules:
            return
        if not (_is_of_peft(model) or _is_asked_by_peft()):
            return
        self._has_warned = True
        warnings.warn(
            "the model has adapters of PEFT, whose save_pretrained() saves them alone and not the "
            "data's progress: save loader.state_dict() beside them and load it with "
            "loader.load_state_dict(), or save the whole model.state_dict()",
            stacklevel=3,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> DataProgress:
        return _detached(self.restore, self.words(), self.training)

    def __reduce__(self) -> tuple[Any, ...]:
        state = (self.restore, self.words(), self.training)
        if self.loader is None or get_spawning_popen() is None:
            return _detached, state
        return _attached, (*state, self.loader)

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
    load as they are (``strict=True`` too) and leave the loader where it is. The child is found by
    its name only: ``model.children()`` and the layers of an ``nn.Sequential`` are as they were.

    Warns where the model has adapters of PEFT, now or when its state dict is asked for.

    Args:
        model: gets a child module without parameters or buffers.
        loader: a :class:`zephon_torch.DataLoader`.
        name: of the child.
        restore: False ignores what is loaded, before or after: a warm start on other data.

    Returns:
        The child.

    Raises:
        ConfigurationError: the model has another attribute of that name, follows another loader
            under it, is wrapped already (DDP, DataParallel, FSDP1, torch.compile, Fabric), or is an
            ``nn.ModuleList`` or ``nn.ModuleDict``; or the loader is wrapped, or is not one of ours.

    Examples:
        >>> import torch
        >>> from zephon_torch import DataLoader, bind
        >>> loader = DataLoader(list(range(10)), batch_size=2)
        >>> model = torch.nn.Linear(1, 1)
        >>> _ = bind(model, loader)
        >>> _ = next(iter(loader))
        >>> model.state_dict()["data_progress._extra_state"][2].item()  # samples delivered
        2
    """
    if isinstance(model, _WRAPPERS) or any(hasattr(model, inner) for inner in _INNER):
        raise ConfigurationError(
            f"the model is wrapped already ({type(model).__name__}): bind the model itself, before "
            "it is wrapped, so that its keys are the same with and without the wrapping"
        )
    if isinstance(model, nn.ModuleList | nn.ModuleDict):
        raise ConfigurationError(
            f"a {type(model).__name__} cannot be bound: all its children count as entries, and one "
            "more would be met in each loop over them. Bind the module that has it, or save "
            "loader.state_dict() beside it"
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
    hide_in(model)
    child.restore = child.restore and restore
    child.bind(loader)
    child._model = weakref.ref(model)
    child._warn_of_adapters()
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


class _Slot(dict[str, Any]):
    """The progress as an entry of ``Module._buffers``, for those who set tensors one by one.

    Accelerate's ``set_module_tensor_to_device`` looks a tensor up there and sets it there. Nothing
    is in the dict, so no buffer is moved, cast, averaged or sent to other ranks.
    """

    def __init__(self, progress: DataProgress) -> None:
        super().__init__()
        self._progress = weakref.ref(progress)

    def __contains__(self, name: object) -> bool:
        return name == _EXTRA_STATE

    def __setitem__(self, name: str, value: Any) -> None:
        progress = self._progress()
        if name == _EXTRA_STATE and progress is not None:
            progress.set_extra_state(value)
        else:
            super().__setitem__(name, value)


def _is_of_peft(model: nn.Module) -> bool:
    return any(type(module).__module__.partition(".")[0] == "peft" for module in model.modules())


def _is_asked_by_peft() -> bool:
    """Whether a function of PEFT is calling: prompts, for one, are no modules of the base model."""
    frame = sys._getframe(1)
    while (above := frame.f_back) is not None:
        frame = above
        if frame.f_globals.get("__name__", "").startswith("peft."):
            return True
    return False


def _attached(restore: bool, words: list[int], training: bool, loader: Any) -> DataProgress:
    copy = DataProgress(restore=restore).train(training)
    copy.loader = loader
    return copy


def _detached(restore: bool, words: list[int], training: bool) -> DataProgress:
    copy = DataProgress(restore=restore)
    copy._words = words if any(words) else None
    return copy.train(training)
