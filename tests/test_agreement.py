"""Ranks that do not begin at the same place are told, and those that do are not disturbed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from launch import Launch
from toys import flat, ids, memory, one

from zephon_torch import DataLoader


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """For each rank and case, what it got."""
    folder = tmp_path_factory.mktemp("agree")
    launch = Launch("agree.py", folder, world=2, output=folder / "output")
    try:
        launch.wait()
    finally:
        launch.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    "case", ["0 all_alike", "3 looked_at_on_one", "4 evaluated_on_one", "6 all_alike"]
)
def test_ranks_that_begin_alike_go_on(told: list[dict[str, Any]], case: str) -> None:
    whole = DataLoader(range(64), 8, shuffle=True, seed=3)
    assert [rank[case]["error"] for rank in told] == ["", ""]
    steps = zip(*(rank[case]["seen"] for rank in told), strict=True)
    assert [flat(step) for step in steps] == [ids(whole.batch(step)) for step in range(2, 6)]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("1 loaded_on_one", ["epoch 0, 16 samples", "epoch 0, 0 samples", "on every rank"]),
        ("2 a_seed_of_its_own", ["from plan", "another one from plan", "same data, seed"]),
        ("5 other_batches_on_one", ["global batches of 8", "global batches of 10"]),
    ],
)
def test_a_rank_that_begins_elsewhere_raises_at_its_second_batch(
    told: list[dict[str, Any]], case: str, words: list[str]
) -> None:
    """Whichever rank comes second."""
    raised = [rank[case] for rank in told if rank[case]["error"]]
    assert len(raised) == 1
    assert raised[0]["error"].startswith("WorldError: ranks do not go on from the same place")
    assert all(word in raised[0]["error"] for word in words)
    assert len(raised[0]["seen"]) == 1


def shuffled() -> DataLoader:
    return DataLoader(one(memory("a", 24), seed=5, shuffle_block_size="global"), batch_size=4)


def test_an_epoch_that_begins_anew_in_the_same_order_is_told_once() -> None:
    loader = shuffled()
    for _, _ in zip(range(2), loader, strict=False):
        pass
    with pytest.warns(
        UserWarning, match=r"left after 8 samples of epoch 0.*max_samples=.*set_epoch"
    ):
        for _, _ in zip(range(3), loader, strict=False):
            pass
    next(iter(loader))


def test_it_is_not_told_where_it_is_meant() -> None:
    """After a look at one batch, a set_epoch, a load, or in the order of the files."""
    loader = shuffled()
    next(iter(loader))
    for epoch in range(3):
        loader.set_epoch(epoch)
        for _, _ in zip(range(3), loader, strict=False):
            pass
    loader.load_state_dict(loader.state_dict())
    next(iter(loader))
    in_order = DataLoader(range(24), 4)
    for _ in range(2):
        for _, _ in zip(range(3), in_order, strict=False):
            pass
