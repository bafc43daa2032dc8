"""Rank and world size: where they come from, and when they are fixed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from processes import exit_code, forked
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from toys import memory

from zephon_torch import DataLoader
from zephon_torch.errors import WorldError
from zephon_torch.work.sharing.world import World


@pytest.fixture
def rank_1_of_4() -> Iterator[None]:
    """torch.distributed as if this process were one of four; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def test_alone_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert World().resolve() == (0, 1)


def test_arguments_win_over_torch(rank_1_of_4: None) -> None:
    world = World(2, 3)
    assert (world.rank, world.num_replicas) == world.resolve() == (2, 3)


def test_torch_is_asked_at_the_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        assert world.resolve() == (1, 4)
    finally:
        dist.destroy_process_group()


def test_it_is_fixed_by_the_first_use() -> None:
    world = World()
    assert world.resolve() == (0, 1)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        with pytest.raises(WorldError, match=r"rank 0 of 1.*rank 1 of 4.*init_process_group"):
            world.resolve()
    finally:
        dist.destroy_process_group()


def test_started_as_one_of_several_but_not_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(WorldError, match=r"WORLD_SIZE=2.*init_process_group"):
        World().resolve()
    assert World(0, 2).resolve() == (0, 2)


def test_a_loader_never_feeds_two_ranks_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Built before torch.distributed is initialised, as trainers do."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = DataLoader(memory("a", 8), batch_size=2)
    for use in (len, iter, lambda loader: loader.batch(0)):
        with pytest.raises(WorldError, match="not initialised"):
            use(loader)
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        assert [batch.tolist() for batch in loader] == [[2, 3], [6, 7]]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "give both"),
        ({"num_replicas": 2}, "give both"),
        ({"rank": 2, "num_replicas": 2}, "rank 2 of num_replicas 2"),
        ({"rank": -1, "num_replicas": 2}, "rank -1"),
        ({"rank": 0, "num_replicas": 0}, "num_replicas 0"),
        ({"rank": 0.0, "num_replicas": 2}, "rank is 0.0"),
        ({"rank": True, "num_replicas": 2}, "rank is True"),
    ],
)
def test_numbers_that_cannot_work(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(WorldError, match=message):
        World(**arguments)


def test_a_mesh_of_one_dimension(rank_1_of_4: None) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    assert World(mesh=mesh).resolve() == (1, 4)


def test_a_named_dimension_of_a_larger_mesh(rank_1_of_4: None) -> None:
    """Rank 1 is the second tensor-parallel peer of the first data-parallel rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert World(mesh=mesh["dp"]).resolve() == (0, 2)
    assert World(mesh=mesh["tp"]).resolve() == (1, 2)


def test_a_mesh_of_two_dimensions_is_refused_by_name(rank_1_of_4: None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(WorldError, match="'dp', 'tp'"):
        World(mesh=mesh)


def test_a_mesh_and_numbers_are_one_too_many(rank_1_of_4: None) -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    with pytest.raises(WorldError, match="either a mesh or rank"):
        World(0, 4, mesh)


def test_tensor_parallel_peers_get_identical_batches(rank_1_of_4: None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    loader = DataLoader(memory("a", 8), global_batch_size=4, mesh=mesh["dp"])
    assert [batch.tolist() for batch in loader] == [[0, 1], [4, 5]]


class _Store:
    """What torch.distributed's store does, in one process."""

    def __init__(self) -> None:
        self.asked = 0

    def compare_set(self, key: str, expected: str, words: str) -> bytes:
        self.asked += 1
        return b"another rank was here"


def test_the_first_rank_is_asked_for_but_never_by_a_forked_child(
    rank_1_of_4: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child would share the connection of its parent's store."""
    store = _Store()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    assert World().first_said("mine") == "another rank was here"
    assert World(1, 4).first_said("mine") == "mine"

    def asks_nobody() -> None:
        assert (World().first_said("mine"), store.asked) == ("mine", 1)

    with forked(asks_nobody) as child:
        assert exit_code(child) == 0
    assert store.asked == 1
