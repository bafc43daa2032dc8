"""Real processes: any world, killed anywhere, goes on at the very next sample.

What every rank trained on is compared with one loader of one process that was never stopped.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from toys import flat
from train_run import Line, Place, Run, first_index, global_steps, reference, saved_place


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    with ExitStack() as stack:

        def start(world: int, global_batch_size: int, epochs: int, folder: Path = tmp_path) -> Run:
            return stack.enter_context(Run(folder, world, global_batch_size, epochs))

        yield start


def check(run: Run, start: Place, epochs: int = 3) -> list[Line]:
    """Everything that a launch trained on is what one process would have, from its start on."""
    steps = global_steps(run)
    expected = reference(run.size, start, epochs)
    assert steps == [next(expected) for _ in steps]
    return steps


def test_any_world_trains_on_the_same_global_batches(
    launch: Callable[..., Run], tmp_path: Path
) -> None:
    run = launch(4, 16, 2, tmp_path / "4")
    run.wait()
    assert check(run, (0, 0), 2) == list(reference(16, epochs=2))
    assert saved_place(tmp_path / "4") == (2, 0)


@pytest.mark.parametrize("seed", [3])
def test_killed_and_resumed_in_other_worlds(
    launch: Callable[..., Run], tmp_path: Path, seed: int
) -> None:
    """Two, four, one and two ranks; killed at random, at an epoch's edge, after another size."""
    rng = random.Random(seed)
    at_random = rng.randrange(3, 25)

    first = launch(2, 8, 3)
    first.kill_when(lambda steps: len(steps) >= at_random)
    check(first, (0, 0))
    place = saved_place(tmp_path)
    assert place >= (0, 8 * (at_random - 2))

    second = launch(4, 8, 3)
    second.kill_when(lambda steps: bool(steps) and saved_place(tmp_path)[0] == 1)
    assert check(second, place)
    place = saved_place(tmp_path)
    assert place[0] == 1, "right after the edge of the epoch"

    third = launch(1, 20, 3)  # another global batch size
    a_few = rng.randrange(1, 5)
    third.kill_when(lambda steps: len(steps) >= a_few)
    assert check(third, place)
    place = saved_place(tmp_path)

    last = launch(2, 20, 3)
    last.wait()
    assert check(last, place)[-1]["epoch"] == 3
    assert saved_place(tmp_path) == (3, 0)

    trained = kept([first, second, third, last])
    assert [sorted(epoch) for epoch in trained] == [everything(epoch) for epoch in range(3)]


def kept(runs: list[Run]) -> list[list[int]]:
    """Ids by epoch, of the steps that count: those that no later launch did again."""
    epochs: list[list[int]] = [[] for _ in range(3)]
    for number, run in enumerate(runs):
        following = [begin(other) for other in runs[number + 1 :]]
        for line in global_steps(run):
            if all(first_index(line) < place for place in following):
                epochs[first_index(line)[0]] += line["ids"]
    return epochs


def begin(run: Run) -> Place:
    return first_index(global_steps(run)[0])


def everything(epoch: int) -> list[int]:
    return sorted(flat(line["ids"] for line in reference(8, (epoch, 0), epoch + 1)))
