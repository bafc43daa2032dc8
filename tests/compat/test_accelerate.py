"""Under Accelerate: as many optimizer steps as with torch's loader, exact metrics, exact resume."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from launch import Forks
from launching import installed, launch, results
from processes import ROOT, started

pytestmark = [
    pytest.mark.skipif(not installed("accelerate"), reason="accelerate is not installed"),
]

EPOCH = list(range(23))
# batches of 4, two of them before the save: in the middle of an accumulation of 3
STOP = 8
WORLDS = [(1, 1), (2, 2), (2, 1), (1, 2)]
SETTINGS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "a loader made before the Accelerator": {"is_loader_first": True},
    "dispatch_batches": {"settings": {"dispatch_batches": True}},
    "split_batches": {"settings": {"split_batches": True}},
    "even_batches=False": {"settings": {"even_batches": False}},
    "seedable": {"settings": {"use_seedable_sampler": True, "use_stateful_dataloader": True}},
}
SKIPS: dict[str, dict[str, Any]] = {
    "skipping without Skippable": {"skip": 2},
    "skipping": {"kind": "skippable", "skip": 2},
    "skipping then saving": {"kind": "skippable", "skip": 2, "stop": STOP},
}
RESUMED_SKIPS: dict[str, dict[str, Any]] = {
    "resumed and skipping": {"kind": "skippable", "skip": 2, "num_workers": 1},
    "resumed and skipping too much": {"kind": "skippable", "skip": 3},
    "resumed and skipping without Skippable": {"skip": 2},
}
Result = dict[str, Any]


class Runs:
    """All runs, in two launches on each world: one saves, the next resumes."""

    def __init__(self, root: Path, forks: Forks) -> None:
        self.root, self.forks = root, forks
        self.trained: dict[tuple[int, str], Result] = {}
        self.resumed: dict[tuple[int, int], Result] = {}
        self.others: dict[tuple[int, str], Result] = {}
        skips = {name: request | self._folder("skip2") for name, request in SKIPS.items()}
        for name in ("skipping without Skippable", "skipping"):
            skips[name].pop("folder")
        self._run(2, skips, saves=True)
        self._run(1, {n: r | self._folder("2") for n, r in RESUMED_SKIPS.items()}, [2], saves=True)
        self._run(2, {"resumed after skipping": self._folder("skip2")}, [2, 1])
        self._run(1, {}, [1])

    def _folder(self, name: str) -> dict[str, Any]:
        return {"folder": str(self.root / name)}

    def _run(
        self, world: int, others: dict[str, Any], resumed: Sequence[int] = (), saves: bool = False
    ) -> None:  # fmt: skip
        requests = []
        if saves:
            requests += [{"kind": "torch"}, *SETTINGS.values()]
            requests += [{"stop": STOP} | self._folder(str(world))]
        requests += [self._folder(str(saved)) | {"num_workers": 1} for saved in resumed]
        found = iter(results(self.forks, world, "accelerate_run.py", *requests, *others.values()))
        if saves:
            self.trained |= {(world, name): next(found) for name in ("torch", *SETTINGS)}
            self.others[world, "saved"] = next(found)
        self.resumed |= {(saved, world): next(found) for saved in resumed}
        self.others |= {(world, name): next(found) for name in others}


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks("accelerate", "torch._dynamo") as forks:
        yield forks


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Runs:
    return Runs(tmp_path_factory.mktemp("accelerate"), forks)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("world", [1, 2])
def test_it_trains_as_with_torchs_loader_whatever_the_settings(
    world: int, name: str, runs: Runs
) -> None:
    theirs, ours = runs.trained[world, "torch"], runs.trained[world, name]
    assert ours["type"] == "zephon_torch"
    for what in ("steps", "seen", "devices", "left"):
        assert ours[what] == theirs[what], what
    assert ours["seen"] == EPOCH + EPOCH


@pytest.mark.parametrize(("saved", "world"), WORLDS)
def test_a_saved_state_goes_on_at_the_very_next_sample_and_step(
    saved: int, world: int, runs: Runs
) -> None:
    first, rest = runs.others[saved, "saved"], runs.resumed[saved, world]
    assert first["seen"] == EPOCH[:STOP]
    assert first["seen"] + rest["seen"] == EPOCH + EPOCH
    assert first["steps"] + rest["steps"] == runs.trained[world, "torch"]["steps"]


def test_skipped_batches_are_counted_as_delivered(runs: Runs) -> None:
    assert runs.others[2, "skipping"]["seen"] == EPOCH[8:] + EPOCH
    assert runs.others[2, "skipping"]["left"] == runs.trained[2, "torch"]["left"]
    assert runs.others[2, "skipping then saving"]["seen"] == EPOCH[8:16]
    assert runs.others[2, "resumed after skipping"]["seen"] == EPOCH[16:] + EPOCH


def test_skipping_what_a_restored_state_has_left_behind_skips_it_once(runs: Runs) -> None:
    assert runs.others[1, "resumed and skipping"]["seen"] == EPOCH[8:] + EPOCH


@pytest.mark.parametrize(
    ("world", "case", "words"),
    [
        (1, "resumed and skipping too much", "8 samples of epoch 0, the trainer skips 3 batches"),
        (1, "resumed and skipping without Skippable", "iterate the loader itself"),
        (2, "skipping without Skippable", "use zephon_torch.Skippable(loader)"),
    ],
)
def test_skipping_that_the_progress_would_not_see_raises(
    world: int, case: str, words: str, runs: Runs
) -> None:
    assert words in runs.others[world, case]["error"]


def test_the_example_goes_on_with_two_processes_as_if_it_had_had_one(
    tmp_path: Path, forks: Forks
) -> None:
    script = ROOT / "examples" / "accelerate_train.py"
    options = ("--steps=20", "--output-dir", str(tmp_path))
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes=2"]
    whole = launch(forks, 1, script, *options)
    (tmp_path / "step-000020").rename(tmp_path / "unused")
    command = [*launcher, str(script), *options]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        rest, errors = run.communicate(timeout=200)
    assert run.returncode == 0, errors

    def numbers(output: str, pattern: str) -> list[list[float]]:
        return [[float(part) for part in found] for found in re.findall(pattern, output)]

    steps = r"step (\d+) \| loss (\S+)"
    assert [step for step, _ in numbers(rest, steps)] == list(range(11, 21))
    for found, expected in zip(numbers(rest, steps), numbers(whole, steps)[10:], strict=True):
        assert found == pytest.approx(expected, abs=2e-3)
    evaluation = r"(\d+) rows \| loss (\S+)"
    (found,), (expected,) = numbers(rest, evaluation), numbers(whole, evaluation)
    assert found == pytest.approx(expected, abs=2e-3)
    assert found[0] == 101
