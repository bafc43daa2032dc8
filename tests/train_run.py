"""Launches of ``distributed/train.py``, and what one process would have trained on."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from launch import SCRIPTS, Launch
from toys import flat, ids

from zephon_torch import DataLoader
from zephon_torch.work import Progress

sys.path.insert(0, str(SCRIPTS))

from train import LANES, make_source

TOTAL = 250
Place = tuple[int, int]  # epoch and samples delivered
Line = dict[str, Any]


class Run(Launch):
    """One launch of the training run in a folder.

    Args:
        folder: holds the checkpoint, and notes of each launch.
        world: number of ranks.
        global_batch_size: samples of a step over all ranks.
        epochs: where it ends.
        engine: options of the loader.
    """

    def __init__(
        self,
        folder: Path,
        world: int,
        global_batch_size: int,
        epochs: int,
        engine: dict[str, int] | None = None,
    ) -> None:
        self.size = global_batch_size
        self._notes = folder / f"launch-{len(list(folder.glob('launch-*')))}"
        self._notes.mkdir(parents=True)
        arguments = (folder, self._notes, global_batch_size, epochs, json.dumps(engine or {}))
        super().__init__("train.py", *arguments, world=world, output=self._notes / "output")

    def lines(self, rank: int = 0) -> list[Line]:
        """What a rank has noted in this launch."""
        path = self._notes / f"log.{rank}"
        if not path.exists():
            return []
        whole = path.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines() if line]

    def steps(self, rank: int = 0) -> list[Line]:
        return [line for line in self.lines(rank) if "ids" in line]

    def wait(self, seconds: float = 200) -> None:
        super().wait(seconds)
        for rank in range(self.world):
            assert self.lines(rank)[-1] == {"done": True}

    def wait_until(self, reached: Callable[[list[Line]], bool]) -> None:
        """Until rank 0 has got there."""
        deadline = time.monotonic() + 200
        while not reached(self.steps()):
            assert self.is_running, self.printed
            assert time.monotonic() < deadline, f"never got there:\n{self.printed}"
            time.sleep(0.002)

    def kill_when(self, reached: Callable[[list[Line]], bool]) -> None:
        """SIGKILL all of it, launcher and ranks, as soon as rank 0 has got there."""
        self.wait_until(reached)
        self.kill()

    def kill_rank(self, rank: int) -> None:
        """SIGKILL one rank, once it has begun; the launcher then takes down the others."""
        deadline = time.monotonic() + 200
        while not self.lines(rank):
            assert self.is_running and time.monotonic() < deadline, self.printed
            time.sleep(0.002)
        os.kill(self.lines(rank)[0]["pid"], signal.SIGKILL)
        self.wait_for_failure()


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


def first_index(line: Line) -> Place:
    """Where the global batch of a line began."""
    if line["stop"] == 0:
        return line["epoch"] - 1, TOTAL - len(line["ids"])
    return line["epoch"], line["stop"] - len(line["ids"])
