"""An epoch that one rank goes through and other ranks never begin; none that they begin later."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from launch import Launch

from zephon_torch.loader.watch import attendance
from zephon_torch.work.sharing import world
from zephon_torch.work.sharing.world import Roll, World

pytestmark = pytest.mark.timeout(120)


def told(folder: Path, case: str) -> list[tuple[list[str], list[str]]]:
    """For each of two ranks its warnings, and those at its exit."""
    launch = Launch("attend.py", folder, case, world=2, output=folder / "output")
    try:
        launch.wait()
    finally:
        launch.kill()
    texts = [(folder / f"{rank}.txt").read_text().splitlines() for rank in range(2)]
    return [(lines[: lines.index("exit")], lines[lines.index("exit") + 1 :]) for lines in texts]


def test_a_rank_that_evaluates_alone_is_told_at_its_exit(tmp_path: Path) -> None:
    """Public report: pytorch/examples#461."""
    first, second = told(tmp_path, "alone")
    assert (first[0], second) == ([], ([], []))
    assert len(first[1]) == 1
    assert "rank 0 of 2 has gone through epoch 0 of DataLoader(" in first[1][0]
    assert "which no other rank had begun when this process ended" in first[1][0]
    assert "DataLoader(..., rank=0, num_replicas=1)" in first[1][0]


def test_it_is_told_as_soon_as_the_others_have_begun_something_later(tmp_path: Path) -> None:
    first, second = told(tmp_path, "alone_and_training_goes_on")
    assert (first[1], second) == ([], ([], []))
    assert len(first[0]) == 1
    assert "which no other rank had begun though all ranks have begun another one" in first[0][0]


@pytest.mark.parametrize("case", ["alone_by_arguments", "one_is_slow", "one_looks", "all_at_once"])
def test_no_false_alarm(tmp_path: Path, case: str) -> None:
    assert told(tmp_path, case) == [([], []), ([], [])]


# --- in one process, over a store of its own -----------------------------------------------------


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Begin an epoch as one of three ranks that share a store."""
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(attendance, "_missed", None)
    monkeypatch.setattr(attendance, "_has_warned", False)

    def begin(rank: int, plan: str, epoch: int = 0) -> Roll:
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        for counter in ("_num_begun", "_num_ended"):  # each rank's own
            held = counts.setdefault((rank, counter), getattr(world, counter).__class__())
            monkeypatch.setattr(world, counter, held)
        roll = World().begin(plan, epoch)
        assert roll is not None
        return roll

    counts: dict[tuple[int, str], Any] = {}
    return begin


def test_a_rank_that_comes_later_clears_it_up(begin: Any) -> None:
    first = begin(0, "plan")
    attendance.note_end(first, "a loader")
    assert attendance._missed is not None
    begin(1, "plan")
    later = begin(0, "plan", 1)
    attendance.look_again(later)
    assert attendance._missed is not None, "rank 2 has not begun"
    begin(2, "plan")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attendance.look_again(later)
    assert attendance._missed is None


def test_after_much_time_a_rank_that_is_missing_is_told_with_the_time(
    begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attendance.note_end(begin(0, "plan"), "a loader")
    begin(1, "plan")
    later = begin(0, "plan", 1)
    attendance.look_again(later)
    monkeypatch.setattr(attendance, "_LATE_SECONDS", -1.0)
    with pytest.warns(UserWarning, match=r"which only 2 of 3 ranks had begun 0 seconds later"):
        attendance.look_again(later)
    attendance.note_end(begin(0, "other"), "another")
    assert attendance._missed is None, "once in a process"


def test_a_store_that_is_gone_is_no_reason_to_stop(
    begin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> Any:
        raise ValueError("Default process group has not been initialized")

    roll = begin(0, "plan")
    attendance.note_end(roll, "a loader")
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", gone)
    attendance.look_again(roll)
    attendance._at_exit()
    assert World().begin("plan", 1) is None


def test_ranks_that_are_given_are_not_counted(begin: Any) -> None:
    begin(0, "plan")
    assert World(0, 3).begin("plan", 0) is None
