"""Order inside one dataset: every combination of shuffle levels, passes and epochs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon_torch.work.order.sample_order import BlockSize, SampleOrder, ShuffleLevels

SIZES = [3, 0, 5, 1, 4, 0, 2]
FILE_ORDER = [(shard, sample) for shard, size in enumerate(SIZES) for sample in range(size)]
COMBINATIONS = list(product([False, True], [False, True], [None, 1, 4, 100, "auto", "global"]))


def order(
    sizes: Sequence[int],
    levels: tuple[bool, bool, BlockSize],
    *,
    seed: int = 0,
    name: str = "web",
    reshuffle: bool = True,
) -> SampleOrder:
    return SampleOrder(
        [name],
        [np.array(sizes, np.int64)],
        seed=seed,
        levels=ShuffleLevels(*levels),
        reshuffle=[reshuffle],
    )


def located(
    samples: SampleOrder, ranks: Sequence[int], epoch: int = 0, dataset: int = 0
) -> list[tuple[int, int, int]]:
    rank = np.array(ranks, np.int64)
    found = samples.locate(np.full(len(rank), dataset), rank, epoch)
    return list(zip(*(array.tolist() for array in found), strict=True))


def one_pass(samples: SampleOrder, number: int = 0, epoch: int = 0) -> list[tuple[int, int]]:
    size = int(samples.size[0])
    rows = located(samples, range(number * size, (number + 1) * size), epoch)
    assert {at for at, _, _ in rows} == {number}
    return [(shard, sample) for _, shard, sample in rows]


# --- the table of levels -------------------------------------------------------------------------


@pytest.mark.parametrize("levels", COMBINATIONS)
@pytest.mark.parametrize("reshuffle", [True, False])
def test_every_combination_equals_the_oracle(
    levels: tuple[bool, bool, BlockSize], reshuffle: bool
) -> None:
    samples = order(SIZES, levels, seed=7, reshuffle=reshuffle)
    for epoch, number in product((0, 1, 5), (0, 1, 2, 9)):
        expected = oracle.one_pass(
            "web",
            SIZES,
            seed=7,
            levels=oracle.Levels(*levels),
            epoch=epoch,
            pass_index=number,
            reshuffle=reshuffle,
        )
        assert one_pass(samples, number, epoch) == expected


@settings(max_examples=120)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any),
    st.sampled_from(COMBINATIONS),
    st.integers(-(2**70), 2**70),
    st.text(min_size=1, max_size=5),
    st.data(),
)
def test_any_dataset_equals_the_oracle(
    sizes: list[int],
    levels: tuple[bool, bool, BlockSize],
    seed: int,
    name: str,
    data: st.DataObject,
) -> None:
    if isinstance(levels[2], int):
        levels = (*levels[:2], data.draw(st.integers(1, sum(sizes) + 3)))
    epoch, number = data.draw(st.integers(0, 2**40)), data.draw(st.integers(0, 2**40))
    expected = oracle.one_pass(
        name, sizes, seed=seed, levels=oracle.Levels(*levels), epoch=epoch, pass_index=number
    )
    assert one_pass(order(sizes, levels, seed=seed, name=name), number, epoch) == expected


@pytest.mark.parametrize("levels", COMBINATIONS)
def test_a_pass_is_every_sample_once(levels: tuple[bool, bool, BlockSize]) -> None:
    samples = order(SIZES, levels)
    for number in range(3):
        assert sorted(one_pass(samples, number)) == FILE_ORDER


def shards_in_order(rows: list[tuple[int, int]]) -> list[int]:
    """Shards as runs: [0, 0, 2, 2, 2, 0] -> [0, 2, 0]."""
    return [s for i, (s, _) in enumerate(rows) if i == 0 or rows[i - 1][0] != s]


BIG = [20] * 30


def test_no_shuffle_is_file_order() -> None:
    samples = order(SIZES, (False, False, None))
    assert one_pass(samples, 0) == one_pass(samples, 3, epoch=2) == FILE_ORDER
    assert not samples.varies(0)


def test_shard_shuffle_keeps_shards_whole_and_in_order() -> None:
    rows = one_pass(order(BIG, (True, False, None)))
    runs = shards_in_order(rows)
    assert sorted(runs) == list(range(30)) and runs != sorted(runs)
    assert [sample for _, sample in rows] == list(range(20)) * 30


def test_shuffle_within_shards_keeps_the_order_of_shards() -> None:
    rows = one_pass(order(BIG, (False, True, None)))
    assert shards_in_order(rows) == list(range(30))
    orders = {tuple(sample for s, sample in rows if s == shard) for shard in range(30)}
    assert len(orders) == 30
    assert {tuple(sorted(o)) for o in orders} == {tuple(range(20))}


def test_shuffle_of_shards_and_within_does_both() -> None:
    rows = one_pass(order(BIG, (True, True, None)))
    runs = shards_in_order(rows)
    assert sorted(runs) == list(range(30)) and runs != sorted(runs)
    assert one_pass(order(BIG, (True, False, None))) != rows


@pytest.mark.parametrize("shards", [False, True])
def test_blocks_permute_windows_of_the_shards_in_order(shards: bool) -> None:
    laid_out = one_pass(order(BIG, (shards, False, None)))
    rows = one_pass(order(BIG, (shards, False, 70)))
    for start in range(0, 600, 70):
        assert sorted(rows[start : start + 70]) == sorted(laid_out[start : start + 70])
        assert rows[start : start + 70] != laid_out[start : start + 70]


def test_block_shuffle_includes_the_shuffle_within_shards() -> None:
    for block in (4, "auto", "global"):
        assert one_pass(order(SIZES, (True, True, block))) == one_pass(
            order(SIZES, (True, False, block))
        )


def test_auto_is_eight_of_the_largest_shard_at_most_all() -> None:
    assert one_pass(order(BIG, (True, False, "auto"))) == one_pass(order(BIG, (True, False, 160)))
    assert one_pass(order(SIZES, (True, False, "auto"))) == one_pass(
        order(SIZES, (True, False, sum(SIZES)))
    )
    samples = SampleOrder(
        ["a", "b"],
        [np.array([5] * 20), np.array([1] * 40)],
        seed=0,
        levels=ShuffleLevels(False, False, "auto"),
        reshuffle=[True, True],
    )
    first = located(samples, range(40), dataset=0)
    assert {shard for _, shard, _ in first} == set(range(8))
    second = located(samples, range(8), dataset=1)
    assert {shard for _, shard, _ in second} == set(range(8))


def test_global_ignores_the_order_of_shards() -> None:
    assert one_pass(order(BIG, (True, True, "global"))) == one_pass(
        order(BIG, (False, False, "global"))
    )


@pytest.mark.parametrize("shards", [False, True])
def test_a_giant_among_hundreds_of_tiny_shards_hides_none_of_them(shards: bool) -> None:
    sizes = [1, 2] * 200 + [10**4] + [1] * 200
    samples = order(sizes, (shards, False, None), seed=4)
    rows = one_pass(samples)
    assert sorted(rows) == [(j, i) for j, size in enumerate(sizes) for i in range(size)]
    assert all(i == 0 or rows[at - 1] == (j, i - 1) for at, (j, i) in enumerate(rows))
    assert (shards_in_order(rows) == list(range(len(sizes)))) is not shards


# --- passes and epochs ---------------------------------------------------------------------------

SHUFFLING = [c for c in COMBINATIONS if (c[0] or c[1] or c[2]) and c[2] != 1]


@pytest.mark.parametrize("levels", SHUFFLING)
def test_passes_and_epochs_differ_in_order(levels: tuple[bool, bool, BlockSize]) -> None:
    samples = order(BIG, levels)
    assert samples.varies(0)
    seen = {tuple(one_pass(samples, number, epoch)) for number in range(3) for epoch in range(3)}
    assert len(seen) == 9


@pytest.mark.parametrize("levels", COMBINATIONS)
def test_without_reshuffle_every_pass_repeats_the_first(
    levels: tuple[bool, bool, BlockSize],
) -> None:
    samples = order(BIG, levels, reshuffle=False)
    first = one_pass(order(BIG, levels))
    assert not samples.varies(0)
    for number, epoch in product(range(3), range(3)):
        assert one_pass(samples, number, epoch) == first


@pytest.mark.parametrize("levels", SHUFFLING)
def test_seeds_and_names_give_different_orders(levels: tuple[bool, bool, BlockSize]) -> None:
    seen = {
        tuple(one_pass(order(BIG, levels, seed=seed, name=name)))
        for seed, name in product((0, 1, -1, 2**70), ("a", "b", "ab", "数"))
    }
    assert len(seen) == 16


# --- random access and inverse -------------------------------------------------------------------


@settings(max_examples=100)
@given(
    st.lists(
        st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any), min_size=1, max_size=4
    ),
    st.sampled_from(COMBINATIONS),
    st.data(),
)
def test_any_ranks_of_any_datasets_in_any_order(
    sizes: list[list[int]], levels: tuple[bool, bool, BlockSize], data: st.DataObject
) -> None:
    names = [f"set {i}" for i in range(len(sizes))]
    reshuffle = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    samples = SampleOrder(
        names,
        [np.array(s) for s in sizes],
        seed=3,
        levels=ShuffleLevels(*levels),
        reshuffle=reshuffle,
    )
    assert samples.size.tolist() == [sum(s) for s in sizes]
    asked = st.tuples(st.integers(0, len(sizes) - 1), st.integers(0, 80))
    for epoch in data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)):
        questions = data.draw(st.lists(asked, max_size=12))
        found = samples.locate(
            np.array([d for d, _ in questions], np.int64),
            np.array([rank for _, rank in questions], np.int64),
            epoch,
        )
        expected = []
        for d, rank in questions:
            number, offset = divmod(rank, sum(sizes[d]))
            in_pass = oracle.one_pass(
                names[d],
                sizes[d],
                seed=3,
                levels=oracle.Levels(*levels),
                epoch=epoch,
                pass_index=number,
                reshuffle=reshuffle[d],
            )
            expected.append((number, *in_pass[offset]))
        assert list(zip(*(array.tolist() for array in found), strict=True)) == expected


@pytest.mark.parametrize("levels", COMBINATIONS)
@pytest.mark.parametrize("reshuffle", [True, False])
def test_ranks_lead_back(levels: tuple[bool, bool, BlockSize], reshuffle: bool) -> None:
    samples = order(SIZES, levels, reshuffle=reshuffle)
    passes = [0, 1, 7, 2]
    for shard, sample in FILE_ORDER:
        for epoch in (0, 3):
            ranks = samples.ranks(0, shard, sample, np.array(passes), epoch)
            assert located(samples, ranks.tolist(), epoch) == [
                (number, shard, sample) for number in passes
            ]


@pytest.mark.parametrize("block", [None, 1000, "auto", "global"])
def test_a_dataset_of_many_samples_far_out(block: BlockSize) -> None:
    sizes = np.full(1000, 10**9)
    samples = order(sizes.tolist(), (True, True, block))
    ranks = np.array([0, 1, 10**12 - 1, 10**12, 10**13 + 12345, 9 * 10**15])
    numbers, shards, places = samples.locate(np.zeros(6, np.int64), ranks, 2)
    assert numbers.tolist() == [0, 0, 0, 1, 10, 9000]
    for i, rank in enumerate(ranks.tolist()):
        back = samples.ranks(0, int(shards[i]), int(places[i]), numbers[i : i + 1], 2)
        assert back.tolist() == [rank]


# --- twins ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("levels", SHUFFLING)
def test_twins_have_independent_orders(levels: tuple[bool, bool, BlockSize]) -> None:
    sizes = [np.full(200, 10)] * 2
    samples = SampleOrder(
        ["first", "second"],
        sizes,
        seed=0,
        levels=ShuffleLevels(*levels),
        reshuffle=[True, True],
    )
    first, second = (located(samples, range(2000), dataset=d) for d in (0, 1))
    equal = sum(a == b for a, b in zip(first, second, strict=True))
    # two independent orders meet in one of n places, where n is what the level moves
    if levels[2] == "global" or levels[0]:
        expected, unit = 10.0 if levels[2] is None and not levels[1] else 1.0, 10.0
    elif levels[2] is None:
        expected, unit = 200.0, 1.0
    else:
        block = {4: 4, 100: 100, "auto": 80}[levels[2]]
        expected, unit = 2000 / block, 1.0
    assert abs(equal - expected) < 5 * math.sqrt(expected * unit) + 5 * unit


@pytest.mark.parametrize("levels", SHUFFLING)
def test_an_order_does_not_depend_on_other_datasets(
    levels: tuple[bool, bool, BlockSize],
) -> None:
    alone = order(SIZES, levels)
    among = SampleOrder(
        ["code", "web", "zeta"],
        [np.array([4, 4]), np.array(SIZES), np.array([1000])],
        seed=0,
        levels=ShuffleLevels(*levels),
        reshuffle=[True, False, True],
    )
    reference = order(SIZES, levels, reshuffle=False)
    assert located(among, range(40), 1, dataset=1) == located(reference, range(40), 1)
    assert one_pass(alone) == one_pass(reference)
