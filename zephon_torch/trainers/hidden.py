"""A child module that lists of layers leave out, while whoever goes by names finds it.

Saving and loading go by names: ``state_dict``, DCP, FSDP and Accelerate walk ``_modules``,
``named_modules`` or ``named_children``. People count: ``list(net.children())[:-1]`` cuts a head
off, ``net[-1]`` is the last layer. One child more would shift what they count, so it is not in
``children()``, nor in the length, the items and the slices of an ``nn.Sequential``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Self

from torch import nn

_COUNTING = ("children", "__iter__", "__len__", "__getitem__", "__reduce__", "__reduce_ex__")


class Hidden(nn.Module):
    """A child that is hidden once :func:`hide_in` was called on its parent."""


def hide_in(model: nn.Module) -> None:
    """Leave the hidden children of a model out of what is counted, also in its later copies."""
    if isinstance(model, _Hiding):
        return
    if isinstance(model, nn.Sequential) and _counts_as_torch_does(type(model)):
        model.__class__ = _hiding(type(model))  # type: ignore[arg-type]
    elif "children" not in vars(model):
        object.__setattr__(model, "children", _Children(model._modules))


class _Children:
    """``model.children`` without those that are hidden. Copied and pickled with its model."""

    def __init__(self, modules: Mapping[str, nn.Module | None]) -> None:
        self._modules = modules  # not the model, which would then be freed late

    def __call__(self) -> Iterator[nn.Module]:
        return iter(_distinct(self._modules))


class _Hiding(nn.Sequential):
    """An ``nn.Sequential`` of the layers that are not hidden.

    Instances are of a subclass made by :func:`_hiding`, which has the name of the class that the
    model had.
    """

    _original: type[nn.Sequential]

    def children(self) -> Iterator[nn.Module]:
        return iter(_distinct(self._modules))

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(_shown(self).values())

    def __len__(self) -> int:
        return len(_shown(self))

    def __getitem__(self, index: Any) -> Any:
        shown = _shown(self)
        if isinstance(index, slice):
            return self._original(OrderedDict(list(shown.items())[index]))
        return self._get_item_by_idx(shown.values(), index)

    def __setitem__(self, index: int, module: nn.Module) -> None:
        with _put_aside(self):
            super().__setitem__(index, module)

    def __delitem__(self, index: Any) -> None:
        with _put_aside(self):
            super().__delitem__(index)

    def insert(self, index: int, module: nn.Module) -> Self:
        with _put_aside(self):
            return super().insert(index, module)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        state = self.__getstate__()  # type: ignore[no-untyped-call]
        return _made_again, (self._original,), state


def _distinct(modules: Mapping[str, nn.Module | None]) -> list[nn.Module]:
    """The modules that are shown, each once."""
    found = (one for one in modules.values() if one is not None and not isinstance(one, Hidden))
    return list(dict.fromkeys(found))


def _shown(model: nn.Sequential) -> dict[str, nn.Module]:
    """The layers by name, without those that are hidden."""
    return {name: one for name, one in model._modules.items() if not isinstance(one, Hidden)}


@contextmanager
def _put_aside(model: nn.Sequential) -> Iterator[None]:
    """Take the hidden children out for as long as layers are counted anew."""
    hidden = {name: one for name, one in model._modules.items() if isinstance(one, Hidden)}
    for name in hidden:
        del model._modules[name]
    try:
        yield
    finally:
        model._modules.update(hidden)


def _counts_as_torch_does(cls: type[nn.Sequential]) -> bool:
    return all(getattr(cls, name) is getattr(nn.Sequential, name) for name in _COUNTING)


@cache
def _hiding(original: type[nn.Sequential]) -> type[_Hiding]:
    """The class of a sequence that hides: as ``fully_shard`` makes one."""
    named = {"__module__": original.__module__, "__qualname__": original.__qualname__}
    return type(original.__name__, (_Hiding, original), {"_original": original, **named})


def _made_again(original: type[nn.Sequential]) -> nn.Sequential:
    """An empty instance, for copies and pickles to fill."""
    made = _hiding(original)  # type: ignore[arg-type]
    return made.__new__(made)
