"""Under Lightning's Trainer and Fabric: the plan's batches, and exact resume from any checkpoint.

Three launches, of one process, two and again one; each goes on from what those before have saved.
"""

from __future__ import annotations

import hashlib
import re
import runpy
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import launching
import pytest
from launch import Forks, Launch
from launching import installed
from processes import ROOT
from toys import batches, flat

from zephon_torch import DataLoader

pytestmark = [
    pytest.mark.skipif(not installed("lightning"), reason="lightning is not installed"),
    pytest.mark.timeout(500),
]

STEPS = 6  # of an epoch
TRAINER = {"max_epochs": 3, "accumulate_grad_batches": 2, "val_check_interval": 4}
Result = dict[str, Any]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("lightning.pytorch", "lightning.fabric", "torch._dynamo") as forks:
        yield forks


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> dict[str, Result]:
    root = tmp_path_factory.mktemp("lightning")

    def launch(world: int, requests: dict[str, dict[str, Any]]) -> dict[str, Result]:
        found = launching.results(forks, world, "lightning_run.py", *requests.values())
        return dict(zip(requests, found, strict=True))

    def train(name: str, run: str = "train", **options: Any) -> dict[str, Any]:
        return {"run": run, "folder": f"{root}/{name}", "bound": "bound" in name} | options

    def resume(name: str, names: str = "*", **options: Any) -> dict[str, Any]:
        return train(name, "resumes", names=names, **options)

    def fabric(name: str, run: str = "fabric", **options: Any) -> dict[str, Any]:
        return {"run": run, "folder": f"{root}/fabric {name}", "bound": name == "1"} | options

    cycle = {"max_epochs": 2, "cycle": True}
    endless = {"max_steps": 14, "endless": True}
    limited, by_steps = {"max_epochs": 2, "limit_train_batches": 4}, {"max_steps": 14}
    others = {"run": "refused_and_predicted"}
    return (
        launch(
            1,
            {
                "1": train("1", **TRAINER),
                "1 to 1": resume("1", hook=True, **TRAINER),
                "bound 1": train("bound 1", **TRAINER),
                "bound 1 to 1": resume("bound 1", "*[015]", num_workers=1, **TRAINER),
                "limited": train("limited", **limited),
                "limited resumed": resume("limited", "[es]*[!48]", **limited),
                "steps": train("steps", **by_steps),
                "steps resumed": resume("steps", "[ev]*", may_warn=True, **by_steps),
                "cycle": train("cycle", **cycle),
                "cycle resumed": resume("cycle", "*=*", may_warn=True, **cycle),
                "bound cycle": train("bound cycle", **cycle),
                "bound cycle resumed": resume("bound cycle", "*=*", may_warn=True, **cycle),
                "bound cycle loaded": {
                    "run": "loaded_without_a_loader",
                    "folder": f"{root}/bound cycle",
                },
                "endless": train("endless", **endless),
                "endless resumed": resume("endless", "step*", **endless),
                "fabric 1": fabric("1"),
                "fabric 1 to 1": fabric("1", "fabric_resumes"),
                "others 1": others,
            },
        )
        | launch(
            2,
            {
                "2": train("2", **TRAINER),
                "1 to 2": resume("1", "*[15]", **TRAINER),
                "bound 1 to 2": resume("bound 1", "*=[02]", **TRAINER),
                "2 to 2": resume("2", "*[17]", **TRAINER),
                "fabric 2": fabric("2"),
                "fabric 1 to 2": fabric("1", "fabric_resumes", names="*[38]"),
                "others 2": others,
            },
        )
        | launch(
            1,
            {
                "2 to 1": resume("2", **TRAINER),
                "fabric 2 to 1": fabric("2", "fabric_resumes"),
            },
        )
    )


@pytest.fixture(scope="module")
def plain() -> list[list[list[int]]]:
    """Three epochs of one loader in one process."""
    samples = [{"id": i} for i in range(23)]
    loader = DataLoader(samples, global_batch_size=4, shuffle=True, seed=5)
    return [batches(loader) for _ in range(3)]


def joined(epochs: list[list[list[int]]]) -> list[list[int]]:
    return [batch for epoch in epochs for batch in epoch]


@pytest.mark.parametrize("run", ["1", "bound 1", "2"])
def test_the_trainer_trains_on_the_plan(
    run: str, results: dict[str, Result], plain: list[list[list[int]]]
) -> None:
    found = results[run]
    assert found["kept"], "Lightning has put another loader in the place of ours"
    assert found["trained"] == joined(plain)
    assert sorted(flat(found["trained"])) == sorted([*range(23)] * 3)
    assert found["steps"] == 3 * STEPS // 2, "two batches for each step of the optimizer"


@pytest.mark.parametrize("run", ["1", "2"])
def test_a_validation_has_each_sample_once_and_moves_nothing(
    run: str, results: dict[str, Result]
) -> None:
    """The one before the first batch, and one in the middle of each epoch."""
    places = [0, *(STEPS * epoch + 4 for epoch in range(3))]
    assert results[run]["validations"] == [[place, [*range(100, 107)]] for place in places]


def check_resumed(found: dict[str, Result], whole: list[list[int]], num_checkpoints: int) -> None:
    assert len(found) == num_checkpoints
    for name, run in found.items():
        assert run["trained"] == whole[run["after"] :], name


@pytest.mark.parametrize(
    ("run", "num_checkpoints"),
    [
        ("1 to 1", 15),
        ("1 to 2", 4),
        ("2 to 2", 3),
        ("2 to 1", 15),
        ("bound 1 to 1", 5),
        ("bound 1 to 2", 3),
    ],
)
def test_the_trainer_goes_on_at_the_very_next_sample(
    run: str, num_checkpoints: int, results: dict[str, Result], plain: list[list[list[int]]]
) -> None:
    """From after a step, a validation or an epoch; "bound": where the model carries it as well."""
    check_resumed(results[run], joined(plain), num_checkpoints)
    assert {found["steps"] for found in results[run].values()} == {3 * STEPS // 2}


def test_a_limited_epoch_is_the_beginning_of_the_plans(
    results: dict[str, Result], plain: list[list[list[int]]]
) -> None:
    whole = plain[0][:4] + plain[1][:4]
    assert results["limited"]["trained"] == whole
    check_resumed(results["limited resumed"], whole, 8)


def test_a_run_of_so_many_steps_goes_on_from_the_end_of_an_epoch(
    results: dict[str, Result], plain: list[list[list[int]]]
) -> None:
    """There Lightning's own count of epochs is one ahead."""
    whole = joined(plain)[:14]
    assert results["steps"]["trained"] == whole
    check_resumed(results["steps resumed"], whole, 5)


@pytest.mark.parametrize("run", ["cycle", "bound cycle"])
def test_a_schedule_that_asks_for_the_number_of_steps_changes_nothing(
    run: str, results: dict[str, Result], plain: list[list[list[int]]]
) -> None:
    """It makes the Trainer build its loop before it reads the loader's state.

    Public report: Lightning-AI/pytorch-lightning#20550.
    """
    whole = joined(plain[:2])
    assert results[run]["trained"] == whole
    check_resumed(results[f"{run} resumed"], whole, 14)


def test_a_bound_modules_checkpoint_is_loaded_for_inference(results: dict[str, Result]) -> None:
    first, second = results["bound cycle loaded"]["loaded"]
    assert first == second


def test_a_plan_that_never_ends_goes_on_though_lightning_takes_one_batch_ahead(
    results: dict[str, Result],
) -> None:
    whole = results["endless"]["trained"]
    assert len(whole) == 14
    check_resumed(results["endless resumed"], whole, 14)


@pytest.mark.parametrize("world", ["1", "2"])
def test_fabric_trains_on_the_plan(
    world: str, results: dict[str, Result], plain: list[list[list[int]]]
) -> None:
    found = results[f"fabric {world}"]
    assert found["trained"] == joined(plain)
    assert not found["stale"], "its wrapper has a `valid` that does not follow the loader's"
    assert found["refused"] == [True, True], "neither wrapper can be bound"


@pytest.mark.parametrize(
    ("run", "num_checkpoints"), [("1 to 1", 18), ("1 to 2", 4), ("2 to 1", 18)]
)
def test_fabric_goes_on_at_the_very_next_sample(
    run: str, num_checkpoints: int, results: dict[str, Result], plain: list[list[list[int]]]
) -> None:
    """Its wrapper counts epochs from 0 in every process."""
    check_resumed(results[f"fabric {run}"], joined(plain), num_checkpoints)


@pytest.mark.parametrize("world", ["1", "2"])
def test_what_needs_another_sampler_is_refused_and_predict_takes_an_iterator(
    world: str, results: dict[str, Result], plain: list[list[list[int]]]
) -> None:
    predicted, overfitted = results[f"others {world}"]["errors"]
    assert "a ChunkSplitter was to be put" in predicted and "iter(loader)" in predicted
    assert "a SequentialSampler was to be put" in overfitted
    assert results[f"others {world}"]["predicted"] == plain[0]


Start = Callable[[str, int], Launch]


@pytest.fixture
def start(tmp_path: Path, forks: Forks) -> Iterator[Start]:
    """Starts an example as its users do: Lightning starts the processes of other devices."""
    with ExitStack() as stack:

        def start(name: str, devices: int) -> Launch:
            script = ROOT / "examples" / f"lightning_{name}.py"
            options = (f"--devices={devices}", f"--folder={tmp_path}")
            output = tmp_path / f"output-{devices}"
            launch = Launch(script, *options, world=0, output=output, starter=forks)
            return stack.enter_context(launch)

        yield start


def kill_at(launch: Launch, line: str) -> None:
    """Kills it as soon as it has printed a line."""
    deadline = time.monotonic() + 200
    while f"\n{line}" not in launch.printed:
        assert launch.is_running and time.monotonic() < deadline, launch.printed
        time.sleep(0.002)
    launch.kill()


def printed_digest(launch: Launch) -> str:
    launch.wait()
    digests = re.findall(r"^digest: ([0-9a-f]{64})$", launch.printed, re.MULTILINE)
    assert len(digests) == 1, launch.printed
    return str(digests[0])


def digest_of_the_plan(name: str) -> str:
    """What an example prints at its end, from its loader alone."""
    loader = runpy.run_path(str(ROOT / "examples" / f"lightning_{name}.py"))["make_loader"]()
    digest = ""
    while loader.epoch < 2:
        for batch in loader:
            digest = hashlib.sha256(f"{digest}{batch['id'].tolist()}".encode()).hexdigest()
    return digest


@pytest.mark.parametrize(("name", "line"), [("trainer", "epoch 1 step"), ("fabric", "step 98 ")])
def test_an_example_that_is_killed_goes_on_as_if_it_was_not(
    name: str, line: str, start: Start, tmp_path: Path
) -> None:
    """Killed in its second epoch on two devices, resumed on one."""
    kill_at(start(name, 2), line)
    assert list(tmp_path.glob("*.ckpt"))
    assert printed_digest(start(name, 1)) == digest_of_the_plan(name)
