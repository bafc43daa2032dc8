"""Segments with weights of their own: equal to an oracle that draws one sample at a time."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon_torch.arithmetic.apportion import SplitTree
from zephon_torch.errors import ConfigurationError, MixtureError, PlanMismatch
from zephon_torch.io import Dataset
from zephon_torch.work import MixtureSpec, StaticMixtureWorkSource
from zephon_torch.work.identity.progress import Progress
from zephon_torch.work.order import composition, segments
from zephon_torch.work.order.options import PlanOptions
from zephon_torch.work.order.phases import Course, Phase
from zephon_torch.work.order.sample_order import ShuffleLevels
from zephon_torch.work.order.stopping import StopRules
from zephon_torch.work.plan.describe import describe, summarize
from zephon_torch.work.plan.plan import Plan

LIMIT = 240
Phases = Sequence[tuple[int | None, Mapping[str, Any]]]


@dataclass
class Setup:
    """One course, for both sides."""

    shard_sizes: dict[str, list[int]]
    phases: Phases
    seed: int = 0
    chunk_size: int = 8
    lanes: int = 1
    levels: tuple[bool, bool, Any] = (True, True, None)
    interleave: str = "balanced"
    reshuffle: bool = True

    def options(self, **rules: Any) -> PlanOptions:
        return PlanOptions(
            seed=self.seed,
            chunk_size=self.chunk_size,
            levels=ShuffleLevels(*self.levels),
            rules=StopRules(**(rules or {"exhausted_policy": "repeat"})),
            reshuffle_on_repeat=self.reshuffle,
            interleave=self.interleave,  # type: ignore[arg-type]
        )

    def datasets(self) -> list[Dataset]:
        return [
            Dataset.from_samples(name, range(sum(sizes)), shard_sizes=sizes)
            for name, sizes in self.shard_sizes.items()
        ]

    def course(self) -> Course:
        phases = [Phase(MixtureSpec(weights), samples) for samples, weights in self.phases]
        return Course(phases, self.lanes)

    def plan(self) -> Plan:
        return Plan(self.datasets(), self.course(), self.options())

    def oracle(self) -> oracle.OracleCourse:
        return oracle.OracleCourse(
            self.shard_sizes,
            {},
            seed=self.seed,
            chunk_size=self.chunk_size,
            lanes=self.lanes,
            levels=oracle.Levels(*self.levels),
            options=oracle.Options(reshuffle_on_repeat=self.reshuffle),
            interleave=self.interleave,
            limit=LIMIT,
            phases=self.phases,
        )


@st.composite
def weights(draw: st.DrawFn, names: Sequence[str]) -> dict[str, Any]:
    """Weights, of which at least one is positive."""
    one = st.one_of(st.just(0), st.integers(0, 9), st.sampled_from([0.1, 0.55, Fraction(1, 7)]))
    drawn = {name: draw(one) for name in names}
    return drawn if any(drawn.values()) else drawn | {names[0]: 1}


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    names = draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=5, unique=True))
    shards = st.lists(st.integers(1, 9), min_size=1, max_size=4)
    chunk_size, lanes = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    unit, planned, end = chunk_size * lanes, 0, 0
    phases: list[tuple[int | None, dict[str, Any]]] = []
    for _ in range(draw(st.integers(1, 6))):
        end += unit * draw(st.integers(1, max(1, 40 // unit)))
        total = draw(st.integers(end - unit + 1, end))  # rounded up to `end`
        phases.append((total - planned, draw(weights(names))))
        planned = total
    if draw(st.booleans()):
        phases[-1] = (None, phases[-1][1])
    return Setup(
        {name: draw(shards) for name in names},
        phases,
        seed=draw(st.integers(0, 99)),
        chunk_size=chunk_size,
        lanes=lanes,
        levels=draw(st.sampled_from([(True, True, None), (False, False, None), (True, False, 3)])),
        interleave=draw(st.sampled_from(["balanced", "shuffle"])),
        reshuffle=draw(st.booleans()),
    )


def named(plan: Plan, positions: Any, epoch: int = 0) -> list[oracle.Pointer]:
    found = plan.pointers(positions, epoch)
    names = [plan.datasets[i].name for i in found.dataset.tolist()]
    rest = (a.tolist() for a in (found.shard, found.sample, found.pass_index))
    return list(zip(names, *rest, strict=True))


def reach(plan: Plan) -> int:
    """Positions to look at: all, or whole chunks up to the limit."""
    return plan.length or LIMIT // plan.chunk_size * plan.chunk_size


@settings(max_examples=150, deadline=None)
@given(setups(), st.integers(0, 2), st.randoms(use_true_random=False))
def test_every_pointer_is_the_oracles(setup: Setup, epoch: int, random: Any) -> None:
    plan, scalar = setup.plan(), setup.oracle()
    assert plan.length == scalar.length
    expected = scalar.pointers(epoch)[: reach(plan)]
    assert named(plan, np.arange(reach(plan)), epoch) == expected
    some = [random.randrange(reach(plan)) for _ in range(30)]
    assert named(plan, some, epoch) == [expected[p] for p in some]
    assert pickle.loads(pickle.dumps(plan)).pointers(some, epoch).shard.tolist() == [
        expected[p][1] for p in some
    ]


@settings(max_examples=80, deadline=None)
@given(setups())
def test_no_stream_has_a_gap_or_a_repeat(setup: Setup) -> None:
    plan = setup.plan()
    streams: dict[str, list[tuple[int, int]]] = {name: [] for name in setup.shard_sizes}
    passes: dict[str, list[int]] = {name: [] for name in setup.shard_sizes}
    for name, shard, sample, number in named(plan, np.arange(reach(plan))):
        streams[name].append((shard, sample))
        passes[name].append(number)
    for name, stream in streams.items():
        every = {(k, j) for k, n in enumerate(setup.shard_sizes[name]) for j in range(n)}
        size = len(every)
        assert passes[name] == [rank // size for rank in range(len(stream))]
        for first in range(0, len(stream), size):
            one_pass = stream[first : first + size]
            assert len(set(one_pass)) == len(one_pass)
            assert set(one_pass) == every or len(one_pass) < size


@settings(max_examples=80, deadline=None)
@given(setups())
def test_each_stretch_keeps_to_its_weights(setup: Setup) -> None:
    plan, total = setup.plan(), reach(setup.plan())
    names = [name for name, *_ in named(plan, np.arange(total))]
    ends = setup.course().ends(setup.chunk_size)
    start = 0
    for (_, mixture), stop in zip(setup.phases, ends, strict=True):
        begin, end = start, min(stop or total, total)
        start = stop or total
        if begin >= end:
            continue
        whole = sum(map(oracle.exact, mixture.values()))
        for name, weight in mixture.items():
            share, drawn = oracle.exact(weight) / whole, 0
            for n, one in enumerate(names[begin:end], start=1):
                drawn += one == name
                # a phase that goes on with the weights of the one before counts from there
                assert abs(drawn - share * n) < (6 if weight else 1)
            if not weight:
                assert drawn == 0
            elif begin in plan.starts and end in (*plan.starts, total):
                assert abs(drawn - share * (end - begin)) < 2
            assert plan.counts(end)[name] - plan.counts(begin)[name] == drawn


@settings(max_examples=60, deadline=None)
@given(setups(), st.integers(0, 1))
def test_positions_are_the_inverse_of_pointers(setup: Setup, epoch: int) -> None:
    plan = setup.plan()
    total = reach(plan)
    stands: dict[tuple[str, int, int], list[int]] = {}
    for position, (name, shard, sample, _) in enumerate(named(plan, np.arange(total), epoch)):
        stands.setdefault((name, shard, sample), []).append(position)
    for name, sizes in setup.shard_sizes.items():
        for shard, size in enumerate(sizes):
            for sample in range(size):
                found = plan.positions(name, shard, sample, epoch, stop=total).tolist()
                assert found == stands.get((name, shard, sample), [])


@settings(max_examples=80, deadline=None)
@given(setups(), setups(), st.data())
def test_nothing_ahead_of_a_position_changes_what_is_before(
    setup: Setup, other: Setup, data: st.DataObject
) -> None:
    plan = setup.plan()
    position = data.draw(st.integers(1, reach(plan)))
    number = sum(start < position for start in _phase_starts(setup)) - 1
    planned = sum(samples or 0 for samples, _ in setup.phases[:number])
    # its own phase may end anywhere that rounds up to the position or beyond, or nowhere
    unit = setup.chunk_size * setup.lanes
    least = (position - 1) // unit * unit + 1 - planned
    here = data.draw(st.one_of(st.none(), st.integers(max(least, 1), max(least, 1) + 50)))
    future = [
        (unit * data.draw(st.integers(1, 3)), data.draw(weights(list(setup.shard_sizes))))
        for _ in range(0 if here is None else data.draw(st.integers(0, 3)))
    ]
    phases = [*setup.phases[:number], (here, setup.phases[number][1]), *future]
    changed = replace(setup, phases=phases).plan()
    before = np.arange(position)
    assert named(changed, before) == named(plan, before)


def _phase_starts(setup: Setup) -> list[int]:
    return [0, *(end or 0 for end in setup.course().ends(setup.chunk_size)[:-1])]


@settings(max_examples=60, deadline=None)
@given(setups())
def test_counts_and_positions_of_segments_agree(setup: Setup) -> None:
    plan = setup.plan()
    made = plan._segments
    total = reach(plan)
    for dataset in range(made.before.shape[1]):
        counts = [int(made.counts(p)[dataset]) for p in range(total + 1)]
        for m in range(1, counts[-1] + 1):
            assert made.position(dataset, m)[1] == counts.index(m) - 1


# --- the same as a static mixture ----------------------------------------------------------------

AB = {"a": [30, 20], "b": [40]}


@pytest.mark.parametrize("samples", [None, 64])
@pytest.mark.parametrize("split", [False, True])
def test_phases_of_one_mixture_are_a_static_plan(samples: int | None, split: bool) -> None:
    phases: Phases = [(samples, {"a": 3, "b": 1})]
    if split:
        rest = None if samples is None else samples - 24
        phases = [(24, {"a": 0.75, "b": 0.25}), (rest, {"a": 3, "b": 1})]
    setup = Setup(AB, phases)
    rules = {"exhausted_policy": "repeat", "max_samples": samples}
    static = Plan(setup.datasets(), {"a": 3, "b": 1}, setup.options(**rules))
    plan = setup.plan()
    assert plan.length == static.length == samples
    assert plan.fingerprint == static.fingerprint
    assert named(plan, np.arange(64)) == named(static, np.arange(64))


def test_a_dataset_may_rest_and_come_back() -> None:
    setup = Setup(AB, [(16, {"a": 1, "b": 1}), (16, {"a": 0, "b": 1}), (None, {"a": 1, "b": 0})])
    found = named(setup.plan(), np.arange(48))
    assert [name for name, *_ in found[16:]] == ["b"] * 16 + ["a"] * 16
    of_a = [pointer for pointer in found if pointer[0] == "a"]
    assert len(set(of_a)) == len(of_a) == 24


def test_a_chunk_of_a_thousand_phases_builds_one_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    course = [(8, {"a": n % 97 + 1, "b": 97}) for n in range(1000)]
    plan = Setup(AB, course).plan()
    built: list[int] = []

    def tree(weights: list[int]) -> SplitTree:
        built.append(len(weights))
        return SplitTree(weights)

    plan.pointers([0])
    monkeypatch.setattr(segments, "SplitTree", tree)
    for _ in range(2):
        plan.pointers(np.arange(8 * 500, 8 * 501))
    assert built == [2]
    plan.pointers(np.arange(8000))
    assert len(built) <= 1 + 1000  # each once, though only some are kept
    assert len(plan._segments._trees) <= 64


def test_more_items_than_a_dataset_has_is_an_error() -> None:
    made = Setup(AB, [(16, {"a": 1, "b": 1}), (None, {"a": 0, "b": 1})]).plan()._segments
    assert made.position(0, 8)[0] == 0
    with pytest.raises(IndexError, match="dataset 0 has 8 items in all segments, no 9th"):
        made.position(0, 9)


# --- identity and description --------------------------------------------------------------------

CHANGED: Phases = [(16, {"a": 1, "b": 1}), (16, {"a": 3, "b": 1}), (32, {"a": 0, "b": 1})]
DIFFERENT: dict[str, tuple[Phases, str]] = {
    "a weight": (
        [CHANGED[0], (16, {"a": 2, "b": 1}), CHANGED[2]],
        "mixture: 'a' 0.75, 'b' 0.25 from position 16 on at the checkpoint, "
        "'a' 0.666667, 'b' 0.333333 from position 16 on now",
    ),
    "a place": (
        [CHANGED[0], (24, {"a": 3, "b": 1}), (24, {"a": 0, "b": 1})],
        "mixture: 'b' 1 from position 32 on at the checkpoint, 'b' 1 from position 40 on now",
    ),
    "an end": (
        [*CHANGED[:2], (None, {"a": 0, "b": 1})],
        "end of the last phase: 64 at the checkpoint, none now",
    ),
    "a phase less": ([CHANGED[0], (48, {"a": 3, "b": 1})], "changes of the mixture: 2 at"),
    "no change": ([(64, {"a": 1, "b": 1})], "changes of the mixture: 2 at the checkpoint, 0 now"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_another_course_is_another_plan_and_is_told(name: str) -> None:
    phases, message = DIFFERENT[name]
    then, now = Setup(AB, CHANGED).plan(), Setup(AB, phases).plan()
    progress = Progress.at(then.identity, epoch=0, delivered=8, lanes=1)
    assert then.fingerprint != now.fingerprint
    with pytest.raises(PlanMismatch) as error:
        progress.check(now.identity)
    assert message in str(error.value)
    with pytest.raises(PlanMismatch, match="its weights"):
        Progress.from_words(progress.to_words()).check(now.identity)
    progress.check(Setup(AB, CHANGED).plan().identity)


def test_a_course_too_long_for_a_description_is_told_by_its_digest() -> None:
    course = [(8, {"a": n % 97 + 1, "b": 97}) for n in range(5000)]
    then = Setup(AB, course).plan()
    now = Setup(AB, [*course[:-1], (8, {"a": 7, "b": 1})]).plan()
    assert len(then.identity.description) <= 64 * 1024
    state = Progress.at(then.identity, epoch=0, delivered=8, lanes=1)
    with pytest.raises(PlanMismatch, match="its weights differ"):
        state.check(now.identity)


def test_states_of_a_course_know_it_whatever_is_equal() -> None:
    """Weights of the same ratio and samples that round to the same end are the same plan."""
    same = [(9, {"a": 5, "b": 5}), (20, {"a": 0.75, "b": 0.25}), (31, {"a": 0, "b": 2})]
    assert Setup(AB, same).plan().fingerprint == Setup(AB, CHANGED).plan().fingerprint


def test_describe_has_a_row_for_each_phase() -> None:
    lines = describe(Setup(AB, CHANGED).plan()).splitlines()
    at = lines.index("phase  from  samples     a     b")
    assert lines[at + 1 : at + 4] == [
        "0         0       16   0.5   0.5",
        "1        16       16  0.75  0.25",
        "2        32       32     0     1",
    ]
    assert "64 samples in 8 chunks an epoch" in lines


def test_summary_of_a_closed_and_an_open_course() -> None:
    closed = {s.name: s for s in summarize(Setup(AB, CHANGED).plan())}
    assert (closed["a"].drawn, closed["b"].drawn) == (20, 44)
    assert closed["a"].weight == pytest.approx(20 / 64)
    ended = Setup(AB, [*CHANGED[:2], (None, {"a": 0, "b": 1})]).plan()
    of_open = {s.name: s for s in summarize(ended)}
    assert (of_open["a"].drawn, of_open["a"].unseen, of_open["a"].weight) == (20, 30, 0)
    assert (of_open["b"].drawn, of_open["b"].unseen, of_open["b"].weight) == (None, 0, 1)


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phases", "lanes", "message"),
    [
        ([], 1, "no phases"),
        ([(None, {"a": 1, "b": 1}), (8, {"a": 1, "b": 1})], 1, "phase 0 has no end, so the phases"),
        ([(0, {"a": 1, "b": 1})], 1, "num_samples of phase 0 is 0: expected an integer >= 1"),
        ([(8, {"a": 1, "b": 1}), (2.5, {"a": 1, "b": 1})], 1, "num_samples of phase 1 is 2.5"),
        (
            [(9, {"a": 1, "b": 1}), (6, {"a": 1, "b": 2}), (9, {"a": 1, "b": 1})],
            1,
            "phase 1 has 6 samples, and the phase before it ends at position 16 with all of them: "
            "phases end at multiples of 8",
        ),
        ([(8, {"a": 1, "b": 1}), (8, {"a": 1, "b": 2})], 2, "phases end at multiples of 16"),
        ([(8, {"a": 1, "b": 1})], 0, "lanes is 0"),
        ([(1 << 56, {"a": 1, "b": 1})], 1, "phase 0 would end at position 7.21e+16, the limit is"),
        ([(1 << 57, {"a": 1, "b": 1})], 1, "num_samples of phase 0 is"),
    ],
)
def test_phases_that_cannot_work(phases: Any, lanes: int, message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        Setup(AB, phases, lanes=lanes).plan()
    assert message in str(error.value)


def test_a_phase_without_samples_is_named() -> None:
    setup = Setup({"a": [3], "b": [2]}, [(8, {"a": 1, "b": 1}), (8, {"a": 1, "b": 0})])
    datasets = [Dataset.from_samples("a", []), Dataset.from_samples("b", range(2))]
    with pytest.raises(ConfigurationError, match="phase 1 has no samples at all"):
        Plan(datasets, setup.course(), setup.options())


def test_a_phase_that_weighs_other_datasets_is_named() -> None:
    with pytest.raises(MixtureError, match="phase 1: dataset 'b' has no weight"):
        Setup(AB, [(8, {"a": 1, "b": 1}), (8, {"a": 1})]).plan()


def test_stop_options_beside_phases_are_refused() -> None:
    setup = Setup(AB, CHANGED)
    with pytest.raises(ConfigurationError, match="stop options beside phases"):
        Plan(setup.datasets(), setup.course(), setup.options(max_samples=9))


# --- shuffled chunks -----------------------------------------------------------------------------


def shuffled(sizes: Mapping[str, int], **options: Any) -> StaticMixtureWorkSource:
    datasets = [Dataset.from_samples(name, range(size)) for name, size in sizes.items()]
    given = {"interleave": "shuffle", "chunk_size": 1 << 30} | options
    return StaticMixtureWorkSource(datasets, dict.fromkeys(sizes, 1), **given)


def test_chunks_too_large_to_be_shuffled_are_refused() -> None:
    with pytest.raises(ConfigurationError) as error:
        shuffled({"a": 5, "b": 5}, exhausted_policy="repeat")
    assert "1,073,741,824" in str(error.value) and "67,108,864" in str(error.value)
    with pytest.raises(ConfigurationError, match="chunks of 67,108,865 positions"):
        shuffled({"a": 5, "b": 5}, exhausted_policy="repeat", max_samples=(1 << 26) + 1)
    shuffled({"a": 5, "b": 5}, exhausted_policy="repeat", max_samples=1 << 26)
    shuffled({"a": 5, "b": 5}, exhausted_policy="repeat", chunk_size=1 << 26)
    shuffled({"a": 5, "b": 5}, exhausted_policy="repeat", interleave="balanced")
    assert len(shuffled({"a": 5, "b": 5}).plan.pointers(range(10))) == 10  # a short epoch


def test_a_single_dataset_needs_no_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composition, "shuffled_labels", None)  # a call would fail
    plan = shuffled({"a": 1 << 30}, exhausted_policy="repeat").plan
    found = plan.pointers([7, 1 << 29])
    for shard, sample, position in zip(found.shard, found.sample, (7, 1 << 29), strict=True):
        assert position in plan.positions("a", int(shard), int(sample), stop=position + 1)[-1:]


def test_the_end_of_a_course_may_be_infinite() -> None:
    assert Setup(AB, [*CHANGED[:2], (None, {"a": 0, "b": 1})]).plan().total_samples == math.inf
