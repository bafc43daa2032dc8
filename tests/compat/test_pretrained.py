"""save_pretrained and from_pretrained of transformers carry the progress, or leave it out."""

from __future__ import annotations

from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from safetensors.torch import load_file  # noqa: E402
from toys import batches, flat  # noqa: E402

from zephon_torch import DataLoader, DataProgress, bind, strip  # noqa: E402

KEY = "data_progress._extra_state"
TINY = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}


class WithProgress(transformers.LlamaForCausalLM):  # type: ignore[name-defined,misc]
    """Has a place for the progress from the start: from_pretrained loads before bind can."""

    def __init__(self, config: transformers.LlamaConfig) -> None:
        super().__init__(config)
        self.data_progress = DataProgress()
        self.post_init()


def make() -> DataLoader:
    return DataLoader(list(range(40)), 4, shuffle=True)


ORDER = flat(batches(make()))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A model after three batches."""
    model, loader = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)), make()
    bind(model, loader)
    loop = iter(loader)
    for _ in range(3):
        next(loop)
    model.save_pretrained(tmp_path)
    return tmp_path


def test_a_model_with_a_place_of_its_own_takes_it_from_pretrained(saved: Path) -> None:
    model, loader = WithProgress.from_pretrained(saved), make()
    bind(model, loader)
    assert flat(batches(loader)) == ORDER[12:]


def test_the_file_that_save_pretrained_wrote_loads_into_a_bound_model(saved: Path) -> None:
    model, loader = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)), make()
    bind(model, loader)
    model.load_state_dict(load_file(saved / "model.safetensors"))
    assert flat(batches(loader)) == ORDER[12:]


def test_any_other_model_reports_one_unexpected_key_and_has_all_weights(saved: Path) -> None:
    _, report = transformers.LlamaForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert set(report["unexpected_keys"]) == {KEY}
    assert not report["missing_keys"] and not report["mismatched_keys"]


def test_a_model_is_published_without_the_progress(saved: Path, tmp_path: Path) -> None:
    model = WithProgress.from_pretrained(saved)
    published = tmp_path / "published"
    model.save_pretrained(published, state_dict=strip(model.state_dict()))
    assert KEY not in load_file(published / "model.safetensors")
    _, report = transformers.LlamaForCausalLM.from_pretrained(published, output_loading_info=True)
    assert not report["unexpected_keys"] and not report["missing_keys"]
