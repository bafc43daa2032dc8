"""The split tree: equal to a sequential tree of accumulators, near the weights, monotone."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon_torch.arithmetic.apportion import MAX_POSITION, SplitTree
from zephon_torch.io import Dataset
from zephon_torch.work import StaticMixtureWorkSource
from zephon_torch.work.order.mixture import TOTAL_LIMIT

SMALL = st.lists(st.integers(1, 60), min_size=1, max_size=12)
ANY = st.lists(st.integers(1, TOTAL_LIMIT // 12), min_size=1, max_size=12)


def counts(weights: list[int], p: int) -> list[int]:
    return SplitTree(weights).counts(np.array([p]))[0].tolist()


def worst_error(tree: SplitTree, prefixes: np.ndarray) -> float:
    """Largest |n_i(p) - w_i p|, exact integers until the last division."""
    weights = tree.weight[: (len(tree.weight) + 1) // 2].astype(object)
    total = int(weights.sum())
    worst = 0
    for p, row in zip(prefixes.tolist(), tree.counts(prefixes), strict=True):
        worst = max(worst, int(abs(row.astype(object) * total - weights * p).max()))
    return worst / total


def log_uniform(num: int, seed: int) -> list[int]:
    """Fixed weights over four decades, from the oracle's own integers."""
    return [int(10 ** (2 + 4 * oracle.mix(seed * 10**6 + i) / 2**64)) for i in range(num)]


MIXTURES = {
    "two": [7, 3],
    "five": [50, 30, 15, 4, 1],
    "half and a thousand": [1000, *[1] * 1000],
    "twenty": log_uniform(20, 1),
    "thousand": log_uniform(1000, 2),
    "ten thousand": log_uniform(10_000, 3),
    "ten thousand equal": [1] * 10_000,
}


# --- definition ----------------------------------------------------------------------------------


@settings(max_examples=60)
@given(SMALL)
def test_every_position_equals_the_oracle(weights: list[int]) -> None:
    n = 250
    rows = SplitTree(weights).counts(np.arange(n + 1))
    steps = np.diff(rows, axis=0)
    assert (steps.sum(axis=1) == 1).all() and steps.min() >= 0
    expected = [leaf for _, leaf in zip(range(n), oracle.apportion(weights), strict=False)]
    assert steps.argmax(axis=1).tolist() == expected


@settings(max_examples=60)
@given(SMALL, st.data())
def test_inverse_equals_a_search(weights: list[int], data: st.DataObject) -> None:
    leaf = data.draw(st.integers(0, len(weights) - 1))
    m = data.draw(st.integers(0, 6))
    assert SplitTree(weights).position(leaf, m) == oracle.position(weights, leaf, m)


@pytest.mark.parametrize(
    ("weights", "p", "expected"),
    [
        ([7, 3], 1, [1, 0]),
        ([7, 3], 2, [1, 1]),
        ([7, 3], 999, [699, 300]),
        ([7, 3], 1_000_001, [700_001, 300_000]),
        ([7, 3], 10**13 + 7, [7000000000005, 3000000000002]),
        ([5, 3, 2], 1, [0, 1, 0]),
        ([5, 3, 2], 3, [1, 1, 1]),
        ([5, 3, 2], 1_000_001, [500000, 300001, 200000]),
        ([5, 3, 2], 10**13 + 7, [5000000000003, 3000000000002, 2000000000002]),
        ([1] * 7, 3, [0, 1, 0, 1, 0, 1, 0]),
        ([1] * 7, 999, [142, 143, 142, 143, 143, 143, 143]),
        ([50, 30, 15, 4, 1], 999, [499, 300, 150, 40, 10]),
        (
            [50, 30, 15, 4, 1],
            10**13 + 7,
            [5000000000003, 3000000000002, 1500000000002, 400000000000, 100000000000],
        ),
        ([1000, 1], 999, [998, 1]),
        ([1000, 1], 1_000_001, [999002, 999]),
    ],
)
def test_literal_counts(weights: list[int], p: int, expected: list[int]) -> None:
    assert counts(weights, p) == expected


@settings(max_examples=60)
@given(SMALL)
def test_tree_equals_the_oracle(weights: list[int]) -> None:
    tree = SplitTree(weights)
    for node in oracle.nodes(oracle.huffman(weights)):
        heavy = -1 if node.heavy is None else node.heavy.number
        light = -1 if node.light is None else node.light.number
        assert (tree.heavy[node.number], tree.light[node.number]) == (heavy, light)
        assert (tree.weight[node.number], tree.depth[node.number]) == (node.weight, node.depth)
        for child in (heavy, light):
            assert child == -1 or tree.parent[child] == node.number
    assert tree.parent[-1] == -1


# --- any position --------------------------------------------------------------------------------


@settings(max_examples=150)
@given(ANY, st.integers(0, MAX_POSITION - 2))
def test_each_step_adds_one_item_to_one_leaf_and_errors_stay_below_two(
    weights: list[int], p: int
) -> None:
    tree = SplitTree(weights)
    before, after = tree.counts(np.array([p, p + 1]))
    assert before.sum() == p
    assert sorted((after - before).tolist()) == [0] * (len(weights) - 1) + [1]
    assert worst_error(tree, np.array([p, p + 1])) < 2


@settings(max_examples=150)
@given(ANY, st.data())
def test_inverse_is_the_first_prefix_with_that_many(
    weights: list[int], data: st.DataObject
) -> None:
    tree = SplitTree(weights)
    leaf = data.draw(st.integers(0, len(weights) - 1))
    most = int(tree.counts(np.array([MAX_POSITION - 1]))[0, leaf])
    m = data.draw(st.integers(0, most))
    p = tree.position(leaf, m)
    if m == 0:
        assert p == 0
        return
    around = tree.counts(np.array([p - 1, p]))[:, leaf].tolist()
    assert around == [m - 1, m]


@settings(max_examples=50)
@given(ANY, st.integers(2, 50), st.integers(0, 2**50))
def test_the_scale_of_the_weights_has_no_effect(weights: list[int], factor: int, p: int) -> None:
    small = [1 + weight % 1000 for weight in weights]
    assert counts(small, p) == counts([weight * factor for weight in small], p)


def test_position_takes_any_size_of_integer() -> None:
    tree = SplitTree([7, 3])
    assert tree.position(0, 0) == tree.position(1, -5) == 0
    assert abs(tree.position(1, 3 * 10**30) - 10**31) < 10


def test_counts_keep_the_shape_of_the_question() -> None:
    tree = SplitTree([3, 2, 1])
    rows = tree.counts(np.array([6, 0, 6]))
    assert rows.dtype == np.int64
    assert rows.tolist() == [[3, 2, 1], [0, 0, 0], [3, 2, 1]]
    assert tree.counts(np.zeros(0, np.int64)).shape == (0, 3)


# --- how good ------------------------------------------------------------------------------------

# the largest |n_i(p) - w_i p| that was seen, at 40 chunk ends near 0 and 40 far out
OBSERVED_AT_CHUNK_ENDS = {
    "two": 0.4,
    "five": 0.88,
    "half and a thousand": 0.992,
    "twenty": 0.935,
    "thousand": 0.98,
    "ten thousand": 0.997,
    "ten thousand equal": 0.989,
}


@pytest.mark.parametrize("name", MIXTURES)
def test_observed_error_at_chunk_ends(name: str) -> None:
    near = np.arange(1, 41) * 16384
    worst = worst_error(SplitTree(MIXTURES[name]), np.concatenate([near, near + 610351562 * 16384]))
    assert worst < 2
    assert worst == pytest.approx(OBSERVED_AT_CHUNK_ENDS[name], abs=5e-4)


@pytest.mark.parametrize("name", ["half and a thousand", "thousand", "ten thousand"])
def test_error_at_awkward_positions(name: str) -> None:
    tree = SplitTree(MIXTURES[name])
    prefixes = np.array([oracle.mix(i) % MAX_POSITION for i in range(20)] + list(range(1, 400, 13)))
    assert worst_error(tree, prefixes) < 2


# the same at every prefix of the plan's own order, chunks of 16,384, seeds 0, 1, 2
OBSERVED_AT_EVERY_PREFIX = {
    "two": 1.3,
    "five": 1.88,
    "half and a thousand": 1.806,
    "twenty": 2.18,
    "thousand": 2.165,
}


@pytest.mark.parametrize("name", OBSERVED_AT_EVERY_PREFIX)
def test_observed_error_at_every_prefix_of_the_plan(name: str) -> None:
    weights = MIXTURES[name]
    names = [f"{i:05}" for i in range(len(weights))]
    datasets = [Dataset.from_samples(n, range(10)) for n in names]
    worst = 0.0
    for seed in range(3):
        source = StaticMixtureWorkSource(
            datasets,
            dict(zip(names, weights, strict=True)),
            seed=seed,
            exhausted_policy="repeat",
        )
        for chunk in (*range(2), 10**6):
            labels = source.chunk(chunk).pointers.dataset
            before = SplitTree(weights).counts(np.array([chunk * 16384]))[0]
            worst = max(worst, worst_prefix_error(weights, labels, before, chunk * 16384))
    assert worst < 6
    assert worst == pytest.approx(OBSERVED_AT_EVERY_PREFIX[name], abs=5e-4)


def worst_prefix_error(
    weights: list[int], labels: np.ndarray, before: np.ndarray, start: int
) -> float:
    """Largest |count - w_i p| over all datasets and all prefixes that end in these labels."""
    total = sum(weights)
    worst = 0.0
    for leaf, weight in enumerate(weights):
        # exact integers: count * total - weight * p, relative to its value at `start`
        at_start = int(before[leaf]) * total - weight * start
        at = np.flatnonzero(labels == leaf)
        seen = np.arange(1, len(at) + 1)
        # extremes stand right after an item, right before one, and at the end
        after = at_start + seen * total - weight * (at + 1)
        ahead = at_start + (seen - 1) * total - weight * at
        end = at_start + len(at) * total - weight * len(labels)
        worst = max(worst, *np.abs(after), *np.abs(ahead), abs(end))
    return float(worst) / total


@given(ANY, st.data())
def test_many_positions_are_those_of_one_at_a_time(weights: list[int], data: st.DataObject) -> None:
    tree = SplitTree(weights)
    for leaf, weight in enumerate(weights):
        most = MAX_POSITION // 4 * weight // sum(weights)
        wanted = data.draw(st.lists(st.integers(1, max(most, 1)), min_size=1, max_size=5))
        found = tree.positions(leaf, np.array(wanted)).tolist()
        assert found == [tree.position(leaf, m) for m in wanted]


@settings(max_examples=60)
@given(ANY, st.lists(st.integers(0, MAX_POSITION - 1), min_size=1, max_size=40))
def test_counts_of_many_prefixes_are_those_of_one_at_a_time(
    weights: list[int], prefixes: list[int]
) -> None:
    tree = SplitTree(weights)
    several = np.array(prefixes * 20)  # plain integers for few, whole arrays for many
    assert tree.counts(several).tolist() == [counts(weights, p) for p in prefixes] * 20
