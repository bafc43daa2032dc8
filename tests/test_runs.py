"""Runs of equal values: where they begin, how long they are, and back to elements."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zephon_torch.arithmetic.runs import counted, lengths_of, runs_of, spread

NUMBERS = st.lists(st.integers(0, 2), min_size=1, max_size=20)


@given(NUMBERS)
def test_runs_spread_out_are_the_elements(numbers: list[int]) -> None:
    values = np.array(numbers)
    starts = runs_of(values)
    lengths = lengths_of(starts, len(values))
    assert np.repeat(values[starts], lengths).tolist() == numbers
    assert (np.diff(values[starts]) != 0).all()
    assert np.broadcast_to(spread(values[starts], lengths), values.shape).tolist() == numbers


@given(NUMBERS, st.data())
def test_no_run_crosses_an_outer_one(numbers: list[int], data: st.DataObject) -> None:
    outer = data.draw(st.lists(st.integers(0, 2), min_size=len(numbers), max_size=len(numbers)))
    starts = runs_of(np.array(numbers), runs_of(np.array(outer))).tolist()
    pairs = list(zip(outer, numbers, strict=True))
    assert starts == [i for i in range(len(pairs)) if i == 0 or pairs[i] != pairs[i - 1]]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=6))
def test_counted_runs_follow_each_other(runs: list[tuple[int, int]]) -> None:
    starts, lengths = (np.array(numbers) for numbers in zip(*runs, strict=True))
    expected = [start + i for start, length in runs for i in range(length)]
    assert counted(starts, lengths).tolist() == expected
