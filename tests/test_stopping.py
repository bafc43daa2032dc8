"""Where a plan ends: equal to consuming one sample at a time, for every combination of rules."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon_torch.arithmetic.apportion import SplitTree
from zephon_torch.errors import ConfigurationError
from zephon_torch.io import Dataset
from zephon_torch.work import StaticMixtureWorkSource
from zephon_torch.work.order.segments import Segments
from zephon_torch.work.order.stopping import StopRules, segments_of

ABC = {"a": 5, "b": 2, "c": 7}


def segments(
    sizes: dict[str, int], weights: dict[str, Any] | None = None, **rules: Any
) -> Segments:
    weights = weights or dict.fromkeys(sizes, 1)
    return segments_of(
        list(sizes),
        [oracle.exact(weights[name]) for name in sizes],
        list(sizes.values()),
        StopRules(**rules),
    )


def simulated(
    sizes: dict[str, int], weights: dict[str, Any] | None = None, limit: int = 5000, **rules: Any
) -> oracle.Stream:
    weights = weights or dict.fromkeys(sizes, 1)
    integers = oracle.integer_weights([oracle.exact(weights[name]) for name in sizes])
    return oracle.run(list(sizes), list(sizes.values()), integers, oracle.Options(**rules), limit)


def source(sizes: dict[str, int], weights: dict[str, Any] | None = None, **options: Any):
    datasets = [Dataset.from_samples(name, range(size)) for name, size in sizes.items()]
    return StaticMixtureWorkSource(datasets, weights or dict.fromkeys(sizes, 1), **options)


@st.composite
def rules(draw: st.DrawFn, names: list[str]) -> dict[str, Any]:
    """Any combination of stop options that does not contradict itself."""
    kind = draw(
        st.sampled_from(["none", "repeat", "stop", "redistribute", "passes", "repeats", "mixed"])
    )
    result: dict[str, Any] = {}
    if kind in ("repeat", "stop", "redistribute"):
        result["exhausted_policy"] = kind
    if kind == "passes":
        result["stop_after_passes"] = draw(st.integers(1, 4))
        if draw(st.booleans()):
            result["exhausted_policy"] = "repeat"
    if kind == "repeats":
        some = st.dictionaries(st.sampled_from(names), st.integers(0, 3))
        result["max_repeats"] = draw(st.one_of(st.integers(0, 3), some))
        if draw(st.booleans()):
            result["exhausted_policy"] = "repeat"
    if kind == "mixed":
        policies = draw(
            st.dictionaries(st.sampled_from(names), st.sampled_from(["stop", "repeat"]), min_size=1)
        )
        result["exhausted_policy"] = policies
        free = [name for name in names if policies.get(name) != "stop"]
        if free and draw(st.booleans()):
            result["max_repeats"] = draw(
                st.dictionaries(st.sampled_from(free), st.integers(0, 3), min_size=1)
            )
    if draw(st.booleans()):
        result["max_samples"] = draw(st.integers(1, 150))
    return result


@st.composite
def runs(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, Any], dict[str, Any]]:
    names = sorted(draw(st.sets(st.sampled_from("abcdefgh"), min_size=1, max_size=6)))
    sizes = {name: draw(st.integers(1, 25)) for name in names}
    weights = {
        name: draw(st.one_of(st.integers(1, 9), st.sampled_from([0.1, 0.25, 0.7, 0.33])))
        for name in names
    }
    return sizes, weights, draw(rules(names))


@settings(max_examples=300)
@given(runs())
def test_length_and_shares_equal_the_simulation(
    run: tuple[dict[str, int], dict[str, Any], dict[str, Any]],
) -> None:
    sizes, weights, options = run
    limit = 3000
    stream = simulated(sizes, weights, limit=limit, **options)
    closed = segments(sizes, weights, **options)
    if stream.ended:
        assert closed.length == len(stream.labels)
    else:
        assert closed.length is None or closed.length >= limit
    for position in {0, 1, len(stream.labels) // 2, len(stream.labels)}:
        seen = [stream.labels[:position].count(i) for i in range(len(sizes))]
        assert closed.counts(position).tolist() == seen


@settings(max_examples=150)
@given(runs())
def test_segments_begin_where_datasets_depart(
    run: tuple[dict[str, int], dict[str, Any], dict[str, Any]],
) -> None:
    sizes, weights, options = run
    options = {"exhausted_policy": "redistribute", "max_samples": options.get("max_samples")}
    stream = simulated(sizes, weights, **options)
    closed = segments(sizes, weights, **options)
    starts = [0, *stream.departures]
    known = min(len(closed.start), len(stream.members))
    assert closed.start[:known].tolist() == starts[:known]
    assert len(closed.start) >= len(stream.members)
    for segment in range(known):
        assert closed.live(segment).tolist() == stream.members[segment]
        seen = [stream.labels[: starts[segment]].count(i) for i in range(len(sizes))]
        assert closed.before[segment].tolist() == seen


def test_the_table_of_rules() -> None:
    # equal weights: a, b, c take turns
    assert segments(ABC).length == len(simulated(ABC).labels)
    assert segments(ABC, exhausted_policy="repeat").length is None
    assert segments(ABC, max_samples=9, exhausted_policy="repeat").length == 9
    assert segments(ABC, exhausted_policy="redistribute").length == 14
    assert segments({"a": 4}).length == 4
    assert segments({"a": 4}, stop_after_passes=3).length == 12
    assert segments({"a": 4}, max_repeats=0).length == 4
    assert segments({"a": 4}, max_repeats=2).length == 12
    assert segments({"a": 4}, exhausted_policy="stop").length == 4
    assert segments({"a": 4}, exhausted_policy="stop", max_samples=3).length == 3
    assert segments({"a": 4}, exhausted_policy="stop", max_samples=5).length == 4


def test_nothing_given_is_one_pass_of_every_dataset() -> None:
    assert segments(ABC).length == segments(ABC, stop_after_passes=1).length


def test_no_tail_is_dropped_and_no_sample_is_asked_for_in_vain() -> None:
    # one sample more would be the third of b
    length = segments(ABC, exhausted_policy="stop").length
    assert length is not None
    counts = segments(ABC, exhausted_policy="repeat").counts(length + 1)
    assert counts[1] == 3 and segments(ABC, exhausted_policy="stop").counts(length)[1] == 2


# --- large, by definition ------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**11)), min_size=1, max_size=10),
    st.integers(1, 5),
    st.sampled_from(["floor", "cap"]),
)
def test_a_huge_plan_ends_at_the_exact_sample(
    entries: list[tuple[int, int]], passes: int, kind: str
) -> None:
    weights = [weight for weight, _ in entries]
    sizes = {f"{i:02}": size for i, (_, size) in enumerate(entries)}
    tree = SplitTree(weights)
    options = {"stop_after_passes": passes} if kind == "floor" else {"max_repeats": passes - 1}
    length = segments(sizes, dict(zip(sizes, weights, strict=True)), **options).length
    assert length is not None
    if length >= 2**56 - 1:
        return
    wanted = np.array(list(sizes.values())) * passes
    before, at, after = tree.counts(np.array([length - 1, length, length + 1]))
    if kind == "floor":
        assert (at >= wanted).all() and (before < wanted).any()
    else:
        assert (at <= wanted).all() and (after > wanted).any()


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**11)), min_size=1, max_size=10))
def test_huge_redistribution_uses_every_sample_once(entries: list[tuple[int, int]]) -> None:
    sizes = {f"{i:02}": size for i, (_, size) in enumerate(entries)}
    weights = dict(zip(sizes, [weight for weight, _ in entries], strict=True))
    closed = segments(sizes, weights, exhausted_policy="redistribute")
    total = sum(sizes.values())
    assert closed.length == total
    assert closed.counts(total).tolist() == list(sizes.values())
    # each departure is at the last sample of exactly one dataset, and no other ran over
    limits = np.array(list(sizes.values()))
    for start in closed.start[1:].tolist():
        before, at = closed.counts(start - 1), closed.counts(start)
        assert ((before < limits) & (at == limits)).sum() == 1
        assert (at <= limits).all()


@pytest.mark.parametrize(
    ("sizes", "weights"),
    [
        ({"a": 10**15, "b": 5}, {"a": 1, "b": 1e-20}),
        ({"a": 10**15, "b": 40, "c": 10**14}, {"a": 1, "b": 2.1e-14, "c": 0.05}),
    ],
)
def test_redistribution_with_weights_finer_than_a_unit(
    sizes: dict[str, int], weights: dict[str, float]
) -> None:
    closed = segments(sizes, weights, exhausted_policy="redistribute")
    assert closed.length == sum(sizes.values())
    assert closed.counts(closed.length).tolist() == list(sizes.values())


@settings(max_examples=8)
@given(st.integers(50, 250), st.integers(0, 2**60), st.sampled_from([1, 10, 10**9]))
def test_many_datasets_depart_one_after_the_other(num: int, key: int, scale: int) -> None:
    draws = [oracle.subkey(key, i) for i in range(2 * num)]
    sizes = {f"{i:03}": 1 + draw % (5 * scale) for i, draw in enumerate(draws[:num])}
    weights = {name: 1 + draw % 100 for name, draw in zip(sizes, draws[num:], strict=True)}
    closed = segments(sizes, weights, exhausted_policy="redistribute")
    assert closed.length == sum(sizes.values())
    assert closed.counts(closed.length).tolist() == list(sizes.values())
    assert len(closed.start) == num
    assert (np.diff(closed.start) > 0).all()
    for segment, start in enumerate(closed.start.tolist()):
        used = closed.counts(start)
        live = [i for i, size in enumerate(sizes.values()) if used[i] < size]
        assert closed.live(segment).tolist() == live
        assert (used <= list(sizes.values())).all() and len(live) == num - segment


def test_weights_beyond_integers_redistribute_too() -> None:
    sizes = {"a": 30, "b": 30, "c": 30}
    weights = {"a": Fraction(1, 10**20 + 39), "b": 1, "c": Fraction(1, 3)}
    closed = segments(sizes, weights, exhausted_policy="redistribute")
    assert closed.length == 90
    assert closed.counts(90).tolist() == [30, 30, 30]


# --- the source ----------------------------------------------------------------------------------


def test_an_endless_plan_says_so() -> None:
    endless = source(ABC, exhausted_policy="repeat")
    assert endless.total_samples == math.inf and endless.num_chunks == math.inf
    assert endless.plan.length is None


@pytest.mark.parametrize("chunk_size", [1, 3, 10, 11, 1000])
def test_chunks_of_a_plan_end_at_its_length(chunk_size: int) -> None:
    plan = source(ABC, chunk_size=chunk_size)
    total = int(plan.total_samples)
    assert plan.num_chunks == -(-total // chunk_size)
    assert sum(len(plan.chunk(k)) for k in range(int(plan.num_chunks))) == total
    with pytest.raises(IndexError):
        plan.chunk(int(plan.num_chunks))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"stop_after_passes": 1, "exhausted_policy": "stop"}, "stop_after_passes"),
        ({"stop_after_passes": 1, "exhausted_policy": {"a": "stop"}}, "stop_after_passes"),
        ({"stop_after_passes": 1, "exhausted_policy": "redistribute"}, "redistribute"),
        ({"stop_after_passes": 1, "max_repeats": 1}, "max_repeats"),
        ({"exhausted_policy": "redistribute", "max_repeats": 1}, "max_repeats"),
        ({"exhausted_policy": "stop", "max_repeats": 1}, "max_repeats"),
        ({"exhausted_policy": {"a": "stop"}, "max_repeats": {"a": 1}}, "'a'"),
        ({"exhausted_policy": {"a": "redistribute"}}, "redistribute"),
        ({"exhausted_policy": "recycle"}, "recycle"),
        ({"exhausted_policy": {"q": "stop"}}, "'q'"),
        ({"max_repeats": {"q": 1}}, "'q'"),
        ({"reshuffle_on_repeat": {"q": True}}, "'q'"),
        ({"max_repeats": -1}, "max_repeats"),
        ({"max_repeats": {"a": -1}}, "'a'"),
        ({"stop_after_passes": 0}, "stop_after_passes"),
        ({"stop_after_passes": 1.5}, "stop_after_passes"),
        ({"max_samples": 0}, "max_samples"),
        ({"max_samples": True}, "max_samples"),
    ],
)
def test_rules_that_contradict_are_refused_by_name(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigurationError, match=word):
        source(ABC, **options)


def test_a_rule_may_name_a_dataset_without_part() -> None:
    plan = source({**ABC, "empty": 0}, exhausted_policy={"empty": "stop", "a": "stop"})
    assert plan.total_samples == source(ABC, exhausted_policy={"a": "stop"}).total_samples
