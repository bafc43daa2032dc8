"""A bound model's checkpoint, set tensor by tensor by Accelerate; a prepared loader's totals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from launching import forget_accelerate, installed
from torch import nn

from zephon_torch import DataLoader, Skippable, bind

pytestmark = pytest.mark.skipif(not installed("accelerate"), reason="accelerate is not installed")

KEY = "data_progress._extra_state"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    forget_accelerate()


def build() -> tuple[nn.Module, DataLoader]:
    model, loader = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), DataLoader(list(range(40)), 4)
    bind(model, loader)
    return model, loader


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, loader = build()
    next(iter(loader))
    torch.save(model.state_dict(), tmp_path / "model.bin")
    safetensors.torch.save_file(
        model.state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    return tmp_path


@pytest.mark.parametrize("file", ["model.bin", "model.safetensors"])
@pytest.mark.parametrize(
    "options",
    [
        {"device_map": {"": "cpu"}},
        {"device_map": {"": "cpu"}, "strict": True},
        {"device_map": {"": "cpu"}, "dtype": torch.float16},
        {"device_map": {"": "cpu"}, "offload_state_dict": True},
        {"device_map": {"0": "cpu", "1": "cpu", "data_progress": "cpu"}},
        {"device_map": "auto"},
        {"device_map": None},
    ],
    ids=str,
)
def test_load_checkpoint_and_dispatch(file: str, options: dict[str, Any], saved: Path) -> None:
    from accelerate import load_checkpoint_and_dispatch

    model, loader = build()
    load_checkpoint_and_dispatch(model, str(saved / file), **options)
    assert loader.delivered == 4
    state = model.state_dict()
    assert torch.equal(state["0.weight"].float(), torch.load(saved / "model.bin")["0.weight"]) or (
        "dtype" in options
    )
    assert next(iter(loader)).tolist() == [4, 5, 6, 7]


def test_a_model_made_without_memory_gets_it_too(saved: Path) -> None:
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch

    with init_empty_weights():
        model, loader = build()
    load_checkpoint_and_dispatch(model, str(saved / "model.bin"), device_map={"": "cpu"})
    assert loader.delivered == 4


def test_progress_that_stays_on_disk_is_told_and_not_taken_for_none(saved: Path) -> None:
    from accelerate import load_checkpoint_and_dispatch

    from zephon_torch import StateError

    model, loader = build()
    load_checkpoint_and_dispatch(
        model, str(saved / "model.bin"), device_map={"": "disk"}, offload_folder=str(saved / "out")
    )
    with pytest.raises(StateError):
        iter(loader)


@pytest.mark.parametrize("wrap", [lambda loader: loader, Skippable])
@pytest.mark.parametrize("drop_last", [False, True])
def test_totals_are_those_of_accelerates_own_loaders(wrap: Any, drop_last: bool) -> None:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader as TorchLoader

    accelerator = Accelerator(cpu=True)
    theirs = accelerator.prepare(TorchLoader(list(range(22)), 4, drop_last=drop_last))
    ours = accelerator.prepare(wrap(DataLoader(list(range(22)), 4, drop_last=drop_last)))
    assert ours.total_batch_size == theirs.total_batch_size == 4
    assert ours.total_dataset_length == theirs.total_dataset_length == 22


def test_totals_are_over_all_processes() -> None:
    loader = DataLoader(list(range(22)), 4, rank=1, num_replicas=3)
    assert (loader.total_batch_size, loader.total_dataset_length) == (12, 22)
