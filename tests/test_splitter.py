"""The splitter: what each rank gets, as a sampler, by step, and as a torchdata node."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DistributedSampler, SequentialSampler
from toys import memory, mixture_of, one, three_in_memory

from zephon_torch import ChunkSplitter
from zephon_torch.errors import ConfigurationError, StateError, WorldError
from zephon_torch.work import Pointers, WorkChunk, WorkSource

Row = tuple[int, ...]


def rows(pointers: Pointers) -> list[Row]:
    return list(zip(*(column.tolist() for column in pointers.arrays()), strict=True))


def at_positions(source: WorkSource, start: int, stop: int, epoch: int = 0) -> list[Row]:
    return rows(source.pointers(np.arange(start, stop), epoch))


def world_of(source: WorkSource, num_replicas: int, **options: Any) -> list[ChunkSplitter]:
    return [
        ChunkSplitter(source, rank=rank, num_replicas=num_replicas, **options)
        for rank in range(num_replicas)
    ]


def global_batches(splitters: list[ChunkSplitter], epoch: int = 0) -> list[list[Row]]:
    """Global batches in order, ranks one after the other, padding left out."""
    steps = [
        [splitter.item(step, epoch) for splitter in splitters] for step in range(len(splitters[0]))
    ]
    return [
        [
            row
            for item in items
            for row, valid in zip(
                rows(item.pointers),
                [True] * len(item.pointers) if item.valid is None else item.valid.tolist(),
                strict=True,
            )
            if valid
        ]
        for items in steps
    ]


# --- which samples -------------------------------------------------------------------------------


def test_one_rank_and_one_lane_gets_the_plan_in_its_order() -> None:
    source = mixture_of(three_in_memory(), max_samples=46)
    (splitter,) = world_of(source, 1, batch_size=4)
    batches = [rows(splitter.pointers(step)) for step in range(len(splitter))]
    assert [row for batch in batches for row in batch] == at_positions(source, 0, 46)
    assert [len(batch) for batch in batches] == [4] * 11 + [2]


@pytest.mark.parametrize("lanes", [1, 2, 3, 4, 8, 12])
@pytest.mark.parametrize("drop_last", [False, True])
def test_global_batches_are_the_same_for_every_world(lanes: int, drop_last: bool) -> None:
    source = mixture_of(three_in_memory(), chunk_size=5, max_samples=76)
    options = {"global_batch_size": 12, "lanes": lanes, "drop_last": drop_last}
    alone = global_batches(world_of(source, 1, **options), epoch=2)
    for num_replicas in (2, 3, 4, 6, 12):
        assert global_batches(world_of(source, num_replicas, **options), epoch=2) == alone
    delivered = [row for batch in alone for row in batch]
    everything = at_positions(source, 0, 76, epoch=2)
    if drop_last:
        assert len(delivered) == len(set(delivered)) == 72
        assert set(delivered) <= set(everything)
    else:
        assert sorted(delivered) == sorted(everything)


@given(
    total=st.integers(1, 60),
    chunk_size=st.integers(1, 12),
    lanes=st.integers(1, 6),
    per_rank=st.integers(1, 6),
    num_replicas=st.integers(1, 4),
)
def test_every_sample_once_for_any_sizes(
    total: int, chunk_size: int, lanes: int, per_rank: int, num_replicas: int
) -> None:
    source = one(memory("a", total), chunk_size=chunk_size)
    splitters = world_of(source, num_replicas, batch_size=per_rank, lanes=lanes)
    delivered = [row for batch in global_batches(splitters) for row in batch]
    assert sorted(delivered) == at_positions(source, 0, total)
    widths = {len(s.pointers(step)) for s in splitters for step in range(len(s) - 1)}
    assert widths <= {per_rank}
    last = {len(s.pointers(len(s) - 1)) for s in splitters}
    assert len(last) == 1, "every rank gets as many samples, padding included"


def test_any_step_of_any_epoch_is_computed_directly() -> None:
    source = mixture_of(three_in_memory())
    (splitter,) = world_of(source, 1, batch_size=4)
    for epoch in (0, 3, 10**6):
        streamed = [item.pointers for item in splitter.items(epoch, 0)]
        for step in (len(splitter) - 1, 0, 7):
            assert rows(splitter.pointers(step, epoch)) == rows(streamed[step])


def test_steps_far_into_an_endless_plan() -> None:
    source = mixture_of(three_in_memory(), exhausted_policy="repeat")
    (splitter,) = world_of(source, 1, batch_size=4, lanes=2)
    step = 10**13
    assert len(splitter.pointers(step)) == 4
    item = next(splitter.items(0, step * 4))
    assert rows(item.pointers) == rows(splitter.pointers(step))
    assert splitter.num_steps == math.inf
    for ask in (len, lambda s: s.num_samples, lambda s: len(s.dataset)):
        with pytest.raises(TypeError, match="never ends"):
            ask(splitter)


@pytest.mark.parametrize("step", [-1, 12])
def test_a_step_outside_the_epoch(step: int) -> None:
    (splitter,) = world_of(mixture_of(three_in_memory(), max_samples=46), 1, batch_size=4)
    with pytest.raises(IndexError, match=f"step {step} of an epoch of 12 steps"):
        splitter.pointers(step)


def test_padding_repeats_a_real_sample_and_is_marked() -> None:
    """21 ids, 4 ranks of 4: the last global batch holds 5, so each rank gets 2."""
    source = one(memory("a", 21))
    items = [splitter.item(1) for splitter in world_of(source, 4, batch_size=4)]
    assert [item.pointers.sample.tolist() for item in items] == [
        [16, 17], [18, 19], [20, 20], [20, 20],
    ]  # fmt: skip
    assert [None if item.valid is None else item.valid.tolist() for item in items] == [
        None, None, [True, False], [False, False],
    ]  # fmt: skip


def test_a_rank_without_any_sample_of_its_own_repeats_the_last_one() -> None:
    items = [s.item(0) for s in world_of(one(memory("a", 2)), 4, batch_size=1)]
    assert [item.pointers.sample.tolist() for item in items] == [[0], [1], [1], [1]]
    valid = [True if item.valid is None else bool(item.valid[0]) for item in items]
    assert sorted(valid) == [False, False, True, True]
    real = [item.pointers.sample[0] for item, v in zip(items, valid, strict=True) if v]
    assert sorted(real) == [0, 1]


# --- what torch code finds -----------------------------------------------------------------------


def test_it_is_a_distributed_sampler_whose_attributes_are_true() -> None:
    source = mixture_of(three_in_memory(), max_samples=46)
    splitter = ChunkSplitter(source, batch_size=4, rank=1, num_replicas=2, drop_last=True)
    assert isinstance(splitter, DistributedSampler)
    assert (splitter.rank, splitter.num_replicas, splitter.epoch) == (1, 2, 0)
    assert (splitter.seed, splitter.drop_last, splitter.batch_size) == (3, True, 4)
    assert splitter.global_batch_size == 8
    assert len(splitter.dataset) == source.total_samples == 46


def test_shuffle_says_whether_the_order_is_shuffled() -> None:
    shuffled = one(memory("a", 8), shuffle_block_size="global")
    sequential = one(memory("a", 8), shuffle_shards=False)
    assert ChunkSplitter(shuffled, batch_size=2).shuffle is True
    assert ChunkSplitter(sequential, batch_size=2).shuffle is False


@pytest.mark.parametrize("total", [1, 5, 8, 9, 16, 21, 24])
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_its_lengths_are_what_it_yields(total: int, num_replicas: int, drop_last: bool) -> None:
    source = one(memory("a", total))
    options: dict[str, Any] = {"global_batch_size": 8, "drop_last": drop_last}
    if drop_last and total < 8:
        with pytest.raises(ConfigurationError, match=f"{total} samples"):
            world_of(source, num_replicas, **options)
        return
    for splitter in world_of(source, num_replicas, **options):
        batches = list(splitter)
        assert len(splitter) == len(batches)
        assert splitter.num_samples == sum(map(len, batches))
        assert splitter.total_size == num_replicas * splitter.num_samples


def test_iterating_has_no_position() -> None:
    (splitter,) = world_of(mixture_of(three_in_memory()), 1, batch_size=4)
    first = next(iter(splitter))
    assert next(iter(splitter)) == first
    assert list(splitter) == list(splitter)


def test_a_sampler_in_place_of_its_source_is_refused() -> None:
    (splitter,) = world_of(mixture_of(three_in_memory()), 1, batch_size=4)
    for sampler in (splitter, SequentialSampler(range(9))):
        with pytest.raises(ConfigurationError, match=f"a {type(sampler).__name__} was to be put"):
            type(splitter)(sampler, batch_size=4, drop_last=False)  # type: ignore[arg-type]


def test_set_epoch_changes_what_iterating_gives() -> None:
    source = one(memory("a", 30), shuffle_block_size="global")
    (splitter,) = world_of(source, 1, batch_size=4)
    orders = []
    for epoch in (0, 1, 0):
        splitter.set_epoch(epoch)
        assert splitter.epoch == epoch
        orders.append([(p.epoch, p.sample) for batch in splitter for p in batch])
    assert orders[0] == orders[2] != orders[1]
    assert {epoch for epoch, _ in orders[1]} == {1}


def test_items_of_a_batch_name_the_sample() -> None:
    source = mixture_of(three_in_memory())
    (splitter,) = world_of(source, 1, batch_size=4)
    batch = next(iter(splitter))
    assert [(p.dataset, p.shard, p.sample, p.pass_index) for p in batch] == rows(
        splitter.pointers(0)
    )


def test_the_world_comes_from_torch_at_the_first_use() -> None:
    splitter = ChunkSplitter(one(memory("a", 16)), batch_size=2)
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        assert (splitter.rank, splitter.num_replicas, splitter.global_batch_size) == (3, 4, 8)
        assert [p.sample.tolist() for p in map(splitter.pointers, range(2))] == [[6, 7], [14, 15]]
    finally:
        dist.destroy_process_group()


# --- errors --------------------------------------------------------------------------------------


def test_a_global_batch_that_the_ranks_cannot_share() -> None:
    source = one(memory("a", 100))
    with pytest.raises(WorldError, match=r"global_batch_size 10 .* 4 ranks.* 8 or 12"):
        ChunkSplitter(source, global_batch_size=10, rank=0, num_replicas=4)
    with pytest.raises(WorldError, match=r"global_batch_size 3 .* 4 ranks.* 4$"):
        ChunkSplitter(source, global_batch_size=3, rank=0, num_replicas=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give one of"),
        ({"batch_size": 2, "global_batch_size": 4}, "give one of"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": -1}, "batch_size is -1"),
        ({"batch_size": 2.0}, "batch_size is 2.0"),
        ({"batch_size": True}, "batch_size is True"),
        ({"global_batch_size": 0}, "global_batch_size is 0"),
        ({"batch_size": 2, "lanes": 0}, "lanes is 0"),
        ({"batch_size": 2, "rank": 2, "num_replicas": 2}, "rank 2"),
        ({"batch_size": 2, "rank": 0}, "give both"),
        ({"batch_size": 9, "drop_last": True, "rank": 0, "num_replicas": 1}, "8 samples.*9"),
        ({"batch_size": 5, "drop_last": True, "rank": 0, "num_replicas": 2}, "8 samples.*10"),
    ],
)
def test_sizes_that_cannot_work(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ChunkSplitter(one(memory("a", 8)), **options)


def test_a_batch_that_no_world_can_fill_is_refused_at_construction() -> None:
    with pytest.raises(ConfigurationError, match="8 samples"):
        ChunkSplitter(one(memory("a", 8)), batch_size=9, drop_last=True)


# --- as a torchdata node -------------------------------------------------------------------------


def chunks_of(source: WorkSource, num_replicas: int, lanes: int) -> list[list[WorkChunk]]:
    splitters = world_of(source, num_replicas, batch_size=1, lanes=lanes)
    return [list(splitter.node()) for splitter in splitters]


@pytest.mark.parametrize("total", [1, 5, 24, 30, 48, 49, 95])
@pytest.mark.parametrize(("num_replicas", "lanes"), [(1, 1), (1, 4), (2, 2), (2, 4), (4, 4)])
def test_the_pieces_of_all_ranks_cover_everything_once(
    total: int, num_replicas: int, lanes: int
) -> None:
    source = one(memory("a", total), chunk_size=6)
    ranks = chunks_of(source, num_replicas, lanes)
    spans = sorted((c.start, c.stop) for chunks in ranks for c in chunks)
    assert spans[0][0] == 0 and spans[-1][1] == total
    assert all(a[1] == b[0] for a, b in pairwise(spans))
    for chunk in (c for chunks in ranks for c in chunks):
        assert len(chunk) == chunk.stop - chunk.start > 0
        assert rows(chunk.pointers) == at_positions(source, chunk.start, chunk.stop)
    sizes = [sum(map(len, chunks)) for chunks in ranks]
    assert max(sizes) - min(sizes) <= lanes // num_replicas


def test_a_node_gives_the_samples_that_the_steps_of_its_rank_give() -> None:
    """Where every lane belongs to one rank, chunks and steps are the same split."""
    source = mixture_of(three_in_memory(), chunk_size=6, max_samples=72)
    for splitter in world_of(source, 2, global_batch_size=8, lanes=4):
        by_step = [row for step in range(len(splitter)) for row in rows(splitter.pointers(step))]
        by_chunk = [row for chunk in splitter.node() for row in rows(chunk.pointers)]
        assert sorted(by_step) == sorted(by_chunk)


def test_whole_chunks_are_those_of_the_source() -> None:
    source = mixture_of(three_in_memory(), chunk_size=6, max_samples=48)
    (first, second) = chunks_of(source, 2, lanes=4)
    assert [chunk.index for chunk in first] == [0, 1, 4, 5]
    assert [chunk.index for chunk in second] == [2, 3, 6, 7]
    assert rows(second[1].pointers) == rows(source.chunk(3).pointers)


def test_a_node_goes_on_with_the_next_epoch() -> None:
    source = one(memory("a", 30), chunk_size=6, shuffle_block_size="global")
    node = ChunkSplitter(source, batch_size=2, lanes=2, rank=0, num_replicas=2).node()
    epochs = [list(node) for _ in range(2)]
    assert [chunk.epoch for chunk in epochs[1]] == [1] * len(epochs[1])
    assert rows(epochs[0][0].pointers) != rows(epochs[1][0].pointers)


def test_a_node_needs_whole_lanes() -> None:
    splitter = ChunkSplitter(one(memory("a", 40)), batch_size=2, lanes=3, rank=0, num_replicas=2)
    with pytest.raises(WorldError, match=r"2 ranks.* 3: set lanes="):
        splitter.node()


@pytest.mark.parametrize(("num_replicas", "lanes"), [(2, 4), (1, 2), (4, 4)])
def test_the_state_of_a_node_is_not_taken_for_one_of_another_split(
    num_replicas: int, lanes: int
) -> None:
    """A number of chunks means something else with other ranks or lanes: samples would be lost."""
    source = one(memory("a", 48), chunk_size=6)
    node = ChunkSplitter(source, batch_size=2, lanes=4, rank=0, num_replicas=1).node()
    for _ in range(4):
        next(node)
    other = ChunkSplitter(source, batch_size=2, lanes=lanes, rank=0, num_replicas=num_replicas)
    with pytest.raises(StateError):
        other.node().reset(node.state_dict())
