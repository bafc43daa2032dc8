"""Copies, forks and interrupts of a loader in mid-epoch: nothing that moves is shared or lost."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zephon_torch import DataLoader
from zephon_torch.io import Dataset

ENGINES: list[dict[str, Any]] = [
    {},
    {"num_threads": 0},
    {"num_threads": 3},
    {"num_workers": 1},
    {"num_workers": 1, "persistent_workers": True},
]


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"id": {i}}}\n' for i in range(40)))
    return Dataset.from_path("a", tmp_path)


def pickled(loader: DataLoader) -> DataLoader:
    return pickle.loads(pickle.dumps(loader))  # type: ignore[no-any-return]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_in_mid_epoch_moves_nothing_of_the_original(
    dataset: Dataset, engine: dict[str, Any], copied: Callable[[DataLoader], DataLoader]
) -> None:
    with DataLoader(dataset, 4, **engine) as loader:
        iterator = iter(loader)
        next(iterator)
        twin = copied(loader)
        assert twin.state_dict() == loader.state_dict()
        with twin:
            assert next(iter(twin))["id"].tolist() == [0, 1, 2, 3]
            assert next(iterator)["id"].tolist() == [4, 5, 6, 7]
        assert [batch["id"][0].item() for batch in iterator] == list(range(8, 40, 4))
        assert (loader.epoch, loader.delivered) == (1, 0)


@pytest.mark.parametrize("engine", [{}, {"num_threads": 0}, {"num_threads": 3}])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_goes_on_with_the_same_iterator(
    dataset: Dataset, engine: dict[str, Any]
) -> None:
    loader = DataLoader(dataset, 4, **engine)
    iterator = iter(loader)
    next(iterator)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        rest = [batch["id"][0].item() for batch in iterator]
        os.write(write, json.dumps(rest).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert json.loads(pipe.read()) == list(range(4, 40, 4))
    os.waitpid(child, 0)
    assert [batch["id"][0].item() for batch in iterator] == list(range(4, 40, 4))
    loader.close()


class Preempted(Exception):
    """What a handler of a signal raises, wherever Python happens to be."""


class Slow:
    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> int:
        time.sleep(0.05)
        return i


@pytest.mark.parametrize("engine", [{"num_threads": 2}, {"num_workers": 2}])
def test_a_signal_while_next_waits_costs_no_batch(engine: dict[str, Any]) -> None:
    def preempt(*_: object) -> None:
        raise Preempted

    before = signal.signal(signal.SIGALRM, preempt)
    try:
        with DataLoader(Slow(), 4, **engine) as loader:
            iterator, seen = iter(loader), []
            while True:
                signal.setitimer(signal.ITIMER_REAL, 0.02 if len(seen) == 2 else 0)
                try:
                    seen.append(next(iterator).tolist())
                    assert loader.pointers is not None
                    assert loader.pointers.sample.tolist() == seen[-1]
                except Preempted:
                    signal.setitimer(signal.ITIMER_REAL, 0)
                    seen.append(next(iterator).tolist())
                except StopIteration:
                    break
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen == [list(range(i, i + 4)) for i in range(0, 32, 4)]
