"""A skip loop of one's own on a loader that goes on by itself: told, and nothing else is.

``if step < resume_step: continue``, as in one version of Accelerate's example.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from toys import ids

from zephon_torch import DataLoader, Skippable

TOTAL, SIZE, LEFT_AT = 294, 7, 13
STEP = 0.003  # seconds, longer than any pause between two batches that nobody looks at


def loader_after(left_at: int = LEFT_AT, **options: Any) -> DataLoader:
    first, loader = (DataLoader(list(range(TOTAL)), SIZE, shuffle=True, **options) for _ in "12")
    loader.load_state_dict(first.state_dict() | {"delivered": left_at * SIZE})
    return loader


def train(batch: Any) -> list[int]:
    time.sleep(STEP)
    return ids(batch)


def skips(loader: Iterable[Any], num: int = LEFT_AT) -> list[int]:
    return [i for step, batch in enumerate(loader) if step >= num for i in train(batch)]


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}], ids=str)
def test_what_a_skip_loop_loses_is_told(options: dict[str, Any]) -> None:
    with loader_after(**options) as loader, pytest.warns(UserWarning, match="must not|skips") as told:
        seen = skips(loader)
    assert TOTAL - LEFT_AT * SIZE - len(seen) == LEFT_AT * SIZE == 91, "so many are lost"
    assert len(told) == 1
    assert "each of the first 13 batches after the load" in str(told[0].message)
    assert told[0].filename == __file__


def trains(loader: DataLoader) -> None:
    for batch in loader:
        train(batch)


def collects(loader: DataLoader) -> None:
    for batch in list(loader):
        train(batch)


def looks_only(loader: DataLoader) -> None:
    for batch in loader:
        ids(batch)


def accumulates(num: int) -> Callable[[DataLoader], None]:
    """As transformers' Trainer does: it takes the batches of a step at once."""

    def loop(loader: DataLoader) -> None:
        batches = iter(loader)
        while taken := [batch for batch, _ in zip(batches, range(num), strict=False)]:
            train(taken[0])

    return loop


def fetches_ahead(num: int) -> Callable[[DataLoader], None]:
    def loop(loader: DataLoader) -> None:
        held: deque[Any] = deque()
        for batch in loader:
            held.append(batch)
            if len(held) > num:
                train(held.popleft())

    return loop


@pytest.mark.parametrize(
    "loop",
    [
        trains,
        collects,
        looks_only,
        *(accumulates(num) for num in (2, 4, LEFT_AT, LEFT_AT + 1)),
        *(fetches_ahead(num) for num in (1, 2, 5)),
    ],
)
def test_loops_that_lose_nothing_are_left_alone(loop: Callable[[DataLoader], None]) -> None:
    loader = loader_after()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loop(loader)
    assert loader.epoch == 1


@pytest.mark.parametrize("left_at", [1, 2, 3])
def test_a_few_batches_are_no_sign(left_at: int) -> None:
    """A wrapper that fetches ahead takes as many at its start."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        skips(loader_after(left_at), left_at)


def test_a_loader_that_begins_an_epoch_may_be_skipped_by_hand() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = DataLoader(list(range(TOTAL)), SIZE, shuffle=True)
        assert len(skips(loader)) == TOTAL - 91
        assert len(skips(Skippable(DataLoader(list(range(TOTAL)), SIZE)))) == TOTAL - 91
