"""A run that is killed again and again, at random moments, trains on what a steady one does.

Each round goes on from the checkpoint of the round before, in another world and with another
engine, until its trainer, or one of its ranks, gets a SIGKILL. What was trained on, without the
steps that a later round did again, is the stream of one process that was never stopped.
"""

from __future__ import annotations

import random
import time
from itertools import islice
from pathlib import Path

import pytest
from train_run import Line, Place, Run, first_index, global_steps, reference, saved_place

SIZE = 12  # divides by all worlds
ENGINES: list[dict[str, int]] = [
    {},
    {"num_threads": 1},
    {"num_threads": 2},
    {"num_workers": 1},
    {"num_workers": 2},
    {"num_workers": 3},
]


def place_of(folder: Path) -> Place:
    return saved_place(folder) if (folder / "model.pt").exists() else (0, 0)


def killed(folder: Path, rng: random.Random, *, one_rank: bool) -> list[Line]:
    """One round: what all its ranks have noted until it was killed."""
    run = Run(folder, rng.choice([1, 2, 3, 4]), SIZE, 1000, rng.choice(ENGINES))
    try:
        if rng.random() < 0.1:  # while it starts, most likely
            time.sleep(rng.uniform(0, 8))
        else:
            num_steps = rng.randrange(1, 20)
            run.wait_until(lambda steps: len(steps) >= num_steps)
            time.sleep(rng.uniform(0, 0.01))
        if one_rank:
            run.kill_rank(rng.randrange(run.world))
    finally:
        run.kill()
    return global_steps(run)


def check_rounds(folder: Path, seed: int, num_rounds: int) -> int:
    """The number of steps that count: those that no later round does again."""
    rng = random.Random(seed)
    steady, kept = reference(SIZE, epochs=1000), 0
    stream: list[Line] = []  # of the steady run, as far as it was looked at
    for number in range(num_rounds):
        steps = killed(folder, rng, one_rank=number % 2 == 0)
        stream += islice(steady, max(0, kept + len(steps) - len(stream)))
        assert steps == stream[kept : kept + len(steps)], f"round {number}, seed {seed}"
        place = place_of(folder)
        saved = sum(first_index(line) < place for line in steps)
        assert saved == 0 or after(steps[saved - 1]) == place, f"round {number}, seed {seed}"
        kept += saved
        print(f"seed {seed}, round {number}: {len(steps)} steps, {saved} saved, {place}")
    return kept


def after(line: Line) -> Place:
    return line["epoch"], line["stop"]


def test_one_rank_killed_then_all(tmp_path: Path) -> None:
    assert check_rounds(tmp_path, seed=1, num_rounds=2) >= 2


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_killed_a_hundred_times(tmp_path: Path) -> None:
    assert check_rounds(tmp_path, seed=2, num_rounds=100) > 500
