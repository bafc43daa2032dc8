"""Copies, forks and interrupts of a loader in mid-epoch: nothing that moves is shared or lost."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from processes import exit_code, forked

from zephon_torch import DataLoader
from zephon_torch.io import Dataset
from zephon_torch.loader.iteration import Iteration

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

    def goes_on() -> None:
        assert [batch["id"][0].item() for batch in iterator] == list(range(4, 40, 4))

    with forked(goes_on) as child:
        assert exit_code(child) == 0
    assert [batch["id"][0].item() for batch in iterator] == list(range(4, 40, 4))
    loader.close()


class Preempted(Exception):
    """What a handler of a signal raises, wherever Python happens to be."""


class Gated:
    """Numbers; number 8 comes only after a file is there."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> int:
        while i == 8 and not self.gate.exists():
            time.sleep(0.01)
        return i


def is_inside(frame: FrameType | None, function: Any) -> bool:
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame is not None


@pytest.mark.parametrize(
    ("engine", "kind"),
    [
        ({"num_threads": 0}, KeyboardInterrupt),  # an Exception would be the sample's own
        ({"num_threads": 1}, Preempted),
        ({"num_threads": 3}, Preempted),
        ({"num_threads": 3}, KeyboardInterrupt),
        ({"num_workers": 2}, Preempted),
        ({"num_workers": 2}, KeyboardInterrupt),
        ({"num_workers": 2, "persistent_workers": True}, Preempted),
    ],
)
def test_a_signal_while_next_waits_costs_no_batch(
    tmp_path: Path, engine: dict[str, Any], kind: type[BaseException]
) -> None:
    """The batch it waits for cannot come before the signal has."""
    fired = []

    def preempt(_: int, frame: FrameType | None) -> None:
        if not fired and is_inside(frame, Iteration.__next__):
            fired.append(loader.delivered)
            (tmp_path / "gate").touch()
            raise kind

    before = signal.signal(signal.SIGALRM, preempt)
    try:
        with DataLoader(Gated(tmp_path / "gate"), 4, **engine) as loader:
            iterator, seen = iter(loader), []
            for number in range(8):
                signal.setitimer(signal.ITIMER_REAL, *((0.02, 0.02) if number == 2 else (0, 0)))
                if number == 2:
                    with pytest.raises(kind):
                        next(iterator)
                seen.append(next(iterator).tolist())
                assert loader.pointers is not None
                assert loader.pointers.sample.tolist() == seen[-1]
            assert next(iterator, None) is None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert fired == [8]
    assert seen == [list(range(i, i + 4)) for i in range(0, 32, 4)]


class InterruptsWhoReceivesIt:
    """A batch that is interrupted once while the training process takes it out of the queue."""

    def __init__(self, ids: list[int], done: Path) -> None:
        self.ids, self.done = ids, done

    def __reduce__(self) -> Any:
        return received, (self.ids, self.done, os.getpid())


def received(ids: list[int], done: Path, sender: int) -> InterruptsWhoReceivesIt:
    if 8 in ids and os.getpid() != sender and not done.exists():
        done.touch()
        raise KeyboardInterrupt
    return InterruptsWhoReceivesIt(ids, done)


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("again", ["same iterator", "new iterator"])
def test_a_batch_that_an_interrupt_tears_out_of_the_queue_is_made_again(
    tmp_path: Path, persistent_workers: bool, again: str
) -> None:
    """torch's own loader waits for it for ever."""

    def collate(samples: list[int]) -> InterruptsWhoReceivesIt:
        return InterruptsWhoReceivesIt(samples, tmp_path / "done")

    with DataLoader(
        range(32), 4, num_workers=1, collate_fn=collate, persistent_workers=persistent_workers
    ) as loader:
        iterator = iter(loader)
        assert [next(iterator).ids for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        assert loader.delivered == 8
        if again == "new iterator":
            loader.load_state_dict(loader.state_dict())
            iterator = iter(loader)
        rest = [batch.ids for batch in iterator]
        assert rest == [list(range(i, i + 4)) for i in range(8, 32, 4)]
        assert [batch.ids[0] for batch in loader] == list(range(0, 32, 4))
