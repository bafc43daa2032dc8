"""Real processes under torchrun: any world, killed anywhere, goes on at the very next sample.

What every rank trained on is compared with one loader of one process that was never stopped.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import flat, ids

from zephon_torch import DataLoader
from zephon_torch.work import Progress

SCRIPTS = Path(__file__).parent / "distributed"
sys.path.insert(0, str(SCRIPTS))

from train import LANES, make_source  # noqa: E402

pytestmark = pytest.mark.timeout(240)

TOTAL = 250
Place = tuple[int, int]  # epoch and samples delivered
Line = dict[str, Any]


class Run:
    """One launch of torchrun in a session of its own."""

    def __init__(self, folder: Path, world: int, global_batch_size: int, epochs: int) -> None:
        self.world, self.size = world, global_batch_size
        self._notes = folder / f"launch-{len(list(folder.glob('launch-*')))}"
        self._notes.mkdir(parents=True)
        output = (self._notes / "output").open("w")
        self._process = subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node", str(world), str(SCRIPTS / "train.py"),
                str(folder), str(self._notes), str(global_batch_size), str(epochs),
            ],
            env=os.environ | {
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        output.close()

    def lines(self, rank: int = 0) -> list[Line]:
        """What a rank has noted in this launch."""
        path = self._notes / f"log.{rank}"
        if not path.exists():
            return []
        whole = path.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines() if line]

    def steps(self, rank: int = 0) -> list[Line]:
        return [line for line in self.lines(rank) if "ids" in line]

    def wait(self) -> None:
        """Until it ends by itself."""
        code = self._process.wait(timeout=100)
        assert code == 0, (self._notes / "output").read_text()
        for rank in range(self.world):
            assert self.lines(rank)[-1] == {"done": True}

    def kill_when(self, reached: Callable[[list[Line]], bool]) -> None:
        """SIGKILL all of it, launcher and ranks, as soon as rank 0 has got there."""
        deadline = time.monotonic() + 100
        while not reached(self.steps()):
            assert self._process.poll() is None, (self._notes / "output").read_text()
            assert time.monotonic() < deadline, "never got there"
            time.sleep(0.0005)
        self.kill()

    def kill(self) -> None:
        # The ranks first and all at once; the launcher is stopped so that it cannot interfere,
        # then reaps them. They are in sessions of their own.
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGSTOP)
        for rank in range(self.world):
            for line in self.lines(rank)[:1]:
                try:
                    os.kill(line["pid"], signal.SIGKILL)
                except ProcessLookupError:
                    pass
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGCONT)
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait(timeout=20)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs = []

    def start(world: int, global_batch_size: int, epochs: int, folder: Path = tmp_path) -> Run:
        runs.append(Run(folder, world, global_batch_size, epochs))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()


def reference(global_batch_size: int, start: Place = (0, 0), epochs: int = 3) -> Iterator[Line]:
    """Batches of one process from a place on."""
    loader = DataLoader(make_source(), global_batch_size=global_batch_size, lanes=LANES)
    loader.load_state_dict(loader.state_dict() | {"epoch": start[0], "delivered": start[1]})
    while loader.epoch < epochs:
        for batch in loader:
            yield {"epoch": loader.epoch, "stop": loader.delivered, "ids": ids(batch)}


def saved_place(folder: Path) -> Place:
    state = torch.load(folder / "model.pt", weights_only=True)
    progress = Progress.from_words(state["data_progress._extra_state"].tolist())
    return progress.epoch, progress.delivered


def global_steps(run: Run) -> list[Line]:
    """Steps that all ranks have noted, ranks one after the other."""
    steps = zip(*(run.steps(rank) for rank in range(run.world)), strict=False)
    joined = []
    for step in steps:
        assert len({(line["epoch"], line["stop"]) for line in step}) == 1, "ranks disagree"
        joined.append(step[0] | {"ids": flat(line["ids"] for line in step)})
    return joined


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
    second.kill_when(lambda steps: saved_place(tmp_path)[0] == 1)
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


def first_index(line: Line) -> Place:
    """Where the global batch of a line began."""
    if line["stop"] == 0:
        return line["epoch"] - 1, TOTAL - len(line["ids"])
    return line["epoch"], line["stop"] - len(line["ids"])


def begin(run: Run) -> Place:
    return first_index(global_steps(run)[0])


def everything(epoch: int) -> list[int]:
    return sorted(flat(line["ids"] for line in reference(8, (epoch, 0), epoch + 1)))
