"""Wrappers that fetch one batch ahead: the state is that of the batch in use."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from toys import batches, ids, mixture_of, three_in_memory

from zephon_torch import ConfigurationError, DataLoader, StaleIteratorError, bind


def make(**options: Any) -> DataLoader:
    source = mixture_of(three_in_memory(), shuffle_block_size="global")
    return DataLoader(source, **({"batch_size": 4} | options))


def ahead(loader: Any) -> Iterator[Any]:
    """timm's PrefetchLoader, NVIDIA's data_prefetcher, Ray's _WrappedDataLoader."""
    loop = iter(loader)
    batch = next(loop, None)
    while batch is not None:
        following = next(loop, None)
        yield batch
        batch = following


def two_epochs() -> list[list[int]]:
    loader = make()
    return batches(loader) + batches(loader)


WHOLE = two_epochs()
STEPS = len(WHOLE) // 2


def save_after(loader: DataLoader, step: int, route: str) -> tuple[list[list[int]], Any]:
    """The batches that were used, and what is saved with the `step`-th of them in use."""
    model = torch.nn.Linear(1, 1)
    if route != "argument":
        loader.behind = 1
    bind(model, loader)
    used: list[list[int]] = []

    def state() -> Any:
        if route == "model":
            return model.state_dict()
        return loader.state_dict(behind=1) if route == "argument" else loader.state_dict()

    while loader.epoch < 2:
        if step == len(used):
            return used, state()
        for batch in ahead(loader):
            used.append(ids(batch))
            if len(used) == step:
                return used, state()
    return used, state()


def resumed(state: Any, route: str, **options: Any) -> DataLoader:
    loader = make(**options)
    if route == "model":
        model = torch.nn.Linear(1, 1)
        bind(model, loader)
        model.load_state_dict(state)
    else:
        loader.load_state_dict(state)
    return loader


@pytest.mark.parametrize("route", ["argument", "attribute", "model"])
@pytest.mark.parametrize("step", [0, 1, 2, STEPS - 1, STEPS, STEPS + 1, 2 * STEPS - 1])
def test_every_step_resumes_at_the_batch_after_the_one_in_use(step: int, route: str) -> None:
    used, state = save_after(make(), step, route)
    loader = resumed(state, route)
    rest = [ids(batch) for batch in ahead(loader)]
    while loader.epoch < 2:
        rest += [ids(batch) for batch in ahead(loader)]
    assert used + rest == WHOLE


@pytest.mark.parametrize("num_workers", [0, 2])
def test_so_it_does_again_after_a_resume(num_workers: int) -> None:
    used: list[list[int]] = []
    state = make().state_dict()
    for kill in (0, 1, 3, 2, 5):
        loader = resumed(state, "loader", num_workers=num_workers)
        state = loader.state_dict(behind=1)
        for number, batch in zip(range(kill), ahead(loader), strict=False):
            del number
            used.append(ids(batch))
            state = loader.state_dict(behind=1)
        loader.close()
    assert used == WHOLE[: len(used)] and len(used) >= 10


def test_a_short_last_batch_and_a_larger_batch_size_on_the_way() -> None:
    used, state = save_after(make(), STEPS - 1, "argument")
    left = [i for batch in WHOLE[STEPS - 1 : STEPS] for i in batch]
    loader = resumed(state, "loader", batch_size=7)
    assert ids(next(ahead(loader))) == left
    assert used == WHOLE[: STEPS - 1]


def test_at_the_end_of_an_iteration_nothing_is_held_back() -> None:
    loader = make()
    loop = iter(loader)
    for _ in range(STEPS):
        next(loop)
    assert loader.state_dict(behind=1)["epoch"] == 0, "the last batch may not be in use"
    assert next(loop, None) is None
    assert loader.state_dict(behind=1) == loader.state_dict()
    assert loader.state_dict()["epoch"] == 1


def test_what_the_loader_itself_says_is_what_it_handed_over() -> None:
    loader = make()
    loader.behind = 1
    wrapped = ahead(loader)
    next(wrapped)
    assert (loader.delivered, loader.state_dict()["delivered"]) == (8, 4)
    assert loader.state_dict(behind=0)["delivered"] == 8
    loader.load_state_dict(loader.state_dict())  # as averaged weights are swapped in and out
    assert ids(next(wrapped)) == WHOLE[1]
    loader.behind = 0  # without a wrapper, one batch back is another place
    loader.load_state_dict(loader.state_dict(behind=1))
    with pytest.raises(StaleIteratorError):
        next(wrapped)


@pytest.mark.parametrize("behind", [-1, 2, True, 0.5, "1"])
def test_more_than_one_is_refused(behind: Any) -> None:
    loader = make()
    with pytest.raises(ConfigurationError, match="behind is"):
        loader.behind = behind
    with pytest.raises(ConfigurationError, match="behind is"):
        loader.state_dict(behind=behind)


def test_deeper_wrappers_carry_the_state_with_each_batch() -> None:
    """The recipe of docs/trainers.md."""

    def with_states(loader: DataLoader) -> Iterator[tuple[Any, dict[str, Any]]]:
        for batch in loader:
            yield batch, loader.state_dict()

    def deep(pairs: Iterator[Any], depth: int) -> Iterator[Any]:
        held: deque[Any] = deque()
        for pair in pairs:
            held.append(pair)
            if len(held) > depth:
                yield held.popleft()
        yield from held

    for batch_number in (0, 4, STEPS - 2, STEPS - 1):
        loader, used = make(), []
        for batch, saved in deep(with_states(loader), 5):
            state = saved
            used.append(ids(batch))
            if len(used) == batch_number + 1:
                break
        whole = WHOLE[:STEPS] if batch_number < STEPS - 1 else WHOLE
        assert used + batches(resumed(state, "loader")) == whole
