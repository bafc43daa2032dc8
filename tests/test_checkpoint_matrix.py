"""Every kind of checkpoint of every kind of model, saved by some processes, loaded by others.

What a run trains on after a load is compared with one loader of one process that was never stopped.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import started
from toys import ids

from zephon_torch import DataLoader

SCRIPTS = Path(__file__).parent / "distributed"
sys.path.insert(0, str(SCRIPTS))

import checkpoints as script  # noqa: E402

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not hasattr(torch.cpu.Stream, "record_event"), reason="this torch has FSDP2 for GPUs only"
    ),
]

WORLDS = [1, 2, 3, 4]
IN_SHORT = ["2-3", "3-1", "1-4", "4-2"]
IN_FULL = [f"{saved_by}-{loaded_by}" for saved_by in WORLDS for loaded_by in WORLDS]
Found = dict[str, dict[str, Any]]


def launch(folder: Path, num_parts: int, pairs: list[str]) -> dict[str, Found]:
    """What followed the loads, by pair of worlds."""
    options = [str(folder), str(num_parts), *pairs]
    command = [sys.executable, str(SCRIPTS / "checkpoints.py"), *options]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as run:
        printed, _ = run.communicate(timeout=600 if num_parts > 1 else 1800)
    assert run.returncode == 0, printed
    return {pair: json.loads((folder / f"{pair}.json").read_text()) for pair in pairs}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    """Pairwise: of pair of worlds, model and way, any two have met."""
    return launch(tmp_path_factory.mktemp("checkpoints"), 4, IN_SHORT)


def uninterrupted(num_epochs: int) -> list[list[int]]:
    loader = DataLoader(script.make_source(), global_batch_size=script.GLOBAL_BATCH_SIZE)
    return [ids(batch) for _ in range(num_epochs) for batch in loader]


BATCHES = uninterrupted(5)


def goes_on(start: int) -> list[list[int]]:
    """Global batches of an uninterrupted run from a step on."""
    return BATCHES[start : start + script.FOLLOWING]


def expected(result: dict[str, Any]) -> dict[str, Any]:
    """The weights of the save, and what follows it."""
    steps = result["saved after"]
    return {"saved after": steps, "weights": [steps], "following": goes_on(steps)}


def loads(found: dict[str, Found], group: str) -> dict[tuple[str, str], Any]:
    return {(pair, case): r for pair, all_ in found.items() for case, r in all_[group].items()}


def check_model(found: dict[str, Found], model: str) -> None:
    results = loads(found, model)
    assert {way for _, way in results} == set(script.ways_of(model))
    assert results == {case: expected(result) for case, result in results.items()}


def check_others(found: dict[str, Found]) -> None:
    """Checkpoints from before bind, into models without it, into another kind of model."""
    before = loads(found, "before bind")
    assert len({case for _, case in before}) == len(script.BEFORE_BIND)
    assert before == {
        case: {"saved after": 1, "weights": [1], "following": goes_on(0)} for case in before
    }
    without = loads(found, "without bind")
    assert len({case for _, case in without}) == len(script.WITHOUT_BIND)
    assert without == {
        case: expected(result) | {"following": goes_on(0)} for case, result in without.items()
    }
    across = loads(found, "across")
    assert len({case for _, case in across}) == len(script.ACROSS)
    assert across == {case: expected(result) for case, result in across.items()}


# what is said where only a model has brought the state, and where the loader has
SAYS = {
    "a dataset is added": (
        r"its datasets .* differ \(3 datasets, .* then, 4 datasets, .* now\)",
        "dataset 'd' takes part now, it did not at the checkpoint",
    ),
    "a dataset is removed": (
        r"its datasets .* differ \(3 datasets, .* then, 2 datasets, .* now\)",
        "dataset 'c' took part at the checkpoint, it does not now",
    ),
    "a dataset is renamed": (
        r"its datasets \(their names, shards or sizes\) differ",
        "dataset 'c' was there at the checkpoint, 'e' is there now",
    ),
    "a shard is added": (
        r"its datasets .* differ \(3 datasets, 5 shards, .* then, 3 datasets, 6 shards, .* now\)",
        "dataset 'b': 2 shards at the checkpoint, 3 now",
    ),
    "a weight is changed": (r"its weights differ", "weight of dataset 'b': 0.3 .*, 0.222222 now"),
    "the seed is changed": (r"its seed differs", "seed: 7 at the checkpoint, 8 now"),
}


def check_refusals(found: dict[str, Found], change: str) -> None:
    """Each use of the loader refuses, in the words that the state has room for."""
    met = set()
    for by_way in (results["another plan"][change] for results in found.values()):
        met |= {*by_way}
        for case, said in by_way.items():
            words = SAYS[change]["loader" in case]
            assert len(said) == 5 and all(re.search(words, message) for message in said), case
    assert met == {f"{model}, {way}" for model, way in script.NOTICED}


@pytest.mark.parametrize("model", script.MODELS)
def test_any_checkpoint_of_a_model_goes_on_in_another_world(
    found: dict[str, Found], model: str
) -> None:
    check_model(found, model)


def test_they_are_saved_at_any_moment(found: dict[str, Found]) -> None:
    """Before the first step, in an epoch, at its edge, and in the next."""
    results = [result for model in script.MODELS for result in loads(found, model).values()]
    assert {result["saved after"] for result in results} == {*range(len(script.WAYS))}
    assert len(BATCHES) // 5 < len(script.WAYS), "an epoch is shorter"


def test_models_with_and_without_progress_and_of_other_kinds_share_checkpoints(
    found: dict[str, Found],
) -> None:
    check_others(found)


@pytest.mark.parametrize("change", script.CHANGES)
def test_another_plan_is_told_in_words_at_each_use(found: dict[str, Found], change: str) -> None:
    check_refusals(found, change)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_full_product(tmp_path: Path) -> None:
    found = launch(tmp_path, 1, IN_FULL)
    assert len(found) == len(WORLDS) ** 2
    for model in script.MODELS:
        check_model(found, model)
    check_others(found)
    for change in script.CHANGES:
        check_refusals(found, change)
