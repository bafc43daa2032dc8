"""Work sources: chunks on demand, and the face of a torchdata node."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys import memory, mixture_of, one, three_in_memory, write_shards

from zephon_torch.errors import ConfigurationError, MixtureError, PlanMismatch, StateError
from zephon_torch.io import Dataset
from zephon_torch.work import MixtureSpec, StaticMixtureWorkSource, WorkChunk, WorkSource


def rows(chunk: WorkChunk) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in chunk.pointers.arrays()), strict=True))


def whole(source: WorkSource, epoch: int) -> list[list[tuple[int, ...]]]:
    return [rows(source.chunk(k, epoch)) for k in range(int(source.num_chunks))]


def test_the_example_of_the_upstream_documentation_runs(tmp_path: Path) -> None:
    path = write_shards(tmp_path / "wikipedia", [30, 20])
    dataset = Dataset.from_path("wikipedia", path)
    work_source = StaticMixtureWorkSource(
        datasets=[dataset], mixture=MixtureSpec({"wikipedia": 1.0}), seed=42
    )
    seen = []
    for chunk in work_source:
        seen += [(shard, sample) for _, shard, sample in chunk.pointers]
    assert sorted(seen) == [(0, i) for i in range(30)] + [(1, i) for i in range(20)]


def test_iterating_gives_the_chunks_in_order_and_then_the_next_epoch() -> None:
    source = mixture_of(three_in_memory(), chunk_size=16)
    for epoch in range(3):
        chunks = list(source)
        assert [chunk.epoch for chunk in chunks] == [epoch] * len(chunks)
        assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
        assert [rows(chunk) for chunk in chunks] == whole(source, epoch)


def test_chunks_cover_the_epoch_without_gap_or_overlap() -> None:
    source = mixture_of(three_in_memory(), chunk_size=16)
    chunks = list(source)
    assert [chunk.start for chunk in chunks] == [16 * k for k in range(len(chunks))]
    assert [chunk.stop for chunk in chunks[:-1]] == [chunk.start for chunk in chunks[1:]]
    assert chunks[-1].stop == source.total_samples == sum(len(chunk) for chunk in chunks)
    assert len(chunks) == source.num_chunks


def test_a_chunk_is_pure_and_does_not_move_the_iteration() -> None:
    source = mixture_of(three_in_memory(), chunk_size=16)
    first = next(source)
    state = source.state_dict()
    for k in (4, 0, 2, 0):
        assert rows(source.chunk(k)) == rows(source.chunk(k))
    source.chunk(1, epoch=7)
    assert source.state_dict() == state
    assert rows(first) == rows(source.chunk(0))
    assert next(source).index == 1


def test_pointers_are_int64_and_counts_add_up() -> None:
    chunk = mixture_of(three_in_memory(), chunk_size=16).chunk(1)
    assert {column.dtype for column in chunk.pointers.arrays()} == {np.dtype(np.int64)}
    assert sum(chunk.counts.values()) == len(chunk) == len(chunk.pointers) == 16
    assert list(chunk.counts) == ["a", "b", "c"]
    numbers = chunk.pointers.dataset.tolist()
    assert chunk.counts == {name: numbers.count(i) for i, name in enumerate("abc")}


def test_pointers_slice_like_arrays_and_iterate_as_ints() -> None:
    pointers = mixture_of(three_in_memory()).chunk(0).pointers
    triples = list(pointers)
    assert list(pointers[1:3]) == triples[1:3]
    assert list(pointers[np.array([2, 0])]) == [triples[2], triples[0]]
    assert all(type(number) is int for triple in pointers for number in triple)


@pytest.mark.parametrize("k", [-1, 10, 1 << 40])
def test_a_chunk_outside_the_epoch_is_an_index_error(k: int) -> None:
    source = mixture_of(three_in_memory(), chunk_size=16, max_samples=160)
    with pytest.raises(IndexError, match=f"chunk {k}"):
        source.chunk(k)


def test_a_negative_epoch_is_an_index_error() -> None:
    with pytest.raises(IndexError, match="epoch is -1"):
        mixture_of(three_in_memory()).chunk(0, epoch=-1)


def test_an_endless_source_goes_on() -> None:
    source = mixture_of(three_in_memory(), exhausted_policy="repeat")
    assert source.total_samples == source.num_chunks == math.inf
    far = 10**12
    source.reset(source.state_dict() | {"chunks": far})
    assert next(source).index == far
    assert source.state_dict()["chunks"] == far + 1
    assert source.state_dict()["epoch"] == 0


def test_the_order_of_the_list_of_datasets_has_no_effect() -> None:
    forward = mixture_of(three_in_memory())
    backward = mixture_of(three_in_memory()[::-1])
    assert forward.fingerprint == backward.fingerprint
    assert forward.names == backward.names == ("a", "b", "c")
    assert whole(forward, 1) == whole(backward, 1)


def test_a_mapping_of_weights_is_as_good_as_a_spec() -> None:
    plain = StaticMixtureWorkSource([memory("a", 5)], {"a": 1})
    spec = StaticMixtureWorkSource([memory("a", 5)], MixtureSpec({"a": 1}))
    assert plain.fingerprint == spec.fingerprint
    assert spec.mixture == {"a": 1}


def test_a_source_pickles_with_its_place() -> None:
    source = mixture_of(three_in_memory(), chunk_size=16)
    next(source)
    copy = pickle.loads(pickle.dumps(source))
    assert copy.state_dict() == source.state_dict()
    assert [rows(chunk) for chunk in copy] == [rows(chunk) for chunk in source]


# --- states --------------------------------------------------------------------------------------


def test_the_state_names_the_place_and_the_plan() -> None:
    source = mixture_of(three_in_memory(), chunk_size=16)
    assert source.state_dict()["epoch"] == source.state_dict()["chunks"] == 0
    next(source)
    state = source.state_dict()
    assert (state["epoch"], state["chunks"]) == (0, 1)
    assert state["fingerprint"] == source.fingerprint
    assert json.loads(json.dumps(state)) == state


def test_after_the_last_chunk_the_state_says_the_next_epoch() -> None:
    source = mixture_of(three_in_memory(), chunk_size=16)
    for _ in range(int(source.num_chunks)):
        next(source)
    state = source.state_dict()
    assert (state["epoch"], state["chunks"]) == (1, 0)
    assert next(source, None) is None
    assert source.state_dict() == state
    assert next(source, None) is None, "an exhausted iterator stays exhausted"
    assert next(iter(source)).epoch == 1


def test_reset_without_a_state_begins_the_epoch_again() -> None:
    source = mixture_of(three_in_memory(), chunk_size=16)
    list(source)
    next(iter(source))
    source.reset()
    assert next(source).index == 0
    assert source.state_dict()["epoch"] == 1


FOREIGN: list[Any] = [
    {},
    {"epoch": 1},
    {"_snapshot": {}, "_steps_since_snapshot": 0},
    {"version": 1, "epoch": 0, "chunks": 0, "lanes": 1, "fingerprint": "x", "description": ""},
]


@pytest.mark.parametrize("state", FOREIGN)
def test_a_foreign_state_is_refused_and_leaves_the_node_where_it_was(state: Any) -> None:
    source = mixture_of(three_in_memory(), chunk_size=16)
    next(source)
    with pytest.raises(StateError):
        source.reset(state)
    assert next(source).index == 1


def test_a_state_of_another_plan_is_refused_in_words() -> None:
    source = mixture_of(three_in_memory(), chunk_size=16)
    next(source)
    other = mixture_of(three_in_memory(), chunk_size=16, seed=4)
    with pytest.raises(PlanMismatch, match="seed: 4 at the checkpoint, 3 now"):
        source.reset(other.state_dict())
    assert next(source).index == 1


def test_a_state_past_the_end_is_refused() -> None:
    source = mixture_of(three_in_memory(), chunk_size=16)
    with pytest.raises(StateError, match="99 chunks"):
        source.reset(source.state_dict() | {"chunks": 99})


# --- bad arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"chunk_size": 2.0}, "chunk_size is 2.0"),
        ({"seed": "7"}, "seed is '7'"),
        ({"interleave": "random"}, "interleave"),
        ({"shuffle_block_size": "all"}, "shuffle_block_size"),
        ({"shuffle_block_size": 0}, "shuffle_block_size"),
        ({"exhausted_policy": "loop"}, "exhausted_policy"),
        ({"exhausted_policy": {"z": "stop"}}, "'z'"),
        ({"max_repeats": -1}, "max_repeats"),
        ({"max_samples": 0}, "max_samples"),
        ({"stop_after_passes": 1, "exhausted_policy": "stop"}, "stop_after_passes"),
        ({"stop_after_passes": 1, "max_repeats": 1}, "stop_after_passes"),
        ({"reshuffle_on_repeat": 1}, "reshuffle_on_repeat"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        mixture_of(three_in_memory(), **options)


def test_datasets_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="non-empty list"):
        StaticMixtureWorkSource([], {"a": 1})
    with pytest.raises(ConfigurationError, match="no samples at all"):
        StaticMixtureWorkSource([memory("a", 0)], {"a": 1})
    with pytest.raises(ConfigurationError, match="list"):
        StaticMixtureWorkSource([[1, 2, 3]], {"a": 1})  # type: ignore[list-item]
    with pytest.raises(MixtureError, match="two datasets are named 'a'"):
        StaticMixtureWorkSource([memory("a", 1), memory("a", 2)], {"a": 1})
    with pytest.raises(MixtureError, match="'b' has no weight"):
        StaticMixtureWorkSource([memory("a", 1), memory("b", 2)], {"a": 1})
    with pytest.raises(MixtureError, match="'b'"):
        StaticMixtureWorkSource([memory("a", 1)], {"a": 1, "b": 1})


def test_what_a_source_and_a_chunk_say_of_themselves() -> None:
    source = one(memory("a", 10), chunk_size=4)
    assert "10 positions" in repr(source)
    assert repr(source.chunk(1)) == "WorkChunk(index=1, epoch=0, positions 4..8, {'a': 4})"
    assert "a" in source.describe()
