"""Under transformers' Trainer: resumed within an epoch, a run is the one that was never stopped."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launch import Forks
from launching import installed, launch, results
from processes import ROOT

from zephon_torch import DataLoader

pytestmark = [
    pytest.mark.skipif(
        not installed("transformers", "accelerate"),
        reason="transformers or accelerate is not installed",
    ),
]

# Eleven global batches of 4 samples an epoch, the last of 2; three to an optimizer step, two to the
# last one of the epoch. The runs crash after they have saved: within the first epoch, at its end,
# and within the second.
CRASHES = {
    "early": {"save_steps": 2, "crash": 3},
    "edge": {"save_steps": 4, "crash": 5},
    "late": {"save_steps": 6, "crash": 7},
}
WORLDS = [(1, 1), (2, 2), (2, 1), (1, 2)]
Result = dict[str, Any]


class Runs:
    """All runs, in two launches on each world: one saves, the next resumes."""

    def __init__(self, root: Path, forks: Forks) -> None:
        self.root, self.forks = root, forks
        self.full: dict[int, Result] = {}
        self.crashed: dict[tuple[int, str], Result] = {}
        self.resumed: dict[tuple[int, int, str], Result] = {}
        self.others: dict[str, Result] = {}
        self._save(2)
        others = {
            "same samples in twice as many steps": self._resume_of(2, batch_size=2, accumulate=6),
            "without skipping": self._resume_of(2, ignore_data_skip=True),
            "without bind": self._resume_of(2, is_bound=False, num_workers=1),
            "without Skippable": self._resume_of(2, is_skippable=False),
            "with other batches": self._resume_of(2, batch_size=2),
        }
        self._save(1, resumes=2, others=others)
        evaluations = {
            "evaluation": {"do": "evaluate", "folder": str(root / "e")},
            "unprepared": {"do": "evaluate", "folder": str(root / "e"), "is_prepared": False},
        }
        self._run(2, [(2, name) for name in CRASHES] + [(1, name) for name in CRASHES], evaluations)
        self._run(1, [(1, name) for name in CRASHES], {})

    def _save(self, world: int, resumes: int = 0, others: dict[str, Any] | None = None) -> None:
        resumed = [(resumes, name) for name in CRASHES] if resumes else []
        saving = [
            {"folder": str(self.root / f"{name}{world}")} | crash for name, crash in CRASHES.items()
        ]
        full = {"folder": str(self.root / f"full{world}")}
        self._run(world, resumed, others or {}, [full, *saving])

    def _run(
        self,
        world: int,
        resumed: list[tuple[int, str]],
        others: dict[str, Any],
        saving: list[dict[str, Any]] | None = None,
    ) -> None:
        resuming = [self._resume_of(saved, name) for saved, name in resumed]
        saving = saving or []
        found = iter(results(self.forks, world, "hf_run.py", *saving, *resuming, *others.values()))
        if saving:
            self.full[world] = next(found)
            self.crashed |= {(world, name): next(found) for name in CRASHES}
        self.resumed |= {(saved, world, name): next(found) for saved, name in resumed}
        self.others |= {name: next(found) for name in others}

    def _resume_of(self, saved: int, name: str = "early", **options: Any) -> dict[str, Any]:
        copy = self.root / f"copy{len(list(self.root.glob('copy*')))}"
        shutil.copytree(self.root / f"{name}{saved}", copy)
        return {"folder": str(copy), "resume": True} | options


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    llama = "transformers.models.llama.modeling_llama"
    with Forks("accelerate", "transformers.trainer", llama, "torch._dynamo") as forks:
        yield forks


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Runs:
    return Runs(tmp_path_factory.mktemp("trainer"), forks)


def expected(world: int, batch_size: int, accumulate: int = 3) -> list[list[Any]]:
    """[optimizer step, samples of the global batch] of two epochs, from loaders alone."""
    ranks = [
        DataLoader(range(42), batch_size, shuffle=True, rank=rank, num_replicas=world)
        for rank in range(world)
    ]
    return [
        [epoch * 4 + number // accumulate, [i for part in parts for i in part.tolist()]]
        for epoch in range(2)
        for number, parts in enumerate(zip(*ranks, strict=True))
    ]


def from_step(step: int, seen: list[list[Any]]) -> list[list[Any]]:
    return [[number, ids] for number, ids in seen if number >= step]


@pytest.mark.parametrize("world", [1, 2])
def test_it_trains_on_the_batches_of_the_loader_with_the_steps_that_they_make(
    world: int, runs: Runs
) -> None:
    full = runs.full[world]
    assert full["seen"] == expected(world, 4 // world)
    assert (full["steps"], full["epochs"], full["place"]) == (8, 2, [2, 0])
    assert not full["error"]


@pytest.mark.parametrize("name", CRASHES)
@pytest.mark.parametrize(("saved", "world"), WORLDS)
def test_resumed_it_ends_as_if_it_had_never_crashed(
    saved: int, world: int, name: str, runs: Runs
) -> None:
    crashed, resumed, full = (
        runs.crashed[saved, name], runs.resumed[saved, world, name], runs.full[world],
    )  # fmt: skip
    assert crashed["error"].startswith("Crash")
    assert len(crashed["seen"]) < len(full["seen"])
    assert resumed["seen"] == from_step(CRASHES[name]["save_steps"], full["seen"])
    assert [resumed[what] for what in ("steps", "epochs", "place", "error")] == [
        full[what] for what in ("steps", "epochs", "place", "error")
    ]
    if saved == world:
        assert resumed["weights"] == full["weights"]  # no gradient was lost or added
    assert not [warning for warning in resumed["warnings"] if "restored" in warning]


def test_half_the_processes_with_twice_the_accumulation_go_on_with_the_same_steps(
    runs: Runs,
) -> None:
    resumed = runs.others["same samples in twice as many steps"]
    assert resumed["seen"] == from_step(2, expected(1, 2, accumulate=6))
    assert (resumed["steps"], resumed["epochs"], resumed["place"]) == (8, 2, [2, 0])


def test_without_bind_it_goes_on_where_the_trainer_counts(runs: Runs) -> None:
    resumed = runs.others["without bind"]
    assert resumed["seen"] == from_step(2, expected(1, 4))
    assert resumed["place"] == [2, 0]


def test_ignore_data_skip_reads_the_same_samples_but_warns_of_the_steps(runs: Runs) -> None:
    resumed = runs.others["without skipping"]
    assert [ids for _, ids in resumed["seen"]] == [ids for _, ids in expected(1, 4)[6:]]
    assert resumed["steps"] == 7  # this is what the warning is about
    assert any("leave ignore_data_skip=False" in warning for warning in resumed["warnings"])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("without Skippable", ["ConfigurationError", "use zephon_torch.Skippable(loader)"]),
        ("with other batches", ["StateError", "24 samples of epoch 0", "skips 6 batches of 2"]),
    ],
)
def test_what_would_go_wrong_raises_before_the_first_batch(
    case: str, words: list[str], runs: Runs
) -> None:
    resumed = runs.others[case]
    assert not resumed["seen"]
    for word in words:
        assert word in resumed["error"]


def test_metrics_count_each_sample_once_on_two_processes(runs: Runs) -> None:
    assert runs.others["evaluation"]["seen"] == list(range(21))
    assert not [w for w in runs.others["evaluation"]["warnings"] if "prepare" in w]


def test_an_evaluation_that_was_not_prepared_is_told_of_its_padding(runs: Runs) -> None:
    unprepared = runs.others["unprepared"]
    assert unprepared["seen"] == [*range(21), 20]
    assert any("accelerator.prepare" in warning for warning in unprepared["warnings"])


def test_the_example_goes_on_with_one_process_as_if_it_had_had_two(
    tmp_path: Path, forks: Forks
) -> None:
    script, options = ROOT / "examples" / "hf_trainer.py", ("--steps=20", "--output-dir")
    whole = launch(forks, 2, script, *options, str(tmp_path))
    shutil.rmtree(tmp_path / "checkpoint-20")
    rest = launch(forks, 1, script, *options, str(tmp_path))

    def losses(output: str) -> list[float]:
        return [float(loss) for loss in re.findall(r"'loss': '(\S+)'", output)]

    assert len(losses(whole)) == 20
    assert losses(rest) == pytest.approx(losses(whole)[10:], abs=2e-3)
