"""Epochs of a loader: how they follow each other; set_epoch, break, loads, errors."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from toys import batches, flat, ids, memory, one

from zephon_torch import DataLoader
from zephon_torch.errors import (
    ConfigurationError,
    PlanMismatch,
    StaleIteratorError,
    StateError,
    ZephonError,
)

TOTAL, BATCH, STEPS = 24, 4, 6


def make(total: int = TOTAL, batch_size: int = BATCH, **options: Any) -> DataLoader:
    source = one(memory("a", total), seed=5, chunk_size=4, shuffle_block_size="global")
    return DataLoader(source, batch_size=batch_size, **options)


def epochs(count: int, **options: Any) -> list[list[list[int]]]:
    loader = make(**options)
    return [batches(loader) for _ in range(count)]


def place(loader: DataLoader) -> tuple[int, int]:
    state = loader.state_dict()
    assert (state["epoch"], state["delivered"]) == (loader.epoch, loader.delivered)
    return state["epoch"], state["delivered"]


def after(count: int, **options: Any) -> dict[str, Any]:
    """State after so many batches, not asking for one more."""
    loader = make(**options)
    loop = iter(loader)
    for _ in range(count):
        next(loop)
    return loader.state_dict()


# --- one after the other -------------------------------------------------------------------------


def test_every_loop_is_the_next_epoch() -> None:
    three = epochs(3)
    assert [sorted(flat(epoch)) for epoch in three] == [[*range(TOTAL)]] * 3
    assert len({str(epoch) for epoch in three}) == 3


def test_the_state_counts_what_was_handed_over() -> None:
    loader = make(num_threads=1, prefetch_factor=4)
    seen = [place(loader)]
    seen += [place(loader) for _ in loader]
    assert seen == [(0, 4 * i) for i in range(STEPS)] + [(1, 0)]
    assert place(loader) == (1, 0)


def test_the_last_batch_ends_the_epoch_before_stop_iteration_does() -> None:
    loader = make()
    loop = iter(loader)
    for _ in range(STEPS):
        next(loop)
    assert place(loader) == (1, 0)
    assert loader.remaining == STEPS
    assert next(loop, None) is None
    assert next(loop, None) is None
    assert place(loader) == (1, 0)
    assert batches(loader) == epochs(2)[1]


def test_a_dropped_tail_ends_the_epoch_too() -> None:
    loader = make(total=26, drop_last=True)
    loop = iter(loader)
    for _ in range(6):
        next(loop)
    assert place(loader) == (1, 0)


def test_two_iterators_made_in_advance_are_two_epochs() -> None:
    """An iterator begins at its first next(), not when it is made."""
    loader = make()
    first, second = iter(loader), iter(loader)
    assert [batches(first), batches(second)] == epochs(2)


# --- break ---------------------------------------------------------------------------------------


def test_after_a_break_the_state_stays_until_the_next_loop_begins() -> None:
    loader, (first, second) = make(), epochs(2)
    for step, _ in enumerate(loader):
        if step == 2:
            break
    assert place(loader) == (0, 12)
    assert loader.remaining == STEPS - 3
    loop = iter(loader)
    assert place(loader) == (0, 12)
    assert ids(next(loop)) == first[0], "a new loop begins the epoch again"
    assert place(loader) == (0, 4)
    with pytest.warns(UserWarning, match="left after 12 samples"):
        assert batches(loop) == first[1:]
    assert batches(loader) == second


def test_a_replaced_iterator_says_so() -> None:
    loader = make()
    old = iter(loader)
    next(old)
    new = iter(loader)
    next(old)  # the new one has not begun
    next(new)
    with pytest.raises(StaleIteratorError, match="one iterator at a time"):
        next(old)
    assert place(loader) == (0, 4)
    with pytest.warns(UserWarning, match="left after 8 samples"):
        assert len(batches(new)) == STEPS - 1


def test_a_replaced_iterator_says_so_even_when_the_new_one_is_gone() -> None:
    loader = make(num_threads=1)
    old = iter(loader)
    next(old)
    list(loader)
    with pytest.raises(StaleIteratorError):
        next(old)
    assert place(loader) == (1, 0)
    loader.close()


# --- set_epoch -----------------------------------------------------------------------------------


def test_set_epoch_as_torch_code_calls_it_changes_nothing() -> None:
    loader, found = make(), []
    for epoch in range(3):
        loader.set_epoch(epoch)
        found.append(batches(loader))
    assert found == epochs(3)


def test_set_epoch_of_another_epoch_begins_it_at_the_next_loop() -> None:
    loader, four = make(), epochs(4)
    loader.set_epoch(3)
    assert place(loader) == (3, 0)
    assert batches(loader) == four[3]
    loader.set_epoch(1)
    assert batches(loader) == four[1]
    assert batches(loader) == four[2]


def test_set_epoch_during_a_loop_waits_for_the_next() -> None:
    loader, four = make(), epochs(4)
    loop = iter(loader)
    seen = [ids(next(loop))]
    loader.set_epoch(3)
    assert place(loader) == (0, 4)
    assert ids(loader.batch(1)) == four[0][1]
    seen += batches(loop)
    assert seen == four[0]
    assert batches(loader) == four[3]


def test_set_epoch_of_the_current_epoch_has_no_effect_at_any_point() -> None:
    loader, two = make(), epochs(2)
    loop = iter(loader)
    seen = [ids(next(loop))]
    loader.set_epoch(0)
    seen += batches(loop)
    assert seen == two[0]
    loader.set_epoch(1)
    assert batches(loader) == two[1]


def test_set_epoch_and_back_has_no_effect() -> None:
    loader, two = make(), epochs(2)
    loop = iter(loader)
    next(loop)
    loader.set_epoch(3)
    loader.set_epoch(0)
    assert batches(loop) == two[0][1:]
    assert batches(loader) == two[1]


def test_after_a_load_the_checkpoint_wins_and_says_so() -> None:
    loader, two = make(), epochs(2)
    loader.load_state_dict(after(2))
    with pytest.warns(UserWarning, match=r"set_epoch\(5\).*epoch 0.*checkpoint wins"):
        loader.set_epoch(5)
    assert place(loader) == (0, 8)
    assert batches(loader) == two[0][2:]
    assert batches(loader) == two[1]


def test_after_a_load_set_epoch_of_its_epoch_is_silent() -> None:
    loader = make()
    loader.load_state_dict(after(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.set_epoch(0)
    assert batches(loader) == epochs(1)[0][2:]


def test_a_count_that_begins_anew_after_a_load_goes_on_from_the_checkpoint() -> None:
    loader, five = make(), epochs(5)
    loader.load_state_dict(after(2) | {"epoch": 2})
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for count in range(3):
            loader.set_epoch(count)
            found.append(batches(loader))
    assert found == [five[2][2:], five[3], five[4]]


def test_a_count_ahead_of_the_checkpoint_leaves_no_epoch_out() -> None:
    loader, three = make(), epochs(3)
    loader.load_state_dict(after(STEPS))
    with pytest.warns(UserWarning, match="set_epoch\\(2\\).*epoch 1"):
        loader.set_epoch(2)
    assert batches(loader) == three[1]
    loader.set_epoch(3)
    assert place(loader) == (2, 0)
    assert batches(loader) == three[2]


def test_of_several_counts_before_the_first_batch_the_last_one_holds() -> None:
    loader, three = make(), epochs(3)
    loader.load_state_dict(after(STEPS))
    loader.set_epoch(0)  # of a trainer that first ends the epoch the checkpoint was the end of
    loader.set_epoch(1)
    assert batches(loader) == three[1]
    loader.set_epoch(2)
    assert batches(loader) == three[2]


def test_a_break_after_a_load_is_followed_by_the_next_epoch_of_the_count() -> None:
    loader, three = make(), epochs(3)
    loader.load_state_dict(after(2) | {"epoch": 1})
    loader.set_epoch(0)
    assert ids(next(iter(loader))) == three[1][2]
    loader.set_epoch(1)
    assert batches(loader) == three[2]


def test_another_load_ends_the_shift() -> None:
    loader, three = make(), epochs(3)
    loader.load_state_dict(after(2) | {"epoch": 1})
    loader.set_epoch(0)
    next(iter(loader))
    loader.load_state_dict(after(2))
    assert batches(loader) == three[0][2:]
    loader.set_epoch(2)
    assert batches(loader) == three[2]


@pytest.mark.parametrize("epoch", [-1, 1.0, "1", None, True])
def test_an_epoch_that_is_none(epoch: Any) -> None:
    with pytest.raises(ConfigurationError, match="epoch is"):
        make().set_epoch(epoch)


# --- loads ---------------------------------------------------------------------------------------


def test_a_load_waits_for_the_next_loop() -> None:
    loader = make()
    loader.load_state_dict(after(3))
    assert place(loader) == (0, 12)
    assert len(loader) == STEPS
    assert loader.remaining == STEPS - 3
    assert batches(loader) == epochs(1)[0][3:]
    assert place(loader) == (1, 0)


def test_single_steps_after_a_load_are_those_of_its_epoch() -> None:
    saved = make()
    batches(saved)
    next(iter(saved))
    loader, two = make(), epochs(2)
    loader.load_state_dict(saved.state_dict())
    assert ids(loader.batch(0)) == two[1][0]
    assert loader.batch_sampler.epoch == loader.epoch == 1  # type: ignore[union-attr]


def test_loading_is_a_copy() -> None:
    state, loader = after(3), make()
    loader.load_state_dict(state)
    state["delivered"] = 0
    assert place(loader) == (0, 12)


def test_the_last_of_several_loads_counts() -> None:
    loader = make()
    loader.load_state_dict(after(5))
    loader.load_state_dict(after(1))
    assert batches(loader) == epochs(1)[0][1:]


def test_a_load_during_a_loop_ends_it_loudly() -> None:
    loader = make()
    loop = iter(loader)
    next(loop)
    loader.load_state_dict(after(3))
    with pytest.raises(StaleIteratorError, match="start a new one"):
        next(loop)
    assert batches(loader) == epochs(1)[0][3:]


def test_a_load_of_where_the_run_stands_anyway_is_dropped() -> None:
    """Weights of a moving average are swapped in and out with the whole state of the model."""
    loader, two = make(), epochs(2)
    loop = iter(loader)
    seen = [ids(next(loop)) for _ in range(2)]
    loader.load_state_dict(loader.state_dict())
    seen += batches(loop)
    assert seen == two[0]
    loader.load_state_dict(loader.state_dict())
    assert batches(loader) == two[1]


def test_a_state_that_is_refused_leaves_a_running_loop_alone() -> None:
    loader = make(num_threads=1)
    loop = iter(loader)
    seen = [ids(next(loop))]
    for bad in ({}, None, {"epoch": 0}):
        with pytest.raises(StateError):
            loader.load_state_dict(bad)  # type: ignore[arg-type]
    assert place(loader) == (0, 4)
    seen += batches(loop)
    assert seen == epochs(1)[0]


def test_a_state_beyond_the_end_of_the_epoch_is_corrupt() -> None:
    loader = make()
    with pytest.raises(StateError, match="delivered"):
        loader.load_state_dict(after(1) | {"delivered": TOTAL + 1})
        iter(loader)


def test_another_plan_is_refused_at_every_first_use() -> None:
    state = DataLoader(one(memory("a", 25), seed=5), batch_size=4).state_dict()
    for use in (iter, len, lambda loader: loader.batch(0), lambda loader: loader.remaining):
        loader = make()
        loader.load_state_dict(state)
        with pytest.raises(PlanMismatch, match=r"option chunk_size: 16384 at the .*, 4 now"):
            use(loader)


def test_a_refused_plan_can_be_replaced_by_another_load() -> None:
    loader = make()
    loader.load_state_dict(make(total=25).state_dict())
    with pytest.raises(PlanMismatch):
        iter(loader)
    loader.load_state_dict(after(2))
    assert batches(loader) == epochs(1)[0][2:]


def test_without_strict_the_same_place_of_the_new_plan_goes_on() -> None:
    state = after(3)
    loader = make(total=25)
    loader.load_state_dict(state, strict=False)
    assert place(loader) == (0, 12)
    assert batches(loader) == epochs(1, total=25)[0][3:]
    assert place(loader) == (1, 0)


def test_without_strict_a_place_beyond_the_new_plan_is_its_end() -> None:
    loader = make(total=8)
    loader.load_state_dict(after(5), strict=False)
    assert batches(loader) == epochs(2, total=8)[1]


# --- another size of batch -----------------------------------------------------------------------


@pytest.mark.parametrize("then", [1, 2, 3, 6, 8, 12, 24])
def test_the_batch_size_may_change_at_any_point(then: int) -> None:
    order = flat(epochs(1)[0])
    loader = make(batch_size=then)
    loader.load_state_dict(after(3))
    rest = batches(loader)
    assert flat(rest) == order[12:]
    assert [len(batch) for batch in rest[:-1]] == [then] * (len(rest) - 1)
    assert loader.epoch == 1


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("then", [1, 3, 5, 8, 16, 24])
def test_remaining_is_what_is_still_yielded(drop_last: bool, then: int) -> None:
    for steps in range(STEPS + 1):
        loader = make(batch_size=then, drop_last=drop_last)
        loader.load_state_dict(after(steps))
        remaining = loader.remaining
        assert remaining == len(list(loader)) > 0


def test_the_world_may_change_at_any_point() -> None:
    order = flat(epochs(1)[0])
    state = after(3)
    parts = []
    for rank in range(3):
        loader = make(batch_size=2, rank=rank, num_replicas=3)
        loader.load_state_dict(state)
        parts.append(batches(loader))
    assert flat(flat(step) for step in zip(*parts, strict=True)) == order[12:]


# --- lanes ---------------------------------------------------------------------------------------


def test_lanes_come_with_the_state() -> None:
    reference = epochs(2, lanes=3)
    state = after(2, lanes=3)
    assert state["lanes"] == 3
    loader = make()
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    assert batches(loader) == reference[0][2:]
    assert loader.state_dict()["lanes"] == 3
    assert batches(loader) == reference[1]


def test_single_steps_after_a_load_have_its_lanes() -> None:
    reference = epochs(1, lanes=3)[0]
    loader = make()
    loader.load_state_dict(after(2, lanes=3))
    assert [ids(loader.batch(step)) for step in range(STEPS)] == reference


def test_other_lanes_than_the_states_are_refused_without_strict_taken() -> None:
    state = after(2, lanes=3)
    loader = make(lanes=2)
    loader.load_state_dict(state)
    with pytest.raises(StateError, match=r"lanes=3.*lanes=2.*strict=False"):
        iter(loader)
    loader.load_state_dict(state, strict=False)
    assert loader.state_dict()["lanes"] == 2
    assert batches(loader) == epochs(1, lanes=2)[0][2:]


def test_more_lanes_than_samples_and_ranks_that_do_not_divide_them() -> None:
    for lanes in (5, 7, 40):
        seen = []
        for rank in range(3):
            loader = make(batch_size=2, lanes=lanes, rank=rank, num_replicas=3)
            seen += flat(batches(loader))
        assert sorted(seen) == [*range(TOTAL)]


# --- errors on the way ---------------------------------------------------------------------------


class Fussy:
    """Numbers; some cannot be had."""

    def __init__(self, total: int, bad: set[int]) -> None:
        self.total, self.bad = total, bad

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise OSError(f"no {index}")
        return index


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_an_error_costs_its_batch_and_no_other(num_threads: int) -> None:
    loader = DataLoader(Fussy(24, {9}), batch_size=4, num_threads=num_threads)
    loop, seen = iter(loader), []
    for step in range(6):
        if step == 2:
            with pytest.raises(OSError, match="no 9"):
                next(loop)
            assert place(loader) == (0, 8)
        else:
            seen += ids(next(loop))
    assert seen == [i for i in range(24) if i // 4 != 2]
    assert place(loader) == (1, 0)
    loader.close()


def test_an_error_in_the_last_batch_does_not_repeat_the_epoch() -> None:
    loader = DataLoader(Fussy(24, {23}), batch_size=4)
    loop = iter(loader)
    for _ in range(5):
        next(loop)
    with pytest.raises(OSError, match="no 23"):
        next(loop)
    assert place(loader) == (0, 20), "a restart tries the batch again"
    assert next(loop, None) is None
    assert loader.epoch == 1, "but a loop that ended has ended its epoch"


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_after_close_an_iterator_loses_nothing_silently(num_threads: int) -> None:
    reference = epochs(1)[0]
    loader = make(num_threads=num_threads)
    loop = iter(loader)
    next(loop)
    loader.close()
    try:
        assert ids(next(loop)) == reference[1]
    except ZephonError:
        assert place(loader) == (0, 4)
    loader.close()


@pytest.mark.parametrize("engine", [{}, {"num_threads": 0}, {"num_threads": 2}, {"num_workers": 1}])
def test_an_iterator_goes_on_after_a_newer_one_that_could_not_begin(engine: dict[str, Any]) -> None:
    loader, foreign = make(**engine), DataLoader(memory("other", 24), batch_size=4)
    reference = epochs(1)[0]
    older, newer = iter(loader), iter(loader)
    assert ids(next(older)) == reference[0]
    here = loader.state_dict()
    loader.load_state_dict(foreign.state_dict())
    with pytest.raises(PlanMismatch):
        next(newer)
    loader.load_state_dict(here)
    assert batches(older) == reference[1:]
    assert place(loader) == (1, 0)
    loader.close()


@pytest.mark.parametrize("engine", [{}, {"num_threads": 0}, {"num_threads": 2}, {"num_workers": 1}])
def test_a_closed_iterator_goes_on_at_its_place(engine: dict[str, Any]) -> None:
    loader = make(**engine)
    loop = iter(loader)
    first = ids(next(loop))
    loop.close()
    assert [first, *batches(loop)] == epochs(1)[0]
    loader.close()


def test_an_interrupt_while_a_load_is_adopted_leaves_it_in_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loader = make()
    loader.load_state_dict(loader.state_dict() | {"epoch": 1, "delivered": 8})

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    loop = iter(loader)
    with monkeypatch.context() as patch:
        patch.setattr(loader._cursor, "_move_to", interrupt)
        with pytest.raises(KeyboardInterrupt):
            next(loop)
    assert place(loader) == (1, 8)
    assert batches(loop) == epochs(2)[1][2:]


def test_set_epoch_in_the_body_of_the_last_batch_counts() -> None:
    loader = make()
    for number, _ in enumerate(loader, 1):
        if number == len(loader):
            loader.set_epoch(0)
    assert place(loader) == (0, 0)
    assert batches(loader) == epochs(1)[0]


def test_set_epoch_after_a_first_batch_that_failed_is_for_the_next_loop() -> None:
    loader = DataLoader(Fussy(24, {2}), batch_size=4)
    loop = iter(loader)
    with pytest.raises(OSError, match="no 2"):
        next(loop)
    loader.set_epoch(3)
    assert ids(next(loop)) == [4, 5, 6, 7]
    assert place(loader) == (0, 8)
    assert len(batches(loop)) == 4
    assert place(loader) == (3, 0)
