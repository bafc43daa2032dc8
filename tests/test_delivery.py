"""Order of delivery: lanes, rounds, global batches and ranks equal the oracle's, for any world."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon_torch.errors import ConfigurationError, WorldError
from zephon_torch.io import Dataset
from zephon_torch.work import StaticMixtureWorkSource
from zephon_torch.work.sharing.delivery import items_of, positions_of, rank_places
from zephon_torch.work.sharing.splitter import ChunkSplitter


def numbers(length: int, chunk_size: int, **options: Any) -> StaticMixtureWorkSource:
    """A source whose sample numbers are its positions (in the first pass)."""
    return StaticMixtureWorkSource(
        [Dataset.from_samples("numbers", range(length))],
        {"numbers": 1},
        shuffle_shards=False,
        chunk_size=chunk_size,
        **options,
    )


def split(
    source: StaticMixtureWorkSource, size: int, rank: int = 0, world: int = 1, **options: Any
) -> ChunkSplitter:
    return ChunkSplitter(source, global_batch_size=size, rank=rank, num_replicas=world, **options)


LANES = st.integers(1, 9)
CHUNKS = st.integers(1, 12)
LENGTHS = st.integers(1, 300)


# --- functions -----------------------------------------------------------------------------------


@settings(max_examples=300)
@given(LENGTHS, LANES, CHUNKS)
def test_delivery_equals_lanes_that_take_turns(length: int, lanes: int, chunk_size: int) -> None:
    found = positions_of(np.arange(length), lanes=lanes, chunk_size=chunk_size, length=length)
    expected = [position for _, position in oracle.delivery(length, lanes, chunk_size)]
    assert found.tolist() == expected
    assert sorted(expected) == list(range(length))
    if lanes == 1:
        assert expected == list(range(length))


@settings(max_examples=200)
@given(st.integers(1, 2**50), st.integers(1, 1000), st.integers(1, 20_000), st.data())
def test_delivery_far_out(length: int, lanes: int, chunk_size: int, data: st.DataObject) -> None:
    delivered = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=10))
    found = positions_of(
        np.array(delivered), lanes=lanes, chunk_size=chunk_size, length=length
    ).tolist()
    for at, position in zip(delivered, found, strict=True):
        whole = lanes * chunk_size
        start = at // whole * whole
        size = min(whole, length - start)
        share, longer = divmod(size, lanes)
        lane, offset = at % lanes, (at - start) // lanes
        assert position == start + lane * share + min(lane, longer) + offset
        assert start <= position < start + size
    assert len(set(found)) == len(set(delivered))


@settings(max_examples=300)
@given(st.integers(0, 200), st.integers(1, 60), LANES)
def test_a_batch_stands_lane_by_lane(start: int, size: int, lanes: int) -> None:
    found = items_of(np.array([start]), size, np.arange(size), lanes)[0].tolist()
    expected = [
        item for lane in range(lanes) for item in range(start, start + size) if item % lanes == lane
    ]
    assert found == expected


@settings(max_examples=200)
@given(st.integers(1, 100), st.integers(1, 20))
def test_ranks_share_a_batch_as_in_the_oracle(size: int, world: int) -> None:
    real = []
    for rank in range(world):
        places, valid = rank_places(size, rank=rank, num_replicas=world)
        mine, wanted = oracle.rank_slice(range(size), rank, world)
        assert places.tolist() == mine
        assert [True] * len(mine) == wanted if valid is None else valid.tolist() == wanted
        real += [place for place, is_real in zip(mine, wanted, strict=True) if is_real]
    assert real == list(range(size))


# --- the splitter --------------------------------------------------------------------------------


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """length, lanes, chunk size, world, global batch size."""
    world = draw(st.integers(1, 6))
    size = world * draw(st.integers(1, 8))
    return draw(LENGTHS), draw(LANES), draw(CHUNKS), world, size


@settings(max_examples=100)
@given(splits(), st.booleans())
def test_every_step_of_every_rank_equals_the_oracle(
    how: tuple[int, int, int, int, int], drop_last: bool
) -> None:
    length, lanes, chunk_size, world, size = how
    batches = oracle.global_batches(length, lanes, chunk_size, size)
    if drop_last and len(batches[-1]) < size:
        batches.pop()
    source = numbers(length, chunk_size)
    for rank in range(world):
        if not batches:
            with pytest.raises(ConfigurationError, match=str(length)):
                split(source, size, rank, world, lanes=lanes, drop_last=drop_last)
            continue
        splitter = split(source, size, rank, world, lanes=lanes, drop_last=drop_last)
        expected = [oracle.rank_slice(batch, rank, world) for batch in batches]
        assert len(splitter) == splitter.num_steps == len(batches)
        assert splitter.num_samples == sum(len(mine) for mine, _ in expected)
        assert splitter.total_size == world * splitter.num_samples
        assert [[p.sample for p in batch] for batch in splitter] == [mine for mine, _ in expected]
        for step in reversed(range(len(batches))):
            item = splitter.item(step)
            mine, valid = expected[step]
            assert item.pointers.sample.tolist() == mine
            assert splitter.pointers(step).sample.tolist() == mine
            assert valid == ([True] * len(mine) if item.valid is None else item.valid.tolist())
            assert (item.epoch, item.start, item.stop) == (
                0,
                step * size,
                step * size + len(batches[step]),
            )
        for step in (-1, len(batches)):
            with pytest.raises(IndexError):
                splitter.pointers(step)


@settings(max_examples=100)
@given(splits(), st.data())
def test_work_goes_on_from_anywhere_at_any_batch_size(
    how: tuple[int, int, int, int, int], data: st.DataObject
) -> None:
    length, lanes, chunk_size, world, size = how
    start = data.draw(st.integers(0, length - 1))
    batches = oracle.global_batches(length, lanes, chunk_size, size, start=start)
    source = numbers(length, chunk_size)
    for rank in range(world):
        splitter = split(source, size, rank, world, lanes=lanes)
        items = list(splitter.items(0, start))
        assert splitter.steps_between(start, length) == len(batches) == len(items)
        delivered = start
        for item, batch in zip(items, batches, strict=True):
            mine, valid = oracle.rank_slice(batch, rank, world)
            assert item.pointers.sample.tolist() == mine
            assert valid == ([True] * len(mine) if item.valid is None else item.valid.tolist())
            assert (item.start, item.stop) == (delivered, delivered + len(batch))
            delivered = item.stop
        assert delivered == length


@settings(max_examples=40)
@given(LENGTHS, LANES, CHUNKS, st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_set_and_order_of_a_global_batch_are_the_same_for_every_world(
    length: int, lanes: int, chunk_size: int, world: int
) -> None:
    source = numbers(length, chunk_size)
    alone = split(source, 12, lanes=lanes)
    ranks = [split(source, 12, rank, world, lanes=lanes) for rank in range(world)]
    for step in range(len(alone)):
        together = []
        for rank in ranks:
            item = rank.item(step)
            kept = slice(None) if item.valid is None else item.valid
            together += item.pointers.sample[kept].tolist()
            assert len(item.pointers) == len(ranks[0].item(step).pointers)
        assert together == alone.pointers(step).sample.tolist()


def test_one_lane_is_the_order_of_the_plan() -> None:
    splitter = split(numbers(100, 7), 8)
    assert [p.sample for batch in splitter for p in batch] == list(range(100))


def test_a_step_of_a_mixture_in_a_later_epoch_is_the_plan_at_its_positions() -> None:
    source = StaticMixtureWorkSource(
        [
            Dataset.from_samples("a", range(70), shard_sizes=[30, 40]),
            Dataset.from_samples("b", range(20), shard_sizes=[20]),
        ],
        {"a": 0.7, "b": 0.3},
        chunk_size=8,
        shuffle_within_shard=True,
    )
    length = int(source.total_samples)
    batches = oracle.global_batches(length, 4, 8, 12)
    for epoch in (0, 1, 5):
        for rank in range(3):
            splitter = split(source, 12, rank, 3, lanes=4)
            for step, batch in enumerate(batches):
                mine, _ = oracle.rank_slice(batch, rank, 3)
                assert list(splitter.pointers(step, epoch)) == list(source.pointers(mine, epoch))
            splitter.set_epoch(epoch)
            assert splitter.epoch == epoch
            assert [tuple(p[2:]) for p in next(iter(splitter))] == list(
                source.pointers(oracle.rank_slice(batches[0], rank, 3)[0], epoch)
            )
            assert next(iter(splitter))[0].epoch == epoch


def test_an_endless_plan_is_delivered_round_after_round() -> None:
    lanes, chunk_size, size = 3, 4, 6
    source = numbers(10_000, chunk_size, exhausted_policy="repeat")
    splitter = split(source, size, rank=1, world=2, lanes=lanes)
    batches = oracle.global_batches(40 * lanes * chunk_size, lanes, chunk_size, size)
    expected = [oracle.rank_slice(batch, 1, 2)[0] for batch in batches]
    got = [[p.sample for p in batch] for batch in islice(splitter, len(batches))]
    assert got == expected
    assert splitter.pointers(7).sample.tolist() == expected[7]
    assert splitter.num_steps == math.inf
    with pytest.raises(TypeError):
        len(splitter)
    with pytest.raises(TypeError):
        _ = splitter.num_samples


@settings(max_examples=60)
@given(
    LENGTHS,
    st.integers(1, 4),
    st.integers(1, 3),
    CHUNKS,
)
def test_the_node_gives_whole_lanes_to_ranks(
    length: int, world: int, factor: int, chunk_size: int
) -> None:
    lanes = world * factor
    source = numbers(length, chunk_size)
    rounds = oracle.lane_queues(length, lanes, chunk_size)
    for rank in range(world):
        node = split(source, world, rank, world, lanes=lanes).node()
        expected = [
            queue
            for queues in rounds
            for queue in queues[rank * factor : (rank + 1) * factor]
            if queue
        ]
        found = [(c.start, c.stop, c.pointers.sample.tolist()) for c in node]
        assert found == [(queue[0], queue[-1] + 1, queue) for queue in expected]


def test_a_node_needs_whole_lanes() -> None:
    with pytest.raises(WorldError, match=r"3.*4|4.*3"):
        split(numbers(100, 5), 12, 0, 3, lanes=4).node()


@pytest.mark.parametrize(
    ("size", "rank", "world"), [(10, 0, 3), (10, 3, 3), (12, 3, 3), (12, -1, 3), (2, 0, 3)]
)
def test_worlds_that_do_not_fit_are_refused(size: int, rank: int, world: int) -> None:
    with pytest.raises(WorldError):
        split(numbers(100, 5), size, rank, world)


@pytest.mark.parametrize("options", [{"lanes": 0}, {"global_batch_size": 0}, {"batch_size": 0}])
def test_sizes_below_one_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError):
        ChunkSplitter(numbers(100, 5), **{"batch_size": 4, "rank": 0, "num_replicas": 1, **options})
