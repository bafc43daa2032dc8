"""A model that carries the data's progress is counted, cut up and rebuilt as it was before."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from zephon_torch import ConfigurationError, DataLoader, bind

KEY = "data_progress._extra_state"
X = torch.arange(8.0).reshape(4, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(2, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.body(x))


class Layers(nn.Sequential):
    """A sequence of a class of its own."""


def sequence() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 3))


def layers() -> nn.Sequential:
    return Layers(nn.Linear(2, 8), nn.Linear(8, 3))


MODELS = [Net, sequence, layers]
COPIES = [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]


def bound(make: Any) -> Any:
    torch.manual_seed(0)
    model = make()
    bind(model, DataLoader(list(range(8)), 4))
    return model


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("how", [lambda model: model, *COPIES])
def test_a_head_is_cut_off_as_before(make: Any, how: Any) -> None:
    torch.manual_seed(0)
    plain, model = make(), how(bound(make))
    cut = nn.Sequential(*list(model.children())[:-1])
    assert torch.equal(cut(X), nn.Sequential(*list(plain.children())[:-1])(X))
    assert len(list(model.children())) == 2
    assert torch.equal(model(X), plain(X))
    assert KEY in model.state_dict()


@pytest.mark.parametrize("make", MODELS)
def test_whoever_goes_by_names_finds_it(make: Any) -> None:
    model = bound(make)
    assert [name for name, _ in model.named_children()][-1] == "data_progress"
    assert [name for name, _ in model.named_modules()][-1] == "data_progress"
    rebuilt = nn.Sequential(OrderedDict(model.named_children()))
    assert torch.equal(rebuilt(X), model(X))
    assert KEY in rebuilt.state_dict(), "whoever rebuilds by names takes the progress along"


@pytest.mark.parametrize("make", [sequence, layers])
def test_a_sequence_is_as_long_as_it_was_and_can_be_changed(make: Any) -> None:
    plain, model = make(), bound(make)
    assert type(model).__name__ == type(plain).__name__ and isinstance(model, type(plain))
    assert len(model) == 2 and model[-1] is model[1] and [*model] == [model[0], model[1]]
    assert type(model[:-1]) is type(plain) and [*model[:-1]] == [model[0]]
    with pytest.raises(IndexError):
        model[2]
    for one in (plain, model):
        one.append(nn.Linear(3, 1))
        one.insert(0, nn.Linear(2, 2))
        del one[1]
        one[0] = nn.Linear(2, 8)
    assert {*model.state_dict()} == {*plain.state_dict(), KEY}
    model.load_state_dict(plain.state_dict() | {KEY: model.state_dict()[KEY]})
    assert torch.equal(model(X[:, :2]), plain(X[:, :2]))


def test_a_sequence_that_counts_in_its_own_way_does_so_still() -> None:
    class Reversed(nn.Sequential):
        def __iter__(self) -> Iterator[nn.Module]:
            return reversed([m for m in self._modules.values() if isinstance(m, nn.Linear)])

    model = bound(lambda: Reversed(nn.Linear(8, 3), nn.Linear(2, 8)))
    assert model(X).shape == (4, 3)
    assert len(list(model.children())) == 2


@pytest.mark.parametrize("make", MODELS)
def test_a_model_is_freed_when_nobody_holds_it(make: Any) -> None:
    model = bound(make)
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*TorchScript.*")
@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize(
    "how",
    [
        torch.jit.script,
        lambda model: torch.jit.trace(model, X),
        lambda model: torch.export.export(model, (X,)).module(),
        torch.fx.symbolic_trace,
        lambda model: torch.compile(model, backend="eager", fullgraph=True),
    ],
    ids=["script", "trace", "export", "fx", "compile"],
)
def test_it_is_compiled_as_before(make: Any, how: Any) -> None:
    model = bound(make)
    assert torch.equal(how(model)(X), model(X))


@pytest.mark.parametrize(
    "wrap",
    [nn.DataParallel, lambda model: type("FSDP", (nn.Module,), {"_fsdp_wrapped_module": model})()],
)
def test_wrappers_whose_keys_differ_are_refused(wrap: Any) -> None:
    with pytest.raises(ConfigurationError, match="bind the model itself, before it is wrapped"):
        bind(wrap(Net()), DataLoader(list(range(8)), 4))


def test_a_model_under_data_parallel_is_bound_before() -> None:
    model = bound(Net)
    state = nn.DataParallel(model).module.state_dict()
    assert KEY in state


class Block(nn.Sequential):
    """A sequence that is made of something else than its layers, as those of torchvision are."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2))


def test_a_layer_of_a_sequence_with_a_constructor_of_its_own() -> None:
    plain, model = Block(3), bound(lambda: Block(3))
    assert isinstance(model[-1], nn.Linear) and model[-1] is model._modules["2"]
    assert [type(layer) for layer in reversed(model)] == [nn.Linear, nn.ReLU, nn.Linear]
    assert model[0] in model
    with pytest.raises(TypeError):  # as without progress
        plain[:2]
    with pytest.raises(TypeError):
        model[:2]
    with pytest.raises(IndexError, match="3"):
        model[3]
    assert isinstance(model.pop(1), nn.ReLU)
    assert [name for name, _ in model.named_children()] == ["0", "1", "data_progress"]
    assert KEY in model.state_dict()


@pytest.mark.parametrize("model", [nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict()])
def test_a_list_or_dict_of_modules_is_not_bound(model: nn.Module) -> None:
    with pytest.raises(ConfigurationError, match=f"{type(model).__name__}.*Bind the module"):
        bind(model, DataLoader(list(range(8)), 4))
    assert not model.state_dict() or KEY not in model.state_dict()
