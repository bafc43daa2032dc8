"""The plan as a whole: every pointer equals the oracle's, from any side, in any order."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_stopping import rules

from zephon_torch.arithmetic import apportion
from zephon_torch.errors import ConfigurationError
from zephon_torch.io import Dataset
from zephon_torch.work import StaticMixtureWorkSource
from zephon_torch.work.order import composition, interleave, shard_tables
from zephon_torch.work.order import sample_order as order
from zephon_torch.work.plan.describe import summarize
from zephon_torch.work.plan.plan import Plan, Pointers

LIMIT = 400


@dataclass
class Setup:
    """One random plan, for both sides."""

    shard_sizes: dict[str, list[int]]
    weights: dict[str, float]
    seed: int = 0
    chunk_size: int = 16
    levels: tuple[bool, bool, Any] = (True, False, None)
    interleave: str = "balanced"
    rules: dict[str, Any] = field(default_factory=dict)
    reshuffle: bool | dict[str, bool] = True

    def source(self, names: tuple[str, ...] | None = None) -> StaticMixtureWorkSource:
        return StaticMixtureWorkSource(
            [
                Dataset.from_samples(
                    name, range(sum(self.shard_sizes[name])), shard_sizes=self.shard_sizes[name]
                )
                for name in names or self.shard_sizes
            ],
            self.weights,
            seed=self.seed,
            chunk_size=self.chunk_size,
            shuffle_shards=self.levels[0],
            shuffle_within_shard=self.levels[1],
            shuffle_block_size=self.levels[2],
            interleave=self.interleave,  # type: ignore[arg-type]
            reshuffle_on_repeat=self.reshuffle,
            **self.rules,
        )

    def oracle(self) -> oracle.OraclePlan:
        # whole chunks, so that the last one of an endless plan is not cut short
        return oracle.OraclePlan(
            self.shard_sizes,
            self.weights,
            seed=self.seed,
            chunk_size=self.chunk_size,
            levels=oracle.Levels(*self.levels),
            options=oracle.Options(**self.rules, reshuffle_on_repeat=self.reshuffle),
            interleave=self.interleave,
            limit=LIMIT // self.chunk_size * self.chunk_size,
        )


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    names = draw(st.permutations("abcdef").map(lambda p: p[: draw(st.integers(1, 5))]))
    sizes = {name: draw(st.lists(st.integers(0, 9), min_size=1, max_size=6)) for name in names}
    sizes[names[0]][0] += 1
    weights: dict[str, float] = {
        name: draw(st.sampled_from([0, 0.1, 0.25, 0.7, 1, 2, 3, 7, 0.03])) for name in names
    }
    weights[names[0]] = weights[names[0]] or 1
    reshuffle = draw(
        st.one_of(st.booleans(), st.dictionaries(st.sampled_from(names), st.booleans()))
    )
    return Setup(
        sizes,
        weights,
        seed=draw(st.integers(-3, 2**65)),
        chunk_size=draw(st.integers(1, 60)),
        levels=(
            draw(st.booleans()),
            draw(st.booleans()),
            draw(st.sampled_from([None, 1, 4, 13, "auto", "global"])),
        ),
        interleave=draw(st.sampled_from(["balanced", "shuffle"])),
        rules=draw(rules(names)),
        reshuffle=reshuffle,
    )


def told(plan: Plan, pointers: Pointers) -> list[oracle.Pointer]:
    """In the oracle's terms: dataset name, shard, sample, pass."""
    return [
        (plan.datasets[dataset].name, shard, sample, number)
        for dataset, shard, sample, number in zip(
            *(array.tolist() for array in pointers.arrays()), strict=True
        )
    ]


@settings(max_examples=150)
@given(setups(), st.integers(0, 5))
def test_every_pointer_equals_the_oracle(setup: Setup, epoch: int) -> None:
    source, expected = setup.source(), setup.oracle()
    pointers = expected.pointers(epoch)
    if expected.length is None:
        assert source.total_samples >= len(pointers)
    else:
        assert source.total_samples == expected.length == len(pointers)
        assert source.num_chunks == -(-expected.length // setup.chunk_size)
    assert told(source.plan, source.plan.pointers(np.arange(len(pointers)), epoch)) == pointers
    chunks = -(-len(pointers) // setup.chunk_size)
    for k in reversed(range(chunks)):
        start, stop = k * setup.chunk_size, (k + 1) * setup.chunk_size
        chunk = source.chunk(k, epoch)
        assert (chunk.index, chunk.epoch, chunk.start) == (k, epoch, start)
        assert told(source.plan, chunk.pointers) == pointers[start:stop]
        assert chunk.stop - chunk.start == len(chunk) == len(pointers[start:stop])
        names = [name for name, *_ in pointers[start:stop]]
        assert {n: c for n, c in chunk.counts.items() if c} == {n: names.count(n) for n in names}


@settings(max_examples=70)
@given(setups(), st.integers(0, 3), st.data())
def test_any_positions_in_any_order_from_a_fresh_plan(
    setup: Setup, epoch: int, data: st.DataObject
) -> None:
    pointers = setup.oracle().pointers(epoch)
    plan = setup.source().plan
    # several questions to one plan, so that what it keeps from earlier ones must not show
    for _ in range(3):
        asked = data.draw(st.lists(st.integers(0, len(pointers) - 1), max_size=10))
        assert told(plan, plan.pointers(asked, epoch)) == [pointers[p] for p in asked]
        other = setup.oracle().pointers(epoch + 1)
        assert told(plan, plan.pointers(asked[:2], epoch + 1)) == [other[p] for p in asked[:2]]


@settings(max_examples=40)
@given(setups(), st.data())
def test_what_is_kept_and_computed_at_once_does_not_show(setup: Setup, data: st.DataObject) -> None:
    expected = [setup.oracle().pointers(epoch) for epoch in range(2)]
    length = len(expected[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order, "_TABLE_CELLS", 1)
        patch.setattr(composition, "_CELLS_AT_ONCE", data.draw(st.sampled_from([1, 12])))
        patch.setattr(composition, "_LABELS_KEPT", data.draw(st.sampled_from([1, 100])))
        patch.setattr(shard_tables, "_CELLS_AT_ONCE", data.draw(st.sampled_from([1, 12])))
        patch.setattr(interleave, "_MANY_LEAVES", data.draw(st.sampled_from([1, 2, 128])))
        patch.setattr(interleave, "_FEW_STRETCHES", data.draw(st.sampled_from([0, 2, 10**6])))
        patch.setattr(apportion, "_FEW", data.draw(st.sampled_from([0, 200])))
        plan = setup.source().plan
        for epoch in (0, 1, 0):
            asked = data.draw(st.permutations(range(length)))
            found = told(plan, plan.pointers(asked, epoch))
            assert found == [expected[epoch][p] for p in asked]
        name, shard, sample, _ = expected[1][-1]
        assert plan.positions(name, shard, sample, 1, stop=length).tolist() == [
            p for p, at in enumerate(expected[1]) if at[:3] == (name, shard, sample)
        ]


@settings(max_examples=70)
@given(setups(), st.integers(0, 3), st.data())
def test_a_sample_stands_exactly_where_the_oracle_has_it(
    setup: Setup, epoch: int, data: st.DataObject
) -> None:
    pointers = setup.oracle().pointers(epoch)
    plan = setup.source().plan
    name = data.draw(st.sampled_from(sorted(setup.shard_sizes)))
    places = [(s, i) for s, size in enumerate(setup.shard_sizes[name]) for i in range(size)]
    if not places:
        return
    shard, sample = data.draw(st.sampled_from(places))
    stop = data.draw(st.integers(0, len(pointers)))
    wanted = [p for p, at in enumerate(pointers) if at[:3] == (name, shard, sample)]
    found = plan.positions(name, shard, sample, epoch, stop=stop)
    assert found.dtype == np.int64
    assert found.tolist() == [p for p in wanted if p < stop]
    if setup.oracle().length is not None:
        assert plan.positions(name, shard, sample, epoch).tolist() == wanted


@pytest.mark.parametrize("policy", ["redistribute", "stop", "repeat"])
@pytest.mark.parametrize("interleave", ["balanced", "shuffle"])
@pytest.mark.parametrize("chunk_size", [5, 16, 100])
def test_every_sample_is_found_at_all_its_places(
    policy: str, interleave: str, chunk_size: int
) -> None:
    setup = Setup(
        {"a": [3, 2], "b": [1], "c": [4, 0, 4], "d": [9]},
        {"a": 3, "b": 1, "c": 0.5, "d": 2},
        chunk_size=chunk_size,
        interleave=interleave,
        rules={"exhausted_policy": policy, "max_samples": 60},
    )
    plan = setup.source().plan
    for epoch in (0, 2):
        pointers = setup.oracle().pointers(epoch)
        places: dict[tuple[str, int, int], list[int]] = {}
        for position, (name, shard, sample, _) in enumerate(pointers):
            places.setdefault((name, shard, sample), []).append(position)
        for at, expected in places.items():
            assert plan.positions(*at, epoch).tolist() == expected
            for i, place in enumerate(expected):
                assert plan.positions(*at, epoch, stop=place).tolist() == expected[:i]
                assert plan.positions(*at, epoch, stop=place + 1).tolist() == expected[: i + 1]


@settings(max_examples=40)
@given(setups(), st.randoms(use_true_random=False))
def test_the_order_of_the_list_has_no_effect(setup: Setup, random: Any) -> None:
    names = list(setup.shard_sizes)
    random.shuffle(names)
    one, other = setup.source(), setup.source(tuple(names))
    other_weights = {name: setup.weights[name] for name in names}
    other = Setup(**{**vars(setup), "weights": other_weights}).source(tuple(names))
    assert one.fingerprint == other.fingerprint
    asked = np.arange(min(one.total_samples, 100))
    assert told(one.plan, one.pointers(asked)) == told(other.plan, other.pointers(asked))


@settings(max_examples=40)
@given(setups(), st.integers(0, 3))
def test_counts_at_chunk_ends_and_at_the_end(setup: Setup, epoch: int) -> None:
    pointers = setup.oracle().pointers(epoch)
    plan = setup.source().plan
    for position in (*range(0, len(pointers), setup.chunk_size), len(pointers)):
        names = [name for name, *_ in pointers[:position]]
        assert plan.counts(position) == {
            dataset.name: names.count(dataset.name) for dataset in plan.datasets
        }


@settings(max_examples=60)
@given(setups())
def test_unseen_and_never_seen_samples_are_counted(setup: Setup) -> None:
    expected = setup.oracle()
    summaries = {summary.name: summary for summary in summarize(setup.source().plan)}
    assert sorted(summaries) == sorted(setup.shard_sizes)
    if expected.length is None:
        return
    for name, summary in summaries.items():
        size = sum(setup.shard_sizes[name])
        assert summary.num_samples == size
        if not setup.weights[name]:
            continue
        drawn = [p for p in expected.pointers(0) if p[0] == name]
        assert summary.drawn == len(drawn)
        assert summary.unseen == size - len({at[1:3] for at in drawn})
        if not size:
            continue
        # many epochs: what is left over is never seen
        seen: set[tuple[int, int]] = set()
        orders = set()
        for epoch in range(25):
            drawn_order = tuple(at[1:3] for at in expected.pointers(epoch) if at[0] == name)
            orders.add(drawn_order)
            seen.update(drawn_order)
            if len(seen) == size:
                break
        if summary.never_seen or len(orders) == 1:
            assert summary.never_seen == size - len(seen)


def test_no_two_plans_share_a_cache() -> None:
    setup = Setup({"a": [5, 5], "b": [3]}, {"a": 2, "b": 1})
    one, other = setup.source(), Setup(**{**vars(setup), "seed": 9}).source()
    first = told(one.plan, one.pointers(np.arange(13)))
    other.pointers(np.arange(13))
    assert told(one.plan, one.pointers(np.arange(13))) == first
    assert told(other.plan, other.pointers(np.arange(13))) != first


def test_a_plan_survives_a_pickle() -> None:
    setup = Setup({"a": [5, 5], "b": [3]}, {"a": 2, "b": 1}, rules={"exhausted_policy": "repeat"})
    source = setup.source()
    expected = told(source.plan, source.pointers(np.arange(100), 2))
    copy = pickle.loads(pickle.dumps(source.plan))
    assert told(copy, copy.pointers(np.arange(100), 2)) == expected
    assert copy.fingerprint == source.fingerprint


@pytest.mark.parametrize("names", list(permutations("abc")))
def test_a_small_plan_written_out(names: tuple[str, ...]) -> None:
    setup = Setup(
        {"a": [2, 1], "b": [2], "c": [1]}, {"a": 3, "b": 2, "c": 1}, levels=(False, False, None)
    )
    source = setup.source(names)
    assert told(source.plan, source.pointers(np.arange(6))) == setup.oracle().pointers(0)
    assert source.total_samples == 6


# --- far out -------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleave", ["balanced", "shuffle"])
@pytest.mark.parametrize("block", [None, "auto", "global"])
def test_a_chunk_far_out_is_made_of_the_parts(interleave: str, block: Any) -> None:
    # 1e13 positions in: counts from the tree's own inverse, order and pass from the oracle
    setup = Setup(
        {"a": [50, 30], "b": [7], "c": [40, 1, 40]},
        {"a": 0.5, "b": 0.3, "c": 0.2},
        chunk_size=100,
        levels=(True, True, block),
        interleave=interleave,
        rules={"exhausted_policy": "repeat"},
    )
    source = setup.source()
    k = 10**11 + 3
    labels = oracle.balanced([5, 3, 2], [50, 30, 20], k, oracle.text_key(*interleave_key()))
    if interleave == "shuffle":
        labels = oracle.shuffled([50, 30, 20], 100 * k, oracle.text_key(*interleave_key()))
    ranks = [k * 50, k * 30, k * 20]
    expected = []
    for label in labels:
        name = "abc"[label]
        sizes = setup.shard_sizes[name]
        number, offset = divmod(ranks[label], sum(sizes))
        order = oracle.one_pass(
            name, sizes, seed=0, levels=oracle.Levels(*setup.levels), epoch=4, pass_index=number
        )
        expected.append((name, *order[offset], number))
        ranks[label] += 1
    assert told(source.plan, source.chunk(k, 4).pointers) == expected


@pytest.mark.parametrize("interleave", ["balanced", "shuffle"])
@pytest.mark.parametrize("block", [None, 1000, "global"])
@pytest.mark.parametrize("policy", ["repeat", "redistribute"])
def test_every_pointer_of_a_huge_plan_leads_back(interleave: str, block: Any, policy: str) -> None:
    sizes = {"a": 10**12, "b": 3 * 10**11, "c": 5 * 10**11}
    datasets = [
        Dataset.from_samples(name, range(size), shard_sizes=[size // 100] * 100)
        for name, size in sizes.items()
    ]
    source = StaticMixtureWorkSource(
        datasets,
        {"a": 0.5, "b": 0.2, "c": 0.3},
        shuffle_block_size=block,
        interleave=interleave,  # type: ignore[arg-type]
        exhausted_policy=policy,  # type: ignore[arg-type]
    )
    asked = [0, 1, 10**6, 10**12 + 7, 15 * 10**11 + 1, 18 * 10**11 - 1]
    pointers = source.pointers(asked, 3)
    for position, (dataset, shard, sample) in zip(asked, pointers, strict=True):
        found = source.plan.positions(dataset, shard, sample, 3, stop=position + 1)
        assert position in found.tolist()
        assert len(found) == 1 if policy == "redistribute" else len(found) <= 3
        for at, place in zip(found, source.pointers(found, 3), strict=True):
            assert place == (dataset, shard, sample), at


def interleave_key() -> tuple[str, str]:
    return "zephon_torch/interleave/1", "0"


# --- questions that cannot be answered -----------------------------------------------------------


def test_questions_outside_the_plan_are_refused() -> None:
    source = Setup({"a": [4], "b": [4]}, {"a": 1, "b": 1}).source()
    plan = source.plan
    assert source.total_samples == 8
    for positions in ([8], [-1], [0, 100]):
        with pytest.raises(IndexError):
            plan.pointers(positions)
    with pytest.raises(IndexError):
        plan.pointers([0], -1)
    for k in (-1, 1):
        with pytest.raises(IndexError):
            source.chunk(k)
    for shard, sample in [(1, 0), (-1, 0), (0, 4), (0, -1)]:
        with pytest.raises(IndexError):
            plan.positions("a", shard, sample)
    with pytest.raises(ConfigurationError, match="'q'"):
        plan.positions("q", 0, 0)
    endless = Setup({"a": [4]}, {"a": 1}, rules={"exhausted_policy": "repeat"}).source()
    with pytest.raises(ConfigurationError, match="stop"):
        endless.plan.positions("a", 0, 0)
    assert endless.plan.positions("a", 0, 0, stop=13).tolist() == [0, 4, 8, 12]
    assert endless.total_samples == math.inf


def test_nothing_asked_nothing_answered() -> None:
    plan = Setup({"a": [4]}, {"a": 1}).source().plan
    assert len(plan.pointers([])) == 0
    assert plan.positions("a", 0, 0, stop=0).tolist() == []
