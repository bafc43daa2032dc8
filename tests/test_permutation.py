"""Keyed permutations: bijective, invertible, equal to the oracle, and random by every statistic."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import permutations
from statistics import fmean, pvariance

import numpy as np
import oracle
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zephon_torch.arithmetic import permutation

KEYS = st.integers(0, 2**64 - 1)
SIZES = [1, 2, 3, 31, 32, 33, 34, 100, 1023, 1024, 1025, 10_007, 65_536]
LIMIT = 5.0  # |z| of a statistic; keys are fixed, so it passes or fails for good


def uint64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def permute(x: np.ndarray, n: int, key: int) -> np.ndarray:
    return permutation.permute(x, np.array([n]), uint64(key))


def feistel(x: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """The network alone, whatever n is: one image per (x, key), which broadcast."""
    x, keys = np.broadcast_arrays(np.asarray(x, np.uint64), keys)
    images = permutation._feistel(x.copy(), uint64(n), permutation.mix(keys))
    return images.astype(np.int64)


def keys(count: int, seed: int = 0) -> np.ndarray:
    """As the package makes them: sub-keys of one key."""
    return permutation.subkeys(uint64(permutation.mix_int(seed)), np.arange(count))


# --- definitions ---------------------------------------------------------------------------------


@given(KEYS, st.lists(st.integers(0, 2**40), min_size=1, max_size=4))
def test_keys_equal_the_oracle(key: int, numbers: list[int]) -> None:
    assert permutation.mix_int(key) == oracle.mix(key)
    assert permutation.mix(uint64(key)).tolist() == [oracle.mix(key)]
    assert permutation.subkey(key, *numbers) == oracle.subkey(key, *numbers)
    assert permutation.subkeys(uint64(key), np.array(numbers)).tolist() == [
        oracle.subkey(key, number) for number in numbers
    ]


@given(st.lists(st.text(max_size=8), max_size=4))
@example(["ab", "c"])
@example(["datos-ñ", "数据"])
def test_text_keys_equal_the_oracle(parts: list[str]) -> None:
    assert permutation.text_key(*parts) == oracle.text_key(*parts)


def test_text_keys_do_not_run_together() -> None:
    assert permutation.text_key("ab", "c") != permutation.text_key("a", "bc")
    assert permutation.text_key("a") != permutation.text_key("a", "")


def test_nested_keys_are_not_added_up() -> None:
    seen = {permutation.subkey(7, i, j) for i in range(100) for j in range(100)}
    assert len(seen) == 10_000


def test_known_answers() -> None:
    # written down once: a change of both package and oracle would show here
    assert permutation.mix_int(1) == 0x3B184EB6B4801AC1
    assert permutation.subkey(0, 1, 2) == 0x97030CD6BDEF4264
    assert permutation.text_key("zephon", "1") == 0x632E0F972D038C2E
    assert permute(np.arange(10), 10, 1).tolist() == [2, 6, 0, 9, 1, 3, 7, 8, 5, 4]
    assert permute(np.arange(6), 1000, 1).tolist() == [503, 170, 419, 282, 949, 735]
    assert permute(np.arange(2), 10**12, 1).tolist() == [978032838264, 699986914362]
    assert permutation.hash_order(uint64(1), np.array([10])).tolist() == [
        [2, 4, 0, 5, 9, 8, 1, 6, 7, 3]
    ]


@settings(max_examples=150)
@given(st.integers(1, 4000), KEYS, st.data())
def test_permute_equals_the_oracle(n: int, key: int, data: st.DataObject) -> None:
    xs = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=8))
    assert permute(np.array(xs), n, key).tolist() == [oracle.permute(x, n, key) for x in xs]


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 34])
def test_permute_equals_the_oracle_where_the_method_changes(n: int) -> None:
    for key in range(5):
        assert permute(np.arange(n), n, key).tolist() == [
            oracle.permute(x, n, key) for x in range(n)
        ]


@settings(max_examples=150)
@given(st.integers(2, 2**62), KEYS, st.data())
def test_feistel_equals_the_oracle(n: int, key: int, data: st.DataObject) -> None:
    xs = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=8))
    expected = [oracle.feistel(x, n, key) for x in xs]
    assert feistel(np.array(xs), n, uint64(key)).tolist() == expected


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 2**30), KEYS), max_size=40))
def test_each_element_may_have_its_own_size_and_key(rows: list[tuple[int, int, int]]) -> None:
    xs = [x % n for n, x, _ in rows]
    sizes = np.array([n for n, _, _ in rows], np.int64)
    row_keys = np.array([key for _, _, key in rows], np.uint64)
    images = permutation.permute(np.array(xs, np.int64), sizes, row_keys)
    assert images.dtype == np.int64
    assert images.tolist() == [
        oracle.permute(x, n, key) for x, (n, _, key) in zip(xs, rows, strict=True)
    ]
    assert permutation.unpermute(images, sizes, row_keys).tolist() == xs


@settings(max_examples=50)
@given(st.integers(1, 200), st.lists(KEYS, min_size=1, max_size=3))
def test_hash_order_equals_the_oracle(n: int, row_keys: list[int]) -> None:
    rows = permutation.hash_order(uint64(*row_keys), np.array([n]))
    assert rows.tolist() == [oracle.hash_order(key, n) for key in row_keys]
    assert (np.sort(rows, axis=1) == np.arange(n)).all()


# --- bijection and inverse -----------------------------------------------------------------------


@pytest.mark.parametrize("n", [*range(1, 70), *SIZES[7:], 1_000_003])
def test_every_value_appears_once_and_leads_back(n: int) -> None:
    for key in (0, 1, 2**64 - 1, 0x123456789ABCDEF):
        images = permute(np.arange(n), n, key)
        assert np.array_equal(np.sort(images), np.arange(n))
        assert np.array_equal(
            permutation.unpermute(images, np.array([n]), uint64(key)), np.arange(n)
        )


@settings(max_examples=100)
@given(st.integers(33, permutation.MAX_N), KEYS, st.data())
def test_inverse_at_any_size(n: int, key: int, data: st.DataObject) -> None:
    xs = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20)))
    images = permute(xs, n, key)
    assert ((0 <= images) & (images < n)).all()
    assert np.array_equal(permutation.unpermute(images, np.array([n]), uint64(key)), xs)
    assert len(set(images.tolist())) == len(set(xs.tolist()))


def test_arguments_are_left_as_they_were() -> None:
    for n in (20, 1000):
        x, sizes, key = np.arange(n), np.array([n]), uint64(5)
        permutation.unpermute(permutation.permute(x, sizes, key), sizes, key)
        assert np.array_equal(x, np.arange(n)) and sizes == n and key == 5


def test_nothing_in_nothing_out() -> None:
    empty = np.zeros(0, np.int64)
    assert permutation.permute(empty, np.array([10]), uint64(1)).tolist() == []
    assert permutation.unpermute(empty, np.array([10]), uint64(1)).tolist() == []


# --- statistics ----------------------------------------------------------------------------------


def chi_square_z(counts: np.ndarray, expected: float, degrees: int) -> float:
    """How many standard deviations a chi-square statistic lies from its mean."""
    chi_square = float(((counts - expected) ** 2).sum() / expected)
    return (chi_square - degrees) / math.sqrt(2 * degrees)


def all_orders_z(images: np.ndarray, n: int) -> float:
    """Are all n! orders equally likely? images: [num_keys, n]."""
    codes = {code: i for i, code in enumerate(permutations(range(n)))}
    packed = (images * n ** np.arange(n)).sum(axis=1)
    index = {sum(v * n**i for i, v in enumerate(code)): i for code, i in codes.items()}
    values, counts = np.unique(packed, return_counts=True)
    table = np.zeros(len(codes))
    table[[index[value] for value in values.tolist()]] = counts
    return chi_square_z(table, len(images) / len(codes), len(codes) - 1)


def orders(n: int, count: int, image: Callable[..., np.ndarray]) -> np.ndarray:
    x = np.tile(np.arange(n), count)
    return image(x, n, np.repeat(keys(count), n)).reshape(count, n)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_small_orders_are_all_equally_likely(n: int) -> None:
    def ranked(x: np.ndarray, n: int, k: np.ndarray) -> np.ndarray:
        return permutation.permute(x, np.array([n]), k)

    assert abs(all_orders_z(orders(n, 120_000, ranked), n)) < LIMIT


@pytest.mark.parametrize("n", [5, 6])
def test_the_test_of_small_orders_tells_a_feistel_from_them(n: int) -> None:
    assert all_orders_z(orders(n, 120_000, feistel), n) > LIMIT


def worst_pair_z(n: int, count: int) -> float:
    """Is the joint law of two images uniform over ordered pairs, for inputs that share halves?"""
    b = -(-n // (math.isqrt(n - 1) + 1))
    k = keys(count)
    worst = 0.0
    for x, y in [(0, 1), (0, b), (1, b), (0, b + 1), (n - 1, n - 2), (0, n // 2)]:
        first, second = feistel(np.array([x]), n, k), feistel(np.array([y]), n, k)
        assert (first != second).all()
        cells = np.bincount(first * n + second, minlength=n * n)
        off_diagonal = cells[np.arange(n * n) % (n + 1) != 0]
        z = chi_square_z(off_diagonal, count / len(off_diagonal), len(off_diagonal) - 1)
        worst = max(worst, abs(z))
    return worst


@pytest.mark.parametrize("n", [33, 100])
def test_pairs_of_images_are_uniform(n: int) -> None:
    assert worst_pair_z(n, 500_000) < LIMIT


@pytest.mark.parametrize(("n", "rounds"), [(33, 4), (100, 4), (33, 6)])
def test_the_test_of_pairs_tells_fewer_rounds(
    n: int, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(permutation, "ROUNDS", rounds)
    assert worst_pair_z(n, 500_000) > 2 * LIMIT


def test_rounds_are_counted_as_in_the_oracle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "ROUNDS", 4)
    expected = [oracle.feistel(x, 1000, 9, rounds=4) for x in range(50)]
    assert feistel(np.arange(50), 1000, uint64(9)).tolist() == expected


def lags(n: int) -> list[int]:
    b = -(-n // (math.isqrt(n - 1) + 1))
    return [1, 2, 3, b - 1, b, b + 1, 2 * b, 1024, n // 2]


def statistics_of(order: np.ndarray) -> dict[str, float]:
    """Statistics of one permutation, each with mean 0 and variance 1 (nearly) if it is random."""
    n = len(order)
    place = np.arange(n)
    centred = (order - (n - 1) / 2) / math.sqrt((n * n - 1) / 12)
    result = {
        "fixed points": float((order == place).sum()) - 1,
        "reversed points": float((order == n - 1 - place).sum()) - 1,
        "adjacent up": float((np.diff(order) == 1).sum()) - (n - 1) / n,
        "adjacent down": float((np.diff(order) == -1).sum()) - (n - 1) / n,
        "ascents": (float((np.diff(order) > 0).sum()) - (n - 1) / 2) / math.sqrt((n + 1) / 12),
        "trend": float((centred * (place - (n - 1) / 2)).sum() / math.sqrt((n**3 - n) / 12)),
    }
    for lag in lags(n):
        m = n - lag
        serial = float((centred[lag:] * centred[:-lag]).sum())
        result[f"serial correlation at lag {lag}"] = (serial + m / (n - 1)) / math.sqrt(m)
        # pairs of equal differences
        counts = np.bincount((order[lag:] - order[:-lag]) % n)
        pairs = float((counts * (counts - 1) / 2).sum())
        mean = m * (m - 1) / 2 / (n - 1)
        result[f"repeats at lag {lag}"] = (pairs - mean) / math.sqrt(mean)
    b = -(-n // (math.isqrt(n - 1) + 1))
    for name, row, column, size in [
        ("position x value cells", place * 16 // n, order * 16 // n, 16),
        ("residues modulo 16", place % 16, order % 16, 16),
        ("columns", place % b * 16 // b, order % b * 16 // b, 16),
        ("rows x columns", place // b * 16 * b // n, order % b * 16 // b, 16),
    ]:
        cells = np.bincount(np.minimum(row, 15) * 16 + column, minlength=256).reshape(16, 16)
        expected = np.outer(cells.sum(axis=1), cells.sum(axis=0)) / n
        chi_square = float(((cells - expected) ** 2 / expected).sum())
        degrees = (size - 1) ** 2
        result[name] = (chi_square - degrees) / math.sqrt(2 * degrees)
    return result


def whole_permutation_z(n: int, count: int) -> dict[str, float]:
    """Mean and mean square of each statistic over `count` keys, in standard errors."""
    rows = [statistics_of(feistel(np.arange(n), n, keys(count)[i : i + 1])) for i in range(count)]
    result = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        result[name] = fmean(values) * math.sqrt(count)
        # sum of squares is chi-square; its cube root is nearly normal (Wilson and Hilferty)
        root = fmean(v * v for v in values) ** (1 / 3)
        result[name + ", spread"] = (root - 1 + 2 / (9 * count)) / math.sqrt(2 / (9 * count))
    return result


CASES = [(10_000, 100), (1_000_000, 5)]


@pytest.mark.parametrize(("n", "count"), CASES)
def test_whole_permutations_are_random_by_every_statistic(n: int, count: int) -> None:
    z = whole_permutation_z(n, count)
    assert {name: value for name, value in z.items() if abs(value) >= LIMIT} == {}


@pytest.mark.parametrize(("n", "count"), CASES)
def test_the_statistics_tell_four_rounds(
    n: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(permutation, "ROUNDS", 4)
    assert max(map(abs, whole_permutation_z(n, count).values())) > 1.5 * LIMIT


@pytest.mark.parametrize("n", [10_000])
def test_the_statistics_are_scaled_as_claimed(n: int) -> None:
    # numpy's own shuffle as the reference: mean 0, variance 1
    generator = np.random.Generator(np.random.PCG64(1))
    rows = [statistics_of(generator.permutation(n)) for _ in range(100)]
    for name in rows[0]:
        values = [row[name] for row in rows]
        assert abs(fmean(values)) * 10 < LIMIT, name
        assert 0.4 < pvariance(values) < 2.5, name


def test_number_of_cycles() -> None:
    n, count = 10_000, 30
    total = 0
    for key in keys(count, seed=3):
        order = feistel(np.arange(n), n, key[None]).tolist()
        while_unseen = [True] * n
        for start in range(n):
            total += while_unseen[start]
            at = start
            while while_unseen[at]:
                while_unseen[at] = False
                at = order[at]
    mean = sum(1 / i for i in range(1, n + 1))
    variance = sum(1 / i - 1 / i**2 for i in range(1, n + 1))
    assert abs(total - count * mean) / math.sqrt(count * variance) < LIMIT


def test_both_parities_appear() -> None:
    # a Feistel network over a power of two with xor can only make even permutations
    odd = 0
    for key in keys(400):
        order = feistel(np.arange(64), 64, key[None]).tolist()
        inversions = sum(order[i] > order[j] for i in range(64) for j in range(i + 1, 64))
        odd += inversions % 2
    assert abs(odd - 200) / 10 < LIMIT


@settings(max_examples=100)
@given(
    st.lists(st.tuples(st.integers(1, 60), KEYS, st.integers(1, 5)), min_size=1, max_size=6),
    st.integers(0, 10**6),
)
def test_runs_are_mapped_as_their_elements_are(runs: list[tuple[int, int, int]], x: int) -> None:
    sizes, keys = np.array([n for n, _, _ in runs]), [k for _, k, _ in runs]
    lengths = np.array([length for _, _, length in runs])
    wide_n, wide_keys = np.repeat(sizes, lengths), np.repeat(uint64(*keys), lengths)
    xs = (x + np.arange(len(wide_n))) % wide_n
    for mapping in (permutation.permute, permutation.unpermute):
        expected = mapping(xs, wide_n, wide_keys).tolist()
        assert mapping(xs, sizes, uint64(*keys), lengths).tolist() == expected


def test_orders_of_different_sizes_are_those_of_each_alone() -> None:
    sizes, keys = np.array([9, 16, 12]), uint64(5, 6, 7)
    rows = permutation.hash_order(keys, sizes)
    for row, n, key in zip(rows, sizes.tolist(), keys.tolist(), strict=True):
        assert row[:n].tolist() == oracle.hash_order(key, n)
