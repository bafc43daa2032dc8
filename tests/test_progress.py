"""Progress: its two forms, and states that are corrupt or of something else."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import batches, memory, mixture_of, one, three_in_memory

from zephon_torch import (
    ChunkSplitter,
    DataLoader,
    StaticMixtureWorkSource,
    WorkSourceDataset,
)
from zephon_torch.errors import PlanMismatch, StateError
from zephon_torch.work import Progress
from zephon_torch.work.sources.static_mixture import WorkSource

COUNTS = st.integers(0, 2**60)
DIGITS = st.text("0123456789abcdef", min_size=64, max_size=64)
SIGNED = st.integers(-(2**63), 2**63 - 1)


def source(seed: int = 3) -> Any:
    return mixture_of(three_in_memory(), seed=seed)


@pytest.fixture
def loader() -> DataLoader:
    loader = DataLoader(source(), batch_size=4)
    loop = iter(loader)
    next(loop)
    return loader


# --- two forms -----------------------------------------------------------------------------------


@given(epoch=COUNTS, delivered=COUNTS, lanes=st.integers(1, 2**30), fingerprint=DIGITS)
def test_both_forms_give_back_what_they_were_made_of(
    epoch: int, delivered: int, lanes: int, fingerprint: str
) -> None:
    progress = Progress(epoch, delivered, lanes, fingerprint, "text", (1, -2, 2**63 - 1, -(2**63)))
    assert Progress.from_dict(progress.to_dict()) == progress
    assert Progress.from_dict(json.loads(json.dumps(progress.to_dict()))) == progress
    again = Progress.from_words(progress.to_words())
    assert again == progress and again.digests == progress.digests
    assert again.to_words() == progress.to_words()
    tensor = torch.tensor(progress.to_words(), dtype=torch.int64)
    assert tensor.shape == (16,)
    assert Progress.from_words(tensor.tolist()) == progress


@given(at=st.integers(0, 15), change=SIGNED)
def test_any_changed_word_is_noticed(at: int, change: int) -> None:
    words = Progress(1, 2, 3, "ab" * 32, "", (4, 5, 6, 7)).to_words()
    changed = [*words[:at], change, *words[at + 1 :]]
    if changed == words:
        return
    if at > 12:
        return  # spare words
    with pytest.raises(StateError):
        Progress.from_words(changed)


@given(st.lists(st.integers(), max_size=20) | st.lists(st.integers(), min_size=16, max_size=16))
def test_any_other_integers_are_refused(words: list[int]) -> None:
    with pytest.raises(StateError):
        Progress.from_words(words)


def test_a_state_is_small_and_its_keys_are_fixed(loader: DataLoader) -> None:
    state = loader.state_dict()
    assert list(state) == ["version", "epoch", "delivered", "lanes", "fingerprint", "description"]
    assert len(json.dumps(state | {"description": ""})) < 1024
    assert json.loads(state["description"])["seed"] == 3


def test_a_state_survives_every_plain_carrier(loader: DataLoader) -> None:
    state = loader.state_dict()
    file = io.BytesIO()
    torch.save({"data": state}, file)
    file.seek(0)
    for carried in (json.loads(json.dumps(state)), torch.load(file, weights_only=True)["data"]):
        other = DataLoader(source(), batch_size=4)
        other.load_state_dict(carried)
        assert other.state_dict() == state


# --- what is not a state -------------------------------------------------------------------------

SOUND = DataLoader(source(), batch_size=4).state_dict()
CORRUPT: list[Any] = [
    None,
    [],
    "state",
    7,
    {},
    {"model": {}, "optimizer": {}},
    {"state": {}, "param_groups": []},
    {"_snapshot": {}, "_steps_since_snapshot": 3, "_iterator_finished": False},
    *({k: v for k, v in SOUND.items() if k != key} for key in SOUND),
    *(SOUND | {key: None} for key in SOUND),
    *(SOUND | {key: "1"} for key in ("version", "epoch", "delivered", "lanes", "fingerprint")),
    *(SOUND | {key: 1.0} for key in SOUND),
    *(SOUND | {key: True} for key in SOUND),
    *(SOUND | {key: -1} for key in SOUND),
    *(SOUND | {key: np.nan} for key in SOUND),
    SOUND | {"version": 0},
    SOUND | {"version": 2},
    SOUND | {"lanes": 0},
    SOUND | {"epoch": 2**64},
    SOUND | {"lanes": 2**64},
    SOUND | {"delivered": 2**64},
    SOUND | {"fingerprint": SOUND["fingerprint"][:-1]},
    SOUND | {"fingerprint": SOUND["fingerprint"][:-1] + "x"},
    SOUND | {"fingerprint": SOUND["fingerprint"].upper()},
]


@pytest.mark.parametrize("state", CORRUPT, ids=lambda state: str(state)[:60])
def test_corrupt_and_foreign_states_leave_the_loader_as_it_was(
    loader: DataLoader, state: Any
) -> None:
    before = loader.state_dict()
    with pytest.raises(StateError) as caught:
        loader.load_state_dict(state)
    assert len(str(caught.value)) > 20, "in words"
    assert loader.state_dict() == before
    reference = DataLoader(source(), batch_size=4)
    batches(reference), batches(loader)
    assert batches(loader) == batches(reference), "the next epoch"


@given(
    st.dictionaries(
        st.sampled_from([*SOUND, "other"]),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text(max_size=70)
        | st.binary(),
    )
)
def test_no_dict_at_all_breaks_anything(changes: dict[str, Any]) -> None:
    loader = DataLoader(one(memory("a", 8)), batch_size=4)
    before = loader.state_dict()
    try:
        loader.load_state_dict(before | changes)
    except StateError:
        assert loader.state_dict() == before
        return
    try:
        assert len(list(loader)) in (1, 2)
    except StateError:
        pass


def source_state() -> Any:
    node = source()
    next(node)
    return node.state_dict()


def node_state() -> Any:
    node = ChunkSplitter(source(), batch_size=4, rank=0, num_replicas=1).node()
    next(node)
    return node.state_dict()


def dataset_state() -> Any:
    dataset = WorkSourceDataset(source())
    next(iter(dataset))
    return dataset.state_dict()


def loader_state() -> Any:
    loader = DataLoader(source(), batch_size=4)
    next(iter(loader))
    return loader.state_dict()


def load_source(state: Any) -> None:
    source().reset(state)


def load_node(state: Any) -> None:
    ChunkSplitter(source(), batch_size=4, rank=0, num_replicas=1).node().reset(state)


def load_dataset(state: Any) -> None:
    WorkSourceDataset(source()).load_state_dict(state)


def load_loader(state: Any) -> None:
    DataLoader(source(), batch_size=4).load_state_dict(state)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "source": (source_state, load_source),
    "node of a rank": (node_state, load_node),
    "iterable dataset": (dataset_state, load_dataset),
    "loader": (loader_state, load_loader),
}


@pytest.mark.parametrize("saved", KINDS)
@pytest.mark.parametrize("loaded", KINDS)
def test_states_of_different_kinds_are_not_mixed_up(saved: str, loaded: str) -> None:
    """They count different things: chunks, chunks of a rank, samples of a consumer, samples."""
    state, load = KINDS[saved][0](), KINDS[loaded][1]
    if saved == loaded:
        load(state)
    else:
        with pytest.raises(StateError):
            load(state)


# --- another plan --------------------------------------------------------------------------------


def test_a_mismatch_tells_the_difference_and_the_way_out() -> None:
    state = DataLoader(source(seed=4), batch_size=4).state_dict()
    loader = DataLoader(source(), batch_size=4)
    loader.load_state_dict(state)
    with pytest.raises(PlanMismatch, match="seed: 4 at the checkpoint, 3 now") as caught:
        iter(loader)
    assert "strict=False" in str(caught.value)
    assert "repeat or be missed" in str(caught.value)


def several(**changes: Any) -> StaticMixtureWorkSource:
    """A mixture of two, in which seed, an option, weights and a dataset can be changed."""
    weights = changes.pop("weights", {"a": 0.3, "b": 0.7})
    datasets = [memory("a", 40), memory("b", changes.pop("size", 20))]
    return StaticMixtureWorkSource(datasets, weights, **({"seed": 3, "chunk_size": 6} | changes))


CHANGES: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "seed": ({"seed": 4}, ["seed: 3 at the checkpoint, 4 now"], "its seed"),
    "options": (
        {"chunk_size": 9, "interleave": "shuffle"},
        ["option chunk_size: 6 at the checkpoint, 9 now", "option interleave: balanced at the"],
        "its options",
    ),
    "mixture": (
        {"weights": {"a": 1, "b": 3}},
        ["weight of dataset 'a': 0.3 of the mixture at the checkpoint, 0.25 now",
         "weight of dataset 'b': 0.7 of the mixture at the checkpoint, 0.75 now"],
        "its weights",
    ),
    "datasets": (
        {"size": 21},
        ["dataset 'b': 20 samples at the checkpoint, 21 now"],
        "its datasets",
    ),
}  # fmt: skip


def mismatch(then: Progress, now: WorkSource) -> str:
    with pytest.raises(PlanMismatch) as caught:
        then.check(now.identity)
    told, way_out = str(caught.value).split("Build the loader as it was;")
    assert "strict=False" in way_out
    return told


def as_dict_and_words(source: WorkSource) -> tuple[Progress, Progress]:
    progress = Progress.at(source.identity, epoch=0, delivered=0, lanes=1)
    carried = json.loads(json.dumps(progress.to_dict()))
    return Progress.from_dict(carried), Progress.from_words(progress.to_words())


@pytest.mark.parametrize(
    "parts", [p for n in (1, 2, 3, 4) for p in combinations(CHANGES, n)], ids=str
)
def test_all_parts_that_differ_are_told_by_both_routes(parts: tuple[str, ...]) -> None:
    changes = {k: v for part in parts for k, v in CHANGES[part][0].items()}
    by_dict, by_words = (mismatch(p, several(**changes)) for p in as_dict_and_words(several()))
    expected = [line for part in CHANGES if part in parts for line in CHANGES[part][1]]
    if len(expected) == 1:
        assert by_dict.startswith(f"the checkpoint belongs to another plan: {expected[0]}")
    for part in CHANGES:
        assert (CHANGES[part][2] in by_words) == (part in parts)
        for line in CHANGES[part][1]:
            assert (line in by_dict) == (part in parts)
    if len(expected) > 1:
        assert by_dict.count("\n- ") == len(expected), "one line each, and no other"


def test_an_option_that_makes_no_difference_is_not_told() -> None:
    then = several(stop_after_passes=1, shuffle_block_size="global", shuffle_shards=False)
    now = several(shuffle_block_size="global", reshuffle_on_repeat={"a": True}, seed=4)
    by_dict, by_words = (mismatch(progress, now) for progress in as_dict_and_words(then))
    assert "plan: seed: 3 at the checkpoint, 4 now. " in by_dict
    assert "plan: its seed differs. " in by_words


def test_weights_that_print_alike_are_told_exactly() -> None:
    for then, now in ((0.3, 0.1 + 0.2), (0.1 + 0.2, 0.3)):
        old, new = (several(weights={"a": weight, "b": 0.7}) for weight in (then, now))
        ratios = ("3/10", "7500000000000001/25000000000000001")
        first, second = ratios if then == 0.3 else ratios[::-1]
        told = mismatch(as_dict_and_words(old)[0], new)
        assert f"'a': {first} of the mixture at the checkpoint, {second} now" in told


def test_rounded_weights_are_never_told_as_units_of_46_bits() -> None:
    """As in states of before, which have no exact ratios."""
    old, new = (several(weights={"a": weight, "b": 0.7}) for weight in (0.3, 0.1 + 0.2))
    short = json.loads(new.identity.description)
    for entry in short["datasets"].values():
        del entry["share"]
    state = replace(as_dict_and_words(new)[0], description=json.dumps(short))
    told = mismatch(state, old)
    assert "'a': 0.299999999999997 of the mixture at the checkpoint, 0.3" in told
    assert "/" not in told and not re.search(r"(?<![.\d])\d{13}", told)


def test_a_dataset_more_does_not_count_as_other_weights() -> None:
    weights = {"a": 0.123456789012345, "b": 0.7654321098765}
    three = StaticMixtureWorkSource(
        [memory("a", 40), memory("b", 20), memory("c", 9)],
        weights | {"c": 0.1},
        seed=3,
        chunk_size=6,
    )
    told = mismatch(as_dict_and_words(several(weights=weights))[0], three)
    assert told == (
        "the checkpoint belongs to another plan: dataset 'c' takes part now, it did not at the "
        "checkpoint. "
    )


def many(name: str, number: int = 1000, **changes: Any) -> StaticMixtureWorkSource:
    datasets = [memory(name.format(i), 2 + changes.get("more", 0)) for i in range(number)]
    weights = {d.name: 1 + changes.get("slope", 0) * i for i, d in enumerate(datasets)}
    return StaticMixtureWorkSource(datasets, weights, seed=changes.get("seed", 0))


def test_many_differences_are_bounded_part_by_part() -> None:
    told = mismatch(as_dict_and_words(many("d{}"))[0], many("d{}", seed=1, slope=1, more=1))
    lines = told.split("\n- ")
    assert len(lines) == 1 + 1 + 6 + 6
    assert lines[1] == "seed: 0 at the checkpoint, 1 now"
    assert "and 995 more weights" in lines and "and 995 more datasets\n" in lines


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"seed": 1}, "plan: seed: 0 at the checkpoint, 1 now. "),
        ({"slope": 1}, "plan: its weights differ. The description of so many"),
        (
            {"more": 1},
            r"plan: its datasets .* differ \(.* 2,000 samples then, .* 3,000 samples now",
        ),
        ({"slope": 1, "more": 1}, r"plan: its weights and its datasets \(.*\) differ"),
    ],
)
def test_digests_tell_the_part_where_a_description_has_no_room(
    changes: dict[str, Any], told: str
) -> None:
    name = "a name of some length, number {:04d}, " + "x" * 60
    then = as_dict_and_words(many(name))[0]
    assert "datasets" not in json.loads(then.description)
    assert re.search(told, mismatch(then, many(name, **changes)))


def test_words_tell_which_part_differs() -> None:
    words = DataLoader(source(seed=4), batch_size=4).progress.to_words()
    with pytest.raises(PlanMismatch, match="seed"):
        Progress.from_words(words).check(source().identity)


@pytest.mark.parametrize(
    "description", ["", "{", "[]", '{"seed": 3}', "null", '{"order_version": 1}']
)
def test_a_mismatch_without_a_readable_description_still_raises(description: str) -> None:
    state = SOUND | {"fingerprint": "0" * 64, "description": description}
    loader = DataLoader(source(), batch_size=4)
    loader.load_state_dict(state)
    with pytest.raises(PlanMismatch, match="fingerprint 000000000000 then"):
        iter(loader)


def test_a_huge_number_of_datasets_keeps_the_description_short() -> None:
    datasets = [memory(f"dataset number {i:05d}", 2) for i in range(3000)]
    source = StaticMixtureWorkSource(datasets, {d.name: 1 for d in datasets})
    assert len(source.identity.description) <= 64 * 1024
    loader = DataLoader(source, batch_size=4)
    assert json.loads(json.dumps(loader.state_dict())) == loader.state_dict()
