"""Under PEFT: what its save_pretrained drops is told, and what the docs say instead works.

Public reports: huggingface/transformers#24252, huggingface/peft#1734.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import installed
from torch import nn
from toys import batches

from zephon_torch import DataLoader, PlanMismatch, bind

pytestmark = [
    pytest.mark.skipif(not installed("peft"), reason="peft is not installed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

TOLD = r"save_pretrained\(\) saves them alone.*save loader.state_dict\(\) beside them"
STEPS = 5


def build(total: int = 100) -> tuple[nn.Module, DataLoader]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4)), DataLoader(list(range(total)), 4, shuffle=True)


def adapted(model: nn.Module, **options: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(target_modules=["0"], **options))


def train(loader: DataLoader, steps: int = STEPS) -> None:
    loop = iter(loader)
    for _ in range(steps):
        next(loop)


REST = batches(build()[1])[STEPS:]


def test_bind_tells_of_a_model_with_adapters() -> None:
    base, loader = build()
    model = adapted(base)
    with pytest.warns(UserWarning, match=TOLD) as told:
        bind(model, loader)
        model.state_dict()
        bind(model, loader)
    assert len(told) == 1, "once"


def test_a_bound_model_that_gets_adapters_is_told_when_it_is_saved(tmp_path: Path) -> None:
    base, loader = build()
    bind(base, loader)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        base.state_dict()
    model = adapted(base)
    with pytest.warns(UserWarning, match=TOLD):
        model.save_pretrained(tmp_path)


@pytest.mark.skipif(not installed("transformers"), reason="transformers is not installed")
def test_prompts_leave_the_base_model_as_it_is_and_are_told_too(tmp_path: Path) -> None:
    from peft import PromptTuningConfig, get_peft_model
    from transformers import LlamaConfig, LlamaModel

    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 8)
    config = LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=1)
    base, loader = LlamaModel(config), build()[1]
    bind(base, loader)
    prompts = PromptTuningConfig(
        num_virtual_tokens=2, token_dim=8, num_layers=1, num_attention_heads=1,
        num_transformer_submodules=1, task_type="FEATURE_EXTRACTION",
    )  # fmt: skip
    model = get_peft_model(base, prompts)
    with pytest.warns(UserWarning, match=TOLD):
        model.save_pretrained(tmp_path)


@pytest.mark.filterwarnings("ignore:the model has adapters")
def test_the_loaders_state_beside_the_adapter_goes_on_and_notices_other_data(
    tmp_path: Path,
) -> None:
    """As docs/checkpoints.md has it."""
    from peft import PeftModel

    base, loader = build()
    model = adapted(base)
    train(loader)
    model.save_pretrained(tmp_path)
    torch.save(loader.state_dict(), tmp_path / "data.pt")

    base, loader = build()
    model = PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    loader.load_state_dict(torch.load(tmp_path / "data.pt", weights_only=True))
    assert batches(loader) == REST
    assert any(p.requires_grad for p in model.parameters())

    _, other = build(total=101)
    other.load_state_dict(torch.load(tmp_path / "data.pt", weights_only=True))
    with pytest.raises(PlanMismatch):
        iter(other)


@pytest.mark.filterwarnings("ignore:the model has adapters")
@pytest.mark.parametrize("first", ["bind", "adapters"])
def test_the_whole_state_dict_carries_it(first: str, tmp_path: Path) -> None:
    def make() -> tuple[Any, DataLoader]:
        base, loader = build()
        if first == "bind":
            bind(base, loader)
            return adapted(base), loader
        model = adapted(base)
        bind(model, loader)
        return model, loader

    model, loader = make()
    train(loader)
    torch.save(model.state_dict(), tmp_path / "whole.pt")
    model, loader = make()
    model.load_state_dict(torch.load(tmp_path / "whole.pt", weights_only=True))
    assert batches(loader) == REST


@pytest.mark.filterwarnings("ignore:the model has adapters")
def test_modules_to_save_take_a_copy_that_follows_no_loader(tmp_path: Path) -> None:
    """So docs/checkpoints.md advises against it."""
    base, loader = build()
    bind(base, loader)
    model = adapted(base, modules_to_save=["data_progress"])
    train(loader)
    state = {name: value for name, value in model.state_dict().items() if "_extra_state" in name}
    copies = [int(value[2]) for name, value in state.items() if "modules_to_save" in name]
    assert copies == [0] and loader.delivered == 20
