"""The data's progress inside a model's state dict."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.optim.swa_utils import AveragedModel
from toys import batches, flat, ids, memory, one

from zephon_torch import DataLoader, DataProgress, bind, strip
from zephon_torch.errors import ConfigurationError, PlanMismatch, StaleIteratorError, StateError

KEY = "data_progress._extra_state"


def make(total: int = 40, seed: int = 5, **options: Any) -> DataLoader:
    source = one(memory("a", total), seed=seed, shuffle_block_size="global")
    return DataLoader(source, batch_size=4, **options)


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


def trained(steps: int = 3, **options: Any) -> tuple[nn.Module, DataLoader]:
    model, loader = small(), make(**options)
    bind(model, loader)
    loop = iter(loader)
    for _ in range(steps):
        next(loop)
    return model, loader


def fresh(**options: Any) -> tuple[nn.Module, DataLoader]:
    model, loader = small(), make(**options)
    bind(model, loader)
    return model, loader


def rest(loader: DataLoader) -> list[int]:
    return flat(batches(loader))


ORDER = rest(make())
AT_3 = ORDER[12:]


def test_a_model_carries_one_small_cpu_tensor_more() -> None:
    model, _ = trained()
    state = model.state_dict()
    assert set(state) - set(small().state_dict()) == {KEY}
    assert state[KEY].dtype is torch.int64 and state[KEY].shape == (16,)
    assert state[KEY].device.type == "cpu"
    assert state[KEY][:4].tolist() == [1, 0, 12, 1]
    assert [*model.parameters()] and not [*model.data_progress.parameters()]  # type: ignore[union-attr,operator]
    assert not [*model.buffers()]


def test_loading_the_model_puts_the_data_back() -> None:
    state = trained()[0].state_dict()
    model, loader = fresh()
    assert not model.load_state_dict(state, strict=True).missing_keys
    assert (loader.epoch, loader.delivered) == (0, 12)
    assert model.state_dict()[KEY].tolist() == state[KEY].tolist()
    assert rest(loader) == AT_3


def test_the_tensor_is_a_copy_of_the_moment() -> None:
    model, loader = trained()
    state = model.state_dict()
    next(iter(loader))
    assert state[KEY][2] == 12


@pytest.mark.parametrize("strict", [True, False])
def test_checkpoints_without_progress_load_and_change_nothing(strict: bool) -> None:
    old = small().state_dict()
    model, loader = trained()
    before = loader.state_dict()
    keys = list(old)
    result = model.load_state_dict(old, strict=strict)
    assert not result.missing_keys and not result.unexpected_keys
    assert list(old) == keys, "the caller's dict is left alone"
    assert loader.state_dict() == before


@pytest.mark.parametrize("full", [False, True])
def test_so_they_do_through_torchs_own_setter(full: bool) -> None:
    model, loader = trained()
    before = loader.state_dict()
    set_model_state_dict(
        model, small().state_dict(), options=StateDictOptions(full_state_dict=full)
    )
    assert loader.state_dict() == before
    loader.load_state_dict(before)
    assert rest(loader) == AT_3


def test_strip_is_for_models_that_have_none() -> None:
    state = trained()[0].state_dict()
    with pytest.raises(RuntimeError, match="data_progress"):
        small().load_state_dict(state)
    small().load_state_dict(strip(state), strict=True)
    prefixed = {f"_orig_mod.module.{key}": value for key, value in state.items()}
    assert set(strip(prefixed)) == {f"_orig_mod.module.{key}" for key in small().state_dict()}
    assert KEY in state


def test_strip_leaves_other_extra_states_alone() -> None:
    state = {"a._extra_state": 1, "my_data_progress._extra_state": 2, KEY: 3}
    assert strip(state) == {"a._extra_state": 1, "my_data_progress._extra_state": 2}
    assert strip(state, name="a") == {"my_data_progress._extra_state": 2, KEY: 3}


def test_a_sequence_of_layers_computes_what_it_did() -> None:
    """An nn.Sequential calls all its children, this one too."""
    model = small()
    expected = model(torch.ones(4, 2))
    bind(model, make())
    assert torch.equal(model(torch.ones(4, 2)), expected)


def test_a_name_of_ones_own() -> None:
    model, loader = small(), make()
    child = bind(model, loader, name="rows")
    assert model.rows is child
    assert "rows._extra_state" in model.state_dict()


def test_a_name_that_is_taken() -> None:
    model = small()
    with pytest.raises(ConfigurationError, match=r"'weight'.*another name="):
        bind(model[0], make(), name="weight")  # type: ignore[index]


def test_a_second_loader_takes_the_place_of_the_first_only_when_asked_to() -> None:
    model, first = trained()
    second = make()
    with pytest.raises(ConfigurationError, match=r"another loader.*name="):
        bind(model, second)
    assert model.state_dict()[KEY][2] == first.delivered
    bind(model, first)  # once more, to no effect
    bind(model, second, name="evaluation")
    next(iter(second))
    assert model.state_dict()[KEY][2] == first.delivered
    assert model.state_dict()["evaluation._extra_state"][2] == 4
    model.data_progress.bind(second)
    assert model.state_dict()[KEY][2] == 4


@pytest.mark.parametrize("inner", ["_orig_mod", "_forward_module"])  # torch.compile's and Fabric's
def test_a_wrapped_model_is_refused(inner: str) -> None:
    wrapped = nn.Module()
    setattr(wrapped, inner, nn.Linear(1, 1))
    with pytest.raises(ConfigurationError, match=r"before it is wrapped"):
        bind(wrapped, make())


def test_what_is_no_loader_of_ours_is_refused() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(ConfigurationError, match=r"list cannot be bound.*before it is wrapped"):
        bind(model, [1, 2])  # type: ignore[arg-type]
    assert not list(model.children())


# --- ways of saving ------------------------------------------------------------------------------


def through_torch(state: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    torch.save(state, tmp_path / "model.pt")
    return torch.load(tmp_path / "model.pt", weights_only=True)


def through_safetensors(state: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    safetensors.torch.save_file(state, tmp_path / "model.safetensors")
    return safetensors.torch.load_file(tmp_path / "model.safetensors")


def through_dcp(state: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about running without a process group
        dcp_save({"model": state}, checkpoint_id=tmp_path / "dcp")
        into = {"model": {key: torch.zeros_like(value) for key, value in state.items()}}
        dcp_load(into, checkpoint_id=tmp_path / "dcp")
    return into["model"]


@pytest.mark.parametrize("way", [through_torch, through_safetensors, through_dcp])
def test_every_way_of_saving_tensors_saves_it(way: Any, tmp_path: Path) -> None:
    state = way(trained()[0].state_dict(), tmp_path)
    model, loader = fresh()
    model.load_state_dict(state)
    assert rest(loader) == AT_3


def test_safetensors_saves_and_loads_a_model_as_such(tmp_path: Path) -> None:
    safetensors.torch.save_model(trained()[0], str(tmp_path / "model.safetensors"))
    model, loader = fresh()
    missing, unexpected = safetensors.torch.load_model(model, tmp_path / "model.safetensors")
    assert not missing and not unexpected
    assert rest(loader) == AT_3


def test_a_model_in_bfloat16_keeps_its_integers(tmp_path: Path) -> None:
    state = through_safetensors(trained()[0].to(torch.bfloat16).state_dict(), tmp_path)
    assert state["0.weight"].dtype is torch.bfloat16 and state[KEY].dtype is torch.int64
    model, loader = fresh()
    model.to(torch.bfloat16).load_state_dict(state)
    assert rest(loader) == AT_3


def test_the_loader_itself_is_stateful_for_distributed_checkpoints(tmp_path: Path) -> None:
    _, loader = trained()
    restored = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save({"loader": loader}, checkpoint_id=tmp_path / "dcp")
        dcp_load({"loader": restored}, checkpoint_id=tmp_path / "dcp")
    assert rest(restored) == AT_3


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own
def test_a_model_under_a_compilers_prefix() -> None:
    """torch.compile wraps a model without compiling it; its keys begin with _orig_mod."""
    model, loader = fresh()
    wrapped = torch.compile(model)
    state = trained()[0].state_dict()
    wrapped.load_state_dict({f"_orig_mod.{key}": value for key, value in state.items()})
    assert f"_orig_mod.{KEY}" in wrapped.state_dict()
    assert rest(loader) == AT_3


def test_a_model_made_without_memory_and_assigned() -> None:
    state = trained()[0].state_dict()
    loader = make()
    with torch.device("meta"):
        model = small()
        bind(model, loader)
        assert model.state_dict()[KEY].device.type == "cpu"
        assert model.state_dict()[KEY][2] == 0
    model.load_state_dict(state, assign=True)
    assert rest(loader) == AT_3


def test_a_model_that_makes_its_own_and_is_loaded_before_the_loader_exists() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.data_progress = DataProgress()

    saved = Model()
    assert not saved.state_dict()[KEY].any()
    loader = make()
    bind(saved, loader)
    loop = iter(loader)
    for _ in range(3):
        next(loop)

    model = Model()
    model.load_state_dict(saved.state_dict())
    assert model.state_dict()[KEY].tolist() == saved.state_dict()[KEY].tolist()
    loader = make()
    bind(model, loader)
    assert rest(loader) == AT_3


def test_a_model_bound_only_after_it_was_loaded_takes_no_progress() -> None:
    model, loader = small(), make()
    model.load_state_dict(strip(trained()[0].state_dict()))
    bind(model, loader)
    assert rest(loader) == ORDER


def test_progress_before_any_loader_says_nothing() -> None:
    progress = DataProgress()
    progress.set_extra_state(progress.get_extra_state())
    loader = make()
    progress.bind(loader)
    assert rest(loader) == ORDER


# --- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_keep_the_integers_and_drop_the_loader(how: Any) -> None:
    model, loader = trained()
    twin = how(model)
    next(iter(loader))
    assert twin.state_dict()[KEY][2] == 12
    other = make()
    bind(twin, other)
    assert rest(other) == AT_3


def test_a_whole_model_saved_as_an_object() -> None:
    file = io.BytesIO()
    torch.save(trained()[0], file)
    file.seek(0)
    model = torch.load(file, weights_only=False)
    loader = make()
    bind(model, loader)
    assert rest(loader) == AT_3


def test_a_moving_average_of_the_model() -> None:
    model, loader = fresh()
    average = AveragedModel(model)
    loop = iter(loader)
    for _ in range(3):
        next(loop)
        average.update_parameters(model)
    assert average.state_dict()[f"module.{KEY}"].dtype is torch.int64
    seen = average.module.load_state_dict(model.state_dict())
    assert not seen.missing_keys
    assert (loader.epoch, loader.delivered) == (0, 12), "the average has no loader to move"
    assert flat(batches(loop)) == AT_3


def test_an_average_keeps_the_place_where_it_was_made() -> None:
    """So it is the model's state that a run goes on from, and the average is stripped."""
    model, loader = trained(1)
    average = AveragedModel(model)
    loop = iter(loader)
    for _ in range(2):
        next(loop)
        average.update_parameters(model)
    assert model.state_dict()[KEY][2] == 8
    assert average.module.state_dict()[KEY][2] == 4
    small().load_state_dict(strip(average.module.state_dict()))


@pytest.mark.parametrize("taken", [strip, dict])
def test_an_evaluation_of_the_average_in_the_middle_of_an_epoch(taken: Any) -> None:
    model, loader = fresh()
    average, evaluation = AveragedModel(model), DataLoader(list(range(10)), 4)
    loop = iter(loader)
    for _ in range(3):
        next(loop)
        average.update_parameters(model)
        backup = {key: value.clone() for key, value in model.state_dict().items()}
        model.load_state_dict(taken(average.module.state_dict()))
        assert rest(evaluation) == list(range(10))
        model.load_state_dict(backup)
    assert flat(batches(loop)) == AT_3


def test_weights_swapped_out_and_in_during_a_loop() -> None:
    model, loader = trained(0)
    loop = iter(loader)
    for _ in range(3):
        next(loop)
    backup = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(strip(backup))
    model.load_state_dict(backup)
    assert flat(batches(loop)) == AT_3


def test_loading_another_place_during_a_loop_ends_it_loudly() -> None:
    early = trained(1)[0].state_dict()
    model, loader = trained(0)
    loop = iter(loader)
    for _ in range(3):
        next(loop)
    model.load_state_dict(early)
    with pytest.raises(StaleIteratorError):
        next(loop)
    assert rest(loader) == ORDER[4:]


# --- warm starts ---------------------------------------------------------------------------------


def test_restore_false_ignores_what_is_loaded() -> None:
    state = trained()[0].state_dict()
    model, loader = small(), make()
    bind(model, loader, restore=False)
    model.load_state_dict(state)
    assert rest(loader) == ORDER
    assert model.state_dict()[KEY][1] == 1, "it still saves"


def test_restore_false_counts_for_what_was_loaded_before_too() -> None:
    model, loader = small(), make()
    model.add_module("data_progress", DataProgress())
    model.load_state_dict(trained()[0].state_dict())
    bind(model, loader, restore=False)
    assert rest(loader) == ORDER


def test_a_copy_of_a_model_that_does_not_restore_does_not_either() -> None:
    model, loader = small(), make()
    bind(model, loader, restore=False)
    next(iter(loader))
    twin, other = copy.deepcopy(model), make()
    bind(twin, other, restore=False)
    assert rest(other) == ORDER


# --- states that cannot be right -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_integers_cast_to_floats_are_refused_at_iter_never_at_load(dtype: torch.dtype) -> None:
    state = {key: value.to(dtype) for key, value in trained()[0].state_dict().items()}
    model, loader = fresh()
    model.load_state_dict(state)  # an error here would leave the model half loaded
    repr(model)
    for use in (iter, len, lambda loader: loader.batch(0)):
        with pytest.raises(StateError, match=r"checksum.*float"):
            use(loader)


@pytest.mark.parametrize(
    "state",
    [
        torch.ones(4, dtype=torch.int64),
        torch.arange(16),
        torch.full((16,), 2**63 - 1),
        torch.full((16,), float("nan")),
        torch.full((16,), float("inf")),
        torch.full((16,), 2.0**63, dtype=torch.float64),
        torch.ones(16, dtype=torch.complex64),
        torch.ones(16, dtype=torch.bool),
        {"epoch": 1},
        "text",
        [1, 2, 3],
    ],
    ids=lambda state: str(state)[:30].replace("\n", " "),
)
def test_anything_else_under_its_key_is_refused_at_iter_never_at_load(state: Any) -> None:
    model, loader = fresh()
    model.load_state_dict(small().state_dict() | {KEY: state})
    with pytest.raises(StateError):
        iter(loader)
    loader.load_state_dict(make().state_dict())


def test_another_plan_is_refused_at_iter_and_named_as_well_as_integers_can() -> None:
    state = trained()[0].state_dict()
    model, loader = fresh(seed=6)
    model.load_state_dict(state)
    with pytest.raises(PlanMismatch, match="its seed differ"):
        iter(loader)
    model, loader = fresh(total=41)
    model.load_state_dict(state)
    with pytest.raises(
        PlanMismatch, match=r"its datasets .*differ \(1 dataset, 1 shard, 40 samples then"
    ):
        iter(loader)


def test_two_routes_that_agree_are_one() -> None:
    model, loader = trained()
    weights, data = model.state_dict(), loader.state_dict()
    model, loader = fresh()
    model.load_state_dict(weights)
    loader.load_state_dict(data)
    assert rest(loader) == AT_3


@pytest.mark.parametrize("last", ["model", "loader"])
def test_two_routes_from_another_plan_say_as_much_as_either_can(last: str) -> None:
    weights, data = [part.state_dict() for part in trained()]
    model, loader = fresh(total=41)
    loader.load_state_dict(data)
    model.load_state_dict(weights)
    if last == "loader":
        loader.load_state_dict(data)
    with pytest.raises(PlanMismatch, match=r"dataset 'a'.*40 .*41"):
        iter(loader)


def test_two_routes_that_disagree_are_named() -> None:
    weights, data = trained(3)[0].state_dict(), trained(5)[1].state_dict()
    for first in ("model", "loader"):
        model, loader = fresh()
        if first == "model":
            model.load_state_dict(weights)
        loader.load_state_dict(data)
        if first == "loader":
            model.load_state_dict(weights)
        with pytest.raises(StateError, match=r"disagree.*delivered=.*delivered=.*restore=False"):
            iter(loader)


def test_where_another_plan_was_accepted_the_models_own_words_agree() -> None:
    """As when averaged weights are swapped in and out before the first batch."""
    other = trained(seed=9)[1].state_dict()
    for accept in (0, 1):
        model, loader = fresh()
        if accept:
            model.load_state_dict(trained(seed=9)[0].state_dict())
            other = loader.state_dict()
        loader.load_state_dict(other, strict=False)
        model.load_state_dict(model.state_dict())
        assert rest(loader) == AT_3


def test_after_a_refusal_by_the_model_route_the_loader_route_can_mend_it() -> None:
    broken = {key: value.bfloat16() for key, value in trained()[0].state_dict().items()}
    model, loader = fresh()
    model.load_state_dict(broken)
    with pytest.raises(StateError):
        iter(loader)
    model.load_state_dict(trained()[0].state_dict())
    assert rest(loader) == AT_3


def test_a_fresh_process_reads_it_without_the_package(tmp_path: Path) -> None:
    torch.save(trained()[0].state_dict(), tmp_path / "model.pt")
    script = (
        "import sys, torch; state = torch.load(sys.argv[1], weights_only=True); "
        f"print(state['{KEY}'][:4].tolist(), 'zephon_torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "model.pt")],
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    assert done.stdout == "[1, 0, 12, 1] False\n"


def test_ids_of_a_resumed_model_are_those_of_the_loader_route() -> None:
    model, loader = trained(7)
    by_model, by_loader = fresh(), make()
    by_model[0].load_state_dict(model.state_dict())
    by_loader.load_state_dict(loader.state_dict())
    assert [ids(b) for b in by_model[1]] == [ids(b) for b in by_loader]
