"""Order inside a piece: exact quotas, spread evenly, the same however it is computed."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon_torch.arithmetic.apportion import SplitTree
from zephon_torch.io import Dataset
from zephon_torch.work import StaticMixtureWorkSource
from zephon_torch.work.order import interleave
from zephon_torch.work.order.interleave import (
    Pieces,
    balanced_at,
    balanced_offset,
    shuffled_labels,
)

KEYS = st.integers(0, 2**64 - 1)


@st.composite
def piece_lists(draw: st.DrawFn) -> Pieces:
    """A few stretches of one tree, with any chunk numbers."""
    weights = draw(st.lists(st.integers(1, 40), min_size=1, max_size=8))
    tree = SplitTree(weights)
    num = draw(st.integers(1, 3))
    starts = draw(st.lists(st.integers(0, 2**55), min_size=num, max_size=num))
    sizes = draw(st.lists(st.integers(1, 100), min_size=num, max_size=num))
    chunks = draw(st.lists(st.integers(0, 2**40), min_size=num, max_size=num))
    quotas = tree.counts(np.array(starts) + sizes) - tree.counts(np.array(starts))
    return Pieces(tree, np.array(chunks), np.array(starts), quotas)


def weights_of(pieces: Pieces) -> list[int]:
    return pieces.tree.weight[: pieces.quotas.shape[1]].tolist()


def ranks_of(labels: list[int]) -> list[int]:
    """Samples of one dataset keep their order: how many of the same label came before."""
    return [labels[:offset].count(label) for offset, label in enumerate(labels)]


def labels_at(
    pieces: Pieces, key: int, row: np.ndarray, offset: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Leaf and rank of each element, after checking that they came leaf by leaf."""
    place, leaf, rank = balanced_at(pieces, key, row, offset)
    assert sorted(place.tolist()) == list(range(len(offset)))
    runs = np.flatnonzero(np.diff(leaf, prepend=-1))
    assert len(runs) == len(set(leaf.tolist()))
    back = np.argsort(place)
    return leaf[back], rank[back]


def balanced_labels(pieces: Pieces, key: int, row: int) -> tuple[np.ndarray, np.ndarray]:
    size = int(pieces.quotas[row].sum())
    return labels_at(pieces, key, np.full(size, row), np.arange(size))


@settings(max_examples=120)
@given(piece_lists(), KEYS)
def test_balanced_order_equals_the_oracle(pieces: Pieces, key: int) -> None:
    for row in range(len(pieces.chunk)):
        expected = oracle.balanced(
            weights_of(pieces), pieces.quotas[row].tolist(), int(pieces.chunk[row]), key
        )
        labels, ranks = balanced_labels(pieces, key, row)
        assert labels.tolist() == expected
        assert ranks.tolist() == ranks_of(expected)


@settings(max_examples=120)
@given(piece_lists(), KEYS)
def test_shuffled_order_equals_the_oracle(pieces: Pieces, key: int) -> None:
    for row in range(len(pieces.chunk)):
        expected = oracle.shuffled(pieces.quotas[row].tolist(), int(pieces.start[row]), key)
        labels, ranks = shuffled_labels(pieces, key, row)
        assert labels.tolist() == expected
        assert ranks.tolist() == ranks_of(expected)


@settings(max_examples=120)
@given(piece_lists(), KEYS)
def test_few_leaves_many_leaves_and_the_inverse_agree(pieces: Pieces, key: int) -> None:
    sizes = pieces.quotas.sum(axis=1)
    # backwards, so that no order of the questions is assumed
    rows = np.repeat(np.arange(len(sizes)), sizes)[::-1].copy()
    offsets = np.concatenate([np.arange(size) for size in sizes])[::-1].copy()
    leaves, ranks = labels_at(pieces, key, rows, offsets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interleave, "_MANY_LEAVES", 0)
        again = labels_at(pieces, key, rows, offsets)
    assert np.array_equal(leaves, again[0]) and np.array_equal(ranks, again[1])
    for leaf in range(pieces.quotas.shape[1]):
        at = np.flatnonzero(leaves == leaf)
        found = balanced_offset(pieces, key, rows[at], leaf, ranks[at])
        assert np.array_equal(found, offsets[at])


@settings(max_examples=60)
@given(piece_lists(), KEYS, st.sampled_from([balanced_labels, shuffled_labels]))
def test_quotas_are_met_exactly(pieces: Pieces, key: int, labels_of) -> None:
    for row, quotas in enumerate(pieces.quotas):
        labels, _ = labels_of(pieces, key, row)
        assert np.array_equal(np.bincount(labels, minlength=len(quotas)), quotas)


def test_large_pieces_agree_with_the_oracle() -> None:
    weights = [1000, 700, 411, 90, 33, 7, 1]
    tree = SplitTree(weights)
    quotas = tree.counts(np.array([5 * 16384, 6 * 16384]))
    pieces = Pieces(tree, np.array([5]), np.array([5 * 16384]), np.diff(quotas, axis=0))
    labels, ranks = balanced_labels(pieces, 99, 0)
    expected = oracle.balanced(weights, pieces.quotas[0].tolist(), 5, 99)
    assert labels.tolist() == expected
    leaves, places = labels_at(pieces, 99, np.zeros(16384, np.int64), np.arange(16384))
    assert np.array_equal(leaves, labels) and np.array_equal(places, ranks)


def stretch(weights: list[int], chunk: int, size: int) -> Pieces:
    tree = SplitTree(weights)
    quotas = np.diff(tree.counts(np.array([chunk * size, (chunk + 1) * size])), axis=0)
    return Pieces(tree, np.array([chunk]), np.array([chunk * size]), quotas)


@pytest.mark.parametrize("chunk", [0, 3, 10**12])
@pytest.mark.parametrize("shape", ["powers", "fibonacci", "nearly all"])
def test_deep_trees_and_extreme_rates_equal_the_oracle(chunk: int, shape: str) -> None:
    weights = {
        "powers": [1, *(2**i for i in range(40))],
        # deeper than there are different steps of the phases
        "fibonacci": [1, 1],
        "nearly all": [1, 2**46 - 3, 2],
    }[shape]
    while shape == "fibonacci" and sum(weights) + weights[-1] + weights[-2] <= 2**46:
        weights.append(weights[-1] + weights[-2])
    pieces = stretch(weights, chunk, 300)
    expected = oracle.balanced(weights, pieces.quotas[0].tolist(), chunk, 1)
    labels, _ = balanced_labels(pieces, 1, 0)
    assert labels.tolist() == expected
    leaves, _ = labels_at(pieces, 1, np.zeros(300, np.int64), np.arange(300))
    assert leaves.tolist() == expected


def test_a_single_dataset_stands_everywhere() -> None:
    pieces = Pieces(SplitTree([5]), np.array([2]), np.array([40]), np.array([[20]]))
    for labels_of in (balanced_labels, shuffled_labels):
        labels, ranks = labels_of(pieces, 7, 0)
        assert labels.tolist() == [0] * 20 and ranks.tolist() == list(range(20))


# --- lanes in lockstep ---------------------------------------------------------------------------

LANES, CHUNK, GLOBAL_BATCH = 512, 16384, 1024
FIVE = {"a": 50, "b": 30, "c": 15, "d": 4, "e": 1}
TWENTY = {f"{i:02}": 10.0 ** (-4 * i / 19) for i in range(20)}
OBSERVED = {  # worst |count - w_i G| in the first 256 global batches
    ("five", "balanced"): 7.2,
    ("five", "shuffle"): 64.2,
    ("twenty", "balanced"): 16.1,
    ("twenty", "shuffle"): 57.7,
}


def batch_errors(weights: dict[str, float], interleave: str) -> np.ndarray:
    """count - w_i G for each global batch of a round: two from the same offsets of 512 chunks."""
    source = StaticMixtureWorkSource(
        [Dataset.from_samples(name, range(100)) for name in weights],
        weights,
        exhausted_policy="repeat",
        interleave=interleave,
    )
    at_offset = np.zeros((CHUNK, len(weights)), np.int64)
    for k in range(LANES):
        at_offset[np.arange(CHUNK), source.chunk(k).pointers.dataset] += 1
    counts = at_offset.reshape(CHUNK * LANES // GLOBAL_BATCH, -1, len(weights)).sum(axis=1)
    wanted = np.array([weights[name] for name in sorted(weights)])
    return counts - wanted / wanted.sum() * GLOBAL_BATCH


@pytest.fixture(scope="module", params=["five", "twenty"])
def lockstep(request: pytest.FixtureRequest) -> tuple[str, np.ndarray, np.ndarray]:
    weights = {"five": FIVE, "twenty": TWENTY}[request.param]
    return (
        request.param,
        np.abs(batch_errors(weights, "balanced")),
        np.abs(batch_errors(weights, "shuffle")),
    )


def test_lanes_in_lockstep_stay_near_the_mixture(
    lockstep: tuple[str, np.ndarray, np.ndarray],
) -> None:
    name, balanced, shuffled = lockstep[0], lockstep[1][:256].max(), lockstep[2][:256].max()
    assert balanced <= 24
    assert balanced <= shuffled / 2
    assert balanced == pytest.approx(OBSERVED[name, "balanced"], abs=0.05)
    assert shuffled == pytest.approx(OBSERVED[name, "shuffle"], abs=0.05)


def test_lanes_in_lockstep_stay_near_the_mixture_all_through_a_round(
    lockstep: tuple[str, np.ndarray, np.ndarray],
) -> None:
    _, balanced, shuffled = lockstep
    # in the last sixteenth of the chunks one item a node is moved, to meet their quotas
    until_then = balanced[: len(balanced) * 15 // 16]
    assert until_then.max() <= 24
    assert until_then.max() <= shuffled.max() / 2
    assert balanced.max() <= 26
    assert (balanced > 24).any(axis=1).mean() <= 0.001
    assert np.sqrt((balanced**2).mean(axis=0)).max() <= 6


def test_a_round_in_lockstep_is_steadier_than_shuffled_labels(
    lockstep: tuple[str, np.ndarray, np.ndarray],
) -> None:
    _, balanced, shuffled = lockstep
    assert balanced.max(axis=1).mean() <= 0.7 * shuffled.max(axis=1).mean()
    assert (balanced > 24).any(axis=1).mean() <= 0.1 * (shuffled > 24).any(axis=1).mean()
