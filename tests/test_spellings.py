"""One order, one fingerprint: spellings without effect are one plan, all others are not.

Soundness comes first: two plans of one fingerprint must be the same in every epoch, on any number
of lanes, or a state would go on with samples of another order.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from zephon_torch import ChunkSplitter, DataLoader
from zephon_torch.errors import ConfigurationError
from zephon_torch.io import Dataset
from zephon_torch.work import StaticMixtureWorkSource
from zephon_torch.work.identity.progress import Progress
from zephon_torch.work.identity.spellings import is_same_plan, plainly

EPOCHS = 3
SEEN = 150  # first positions of a long plan that are looked at, beside its last ones

Datasets = dict[str, list[int]]


def source_of(
    datasets: Datasets, weights: dict[str, float], options: dict[str, Any]
) -> StaticMixtureWorkSource:
    made = [
        Dataset.from_samples(name, range(sum(sizes)), shard_sizes=sizes)
        for name, sizes in datasets.items()
    ]
    return StaticMixtureWorkSource(made, weights, **options)


def facts(source: StaticMixtureWorkSource, lanes: tuple[int, ...] = (1, 3)) -> list[Any]:
    """All that a run can see of a plan: order by name and pass, length, delivery, table."""
    total = min(source.total_samples, 1 << 50)
    positions = np.arange(min(total, SEEN))
    if total > SEEN and source.plan.length is not None:
        positions = np.concatenate([positions, np.arange(total - 20, total)])
    orders = []
    for epoch in range(EPOCHS):
        found = source.pointers(positions, epoch)
        names = [source.names[number] for number in found.dataset.tolist()]
        orders.append((names, *(array.tolist() for array in found.arrays()[1:])))
    dealt = []
    for number in lanes:
        splitter = ChunkSplitter(source, global_batch_size=5, lanes=number, rank=0, num_replicas=1)
        steps = range(min(int(total) // 5, 12))
        dealt.append([[*splitter.pointers(step, 1)] for step in steps])
    rows = [row for row in source.describe().split("\n") if not row.startswith("nothing")]
    return [source.total_samples, source.num_chunks, source.seed, orders, dealt, rows]


# --- spellings that are known to be one ----------------------------------------------------------

TWO: Datasets = {"a": [7, 5, 0, 8], "b": [6]}
SINGLE_SHARD: Datasets = {"a": [30]}
ONES: Datasets = {"a": [1, 1, 1], "b": [1]}

EQUAL: dict[str, tuple[Datasets, list[dict[str, Any]]]] = {
    "levels under a global shuffle": (
        TWO,
        [
            {"shuffle_block_size": "global", "shuffle_shards": s, "shuffle_within_shard": w}
            for s, w in itertools.product((True, False), repeat=2)
        ],
    ),
    "within beside blocks": (
        TWO,
        [{"shuffle_block_size": 4, "shuffle_within_shard": w} for w in (True, False)],
    ),
    "blocks beyond every dataset, and auto": (
        TWO,
        [{"shuffle_block_size": b} for b in ("auto", 20, 21, 10**9)],
    ),
    "auto and its number": (SINGLE_SHARD, [{"shuffle_block_size": b} for b in ("auto", 30, 99)]),
    "blocks of one sample": (
        TWO,
        [{}, {"shuffle_block_size": 1}, {"shuffle_block_size": 1, "shuffle_within_shard": True}],
    ),
    "shards where there is one": (
        SINGLE_SHARD,
        [
            {"shuffle_shards": s, "reshuffle_on_repeat": r}
            for s in (True, False)
            for r in (0 > 1, True)
        ],
    ),
    "within shards of one sample": (ONES, [{"shuffle_within_shard": w} for w in (True, False)]),
    "one pass": (
        TWO,
        [
            {},
            {"stop_after_passes": 1},
            {"stop_after_passes": 1, "exhausted_policy": "repeat"},
            {"stop_after_passes": 1, "exhausted_policy": {"a": "repeat"}},
            {"max_samples": 10**6},
            {"max_samples": 30, "exhausted_policy": "repeat"},
        ],
    ),
    "no repeats": (
        TWO,
        [
            {"exhausted_policy": "stop"},
            {"exhausted_policy": {"a": "stop", "b": "stop"}},
            {"max_repeats": 0},
            {"max_repeats": {"b": 0, "a": 0}},
            {"max_repeats": 0, "exhausted_policy": "repeat", "max_samples": 19},
            {"exhausted_policy": "repeat", "max_samples": 19},
        ],
    ),
    "a single dataset is used up": (
        SINGLE_SHARD,
        [
            {},
            {"exhausted_policy": "stop"},
            {"exhausted_policy": "redistribute"},
            {"max_repeats": 0},
            {"max_repeats": {"a": 0}},
            {"exhausted_policy": "redistribute", "max_samples": 31},
        ],
    ),
    "an end before anybody leaves": (
        TWO,
        [
            {"max_samples": 9},
            {"max_samples": 9, "exhausted_policy": "redistribute"},
            {"max_samples": 9, "exhausted_policy": "stop"},
            {"max_samples": 9, "max_repeats": 4},
            {"max_samples": 9, "stop_after_passes": 4},
        ],
    ),
    "never": (TWO, [{"exhausted_policy": p} for p in ("repeat", {"a": "repeat"}, {"b": "repeat"})]),
    "reshuffling by name": (
        TWO,
        [{"reshuffle_on_repeat": r} for r in (True, {}, {"a": True}, {"b": False})],
    ),
    "no reshuffling by name": (
        TWO,
        [{"reshuffle_on_repeat": r} for r in (False, {"a": False}, {"a": False, "b": True})],
    ),
    "one dataset has nobody to alternate with": (
        SINGLE_SHARD,
        [{"interleave": i} for i in ("balanced", "shuffle")],
    ),
    "chunks of one sample": (
        TWO,
        [{"interleave": i, "chunk_size": 1} for i in ("balanced", "shuffle")],
    ),
    "chunks that hold an epoch": (TWO, [{}, {"chunk_size": 30}, {"chunk_size": 1 << 30}]),
}


@pytest.mark.parametrize("case", EQUAL)
def test_spellings_of_one_order_are_one_plan(case: str) -> None:
    datasets, spellings = EQUAL[case]
    weights = {name: 2.0 - number for number, name in enumerate(datasets)}
    sources = [source_of(datasets, weights, options) for options in spellings]
    expected = facts(sources[0])
    for source in sources:
        assert facts(source) == expected, source.plan.options
        assert source.fingerprint == sources[0].fingerprint, source.plan.options


def test_weights_on_another_scale_and_datasets_of_no_weight_change_nothing() -> None:
    three = TWO | {"nothing": [3], "nothing at all": []}
    of_two = {"a": 0.3, "b": 0.7}
    sources = [
        source_of(TWO, of_two, {}),
        source_of(TWO, {"a": 30, "b": 70}, {}),
        source_of(three, of_two | {"nothing": 0, "nothing at all": 5}, {}),
        source_of(three, of_two | {"nothing": 0, "nothing at all": 0},
                  {"reshuffle_on_repeat": {"nothing": False}}),
    ]  # fmt: skip
    assert len({source.fingerprint for source in sources}) == 1
    assert facts(sources[0])[3] == facts(sources[2])[3] == facts(sources[3])[3]


def test_what_the_loader_makes_of_shuffle_is_the_global_shuffle() -> None:
    data = list(range(60))
    loader = DataLoader(data, batch_size=4, shuffle=True, seed=5)
    dataset = Dataset.from_torch("dataset", data)
    options: list[dict[str, Any]] = [
        {"shuffle_block_size": "global"},
        {"shuffle_block_size": "global", "shuffle_within_shard": True, "stop_after_passes": 1},
    ]
    for option in options:
        source = StaticMixtureWorkSource([dataset], {"dataset": 3}, seed=5, **option)
        assert source.fingerprint == loader.source.fingerprint
        other = DataLoader(source, batch_size=4)
        for _ in zip(range(3), loop := iter(loader), strict=False):
            pass
        other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
        assert [b.tolist() for b in other] == [b.tolist() for b in loop]
    assert DataLoader(data, batch_size=4, seed=5).source.fingerprint != loader.source.fingerprint


# --- every combination on a few datasets ---------------------------------------------------------

STOPS: list[dict[str, Any]] = [
    {},
    {"stop_after_passes": 2},
    {"exhausted_policy": "stop"},
    {"exhausted_policy": "redistribute"},
    {"exhausted_policy": "repeat"},
    {"max_repeats": 1},
    {"max_samples": 10},
    {"exhausted_policy": "redistribute", "max_samples": 10},
    {"exhausted_policy": {"a": "stop"}},
]
LEVELS: list[dict[str, Any]] = [
    {"shuffle_shards": shards, "shuffle_within_shard": within, "shuffle_block_size": block}
    for shards in (True, False)
    for within in (True, False)
    for block in (None, 1, 7, "auto", 50, "global")
]
OTHERS: list[dict[str, Any]] = [
    {},
    {"reshuffle_on_repeat": False},
    {"reshuffle_on_repeat": {"a": False}, "interleave": "shuffle"},
    {"interleave": "shuffle"},
]


@pytest.mark.parametrize("datasets", [TWO, {"a": [1] * 9, "b": [30]}])
def test_fingerprints_and_orders_tell_the_same_plans_apart(datasets: Datasets) -> None:
    """Equal fingerprints have equal orders; and here, by every combination, the other way round."""
    weights = {name: 1 + number for number, name in enumerate(datasets)}
    orders: dict[str, set[str]] = defaultdict(set)
    fingerprints: dict[str, set[str]] = defaultdict(set)
    for stop, levels, others in itertools.product(STOPS, LEVELS, OTHERS):
        source = source_of(datasets, weights, {"seed": 5, "chunk_size": 8} | stop | levels | others)
        order = repr(facts(source, lanes=()))
        orders[source.fingerprint].add(order)
        fingerprints[order].add(source.fingerprint)
    assert all(len(found) == 1 for found in orders.values())
    assert all(len(found) == 1 for found in fingerprints.values())
    assert 10 < len(orders) < len(STOPS) * len(LEVELS) * len(OTHERS) / 2


# --- random pairs --------------------------------------------------------------------------------

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any)
NAMES = ["a", "b", "c"]
WEIGHTS = st.sampled_from([1, 2, 0.3, 0.1 + 0.2, 1 / 3, 7, 0.7, 1e-3, 1e-15])


def by_name(values: st.SearchStrategy[Any], names: list[str]) -> st.SearchStrategy[Any]:
    return values | st.dictionaries(st.sampled_from(names), values, max_size=3)


def stop_options(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    policies = st.sampled_from(["repeat", "stop"])
    return st.fixed_dictionaries(
        {},
        optional={
            "stop_after_passes": st.integers(1, 3),
            "exhausted_policy": by_name(policies, names) | st.just("redistribute"),
            "max_repeats": by_name(st.integers(0, 3), names),
            "max_samples": st.integers(1, 60) | st.just(10**9),
        },
    )


def options_of(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    others = st.fixed_dictionaries(
        {"seed": st.integers(0, 1)},
        optional={
            "chunk_size": st.integers(1, 12) | st.sampled_from([40, 16384, 20_000]),
            "shuffle_shards": st.booleans(),
            "shuffle_within_shard": st.booleans(),
            "shuffle_block_size": st.sampled_from([None, 1, "auto", "global", 30, 10**6])
            | st.integers(2, 12),
            "reshuffle_on_repeat": by_name(st.booleans(), names),
            "interleave": st.sampled_from(["balanced", "shuffle"]),
        },
    )
    return st.tuples(others, stop_options(names)).map(lambda both: both[0] | both[1])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[StaticMixtureWorkSource, StaticMixtureWorkSource]:
    """Two sources over the same data that share all options but a few."""
    names = NAMES[: draw(st.integers(1, 3))]
    datasets = {name: draw(SIZES) for name in names}
    weights = {name: draw(WEIGHTS) for name in names}
    first = draw(options_of(names))
    second = draw(options_of(names))
    changed = draw(st.sets(st.sampled_from(sorted(first.keys() | second.keys())), max_size=3))
    other = {k: v for k, v in first.items() if k not in changed}
    other |= {k: v for k, v in second.items() if k in changed}
    try:
        return source_of(datasets, weights, first), source_of(datasets, weights, other)
    except ConfigurationError:  # options that contradict
        first = {k: v for k, v in first.items() if k not in stop_names}
        other = {k: v for k, v in other.items() if k not in stop_names}
        return source_of(datasets, weights, first), source_of(datasets, weights, other)


stop_names = ("stop_after_passes", "exhausted_policy", "max_repeats", "max_samples")


@settings(max_examples=200, deadline=None)
@given(pairs())
def test_plans_of_one_fingerprint_are_the_same_in_every_epoch(
    pair: tuple[StaticMixtureWorkSource, StaticMixtureWorkSource],
) -> None:
    one, other = pair
    is_one = one.fingerprint == other.fingerprint
    event(f"one fingerprint: {is_one}, one spelling: {one.plan.options == other.plan.options}")
    if is_one:
        assert facts(one) == facts(other)
        return
    if facts(one) == facts(other):
        event("orders of different plans that happen to be equal")


@settings(max_examples=100, deadline=None)
@given(pairs())
def test_the_plainest_spelling_makes_the_same_plan_and_is_its_own(
    pair: tuple[StaticMixtureWorkSource, StaticMixtureWorkSource],
) -> None:
    source = pair[0]
    identity = source.plan.identity
    assert identity.plain is not None
    plain = identity.plain.as_dict()
    again = StaticMixtureWorkSource(source.datasets, source.mixture, seed=source.seed, **plain)
    assert again.fingerprint == source.fingerprint
    assert again.plan.identity.plain == identity.plain == plainly(identity, plain)
    assert facts(again) == facts(source)


@settings(max_examples=100, deadline=None)
@given(pairs())
def test_a_state_is_accepted_exactly_where_the_fingerprint_is_equal(
    pair: tuple[StaticMixtureWorkSource, StaticMixtureWorkSource],
) -> None:
    one, other = pair
    progress = Progress.at(one.identity, epoch=0, delivered=0, lanes=1)
    for state in (Progress.from_dict(progress.to_dict()), Progress.from_words(progress.to_words())):
        accepted = is_same_plan(other.identity, state.fingerprint, state.description)
        assert accepted == (one.fingerprint == other.fingerprint)
