"""A plan as an IterableDataset, under torch's own loader."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.utils.data
from toys import as_list, flat, ids, memory, mixture_of, one, three_in_files, three_in_memory

from zephon_torch import DataLoader, StaticMixtureWorkSource, WorkSourceDataset
from zephon_torch.errors import (
    PlanMismatch,
    RecordError,
    StaleIteratorError,
    StateError,
    WorkerError,
    WorldError,
)
from zephon_torch.io import Dataset

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def shuffled(total: int = 40) -> StaticMixtureWorkSource:
    return one(memory("a", total), seed=5, chunk_size=8, shuffle_block_size="global")


def plan_order(source: StaticMixtureWorkSource, epoch: int = 0) -> list[int]:
    loader = DataLoader(source, batch_size=1)
    loader.set_epoch(epoch)
    return flat(ids(batch) for batch in loader)


def test_one_consumer_gets_the_plan_in_its_order_epoch_after_epoch() -> None:
    source = shuffled()
    dataset = WorkSourceDataset(source)
    for epoch in range(3):
        assert list(dataset) == plan_order(source, epoch)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
def test_consumers_are_disjoint_and_complete(num_workers: int, num_replicas: int) -> None:
    source = shuffled(41)
    per_rank = []
    for rank in range(num_replicas):
        dataset = WorkSourceDataset(source, rank=rank, num_replicas=num_replicas)
        loader = torch.utils.data.DataLoader(dataset, batch_size=3, num_workers=num_workers)
        per_rank.append(flat(ids(batch) for batch in loader))
    assert sorted(flat(per_rank)) == [*range(41)]
    counts = [len(part) for part in per_rank]
    assert max(counts) - min(counts) <= max(1, num_workers)


def test_more_consumers_than_samples() -> None:
    source = one(memory("a", 2))
    parts = []
    for rank in range(3):
        dataset = WorkSourceDataset(source, rank=rank, num_replicas=3)
        loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2)
        parts += [int(sample) for sample in loader]
    assert sorted(parts) == [0, 1]


def test_a_worker_started_by_spawn_gets_the_world_as_numbers() -> None:
    dataset = WorkSourceDataset(shuffled(8), rank=1, num_replicas=2)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn"
    )
    assert [int(sample) for sample in loader] == plan_order(shuffled(8))[1::2]


def test_files_and_mixtures_read_as_by_the_loader(tmp_path: Path) -> None:
    source = mixture_of(three_in_files(tmp_path))
    dataset = WorkSourceDataset(source)
    assert [sample["id"] for sample in dataset] == plan_order(source)


def test_persistent_workers_go_on_with_the_next_epoch() -> None:
    source = shuffled()
    loader = torch.utils.data.DataLoader(
        WorkSourceDataset(source), batch_size=4, num_workers=2, persistent_workers=True
    )
    epochs = [flat(ids(batch) for batch in loader) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [[*range(40)]] * 3
    assert epochs[0] != epochs[1] != epochs[2]


def test_new_workers_are_told_the_epoch() -> None:
    source = shuffled()
    dataset = WorkSourceDataset(source)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=1)
    for epoch in (0, 1, 5):
        dataset.set_epoch(epoch)
        assert flat(ids(batch) for batch in loader) == plan_order(source, epoch)


def draw(sample: int, rng: np.random.Generator) -> tuple[int, int]:
    return sample, int(rng.integers(1 << 60))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_draws_are_those_of_the_loader(num_workers: int) -> None:
    source = shuffled()
    ours = DataLoader(source, 4, transform=draw, takes_rng=True, collate_fn=as_list)
    expected = sorted(flat(ours))  # type: ignore[arg-type]
    dataset = WorkSourceDataset(source, transform=draw, takes_rng=True)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=4, collate_fn=as_list, num_workers=num_workers
    )
    assert sorted(flat(loader)) == expected


# --- states --------------------------------------------------------------------------------------


def test_it_resumes_anywhere_and_into_the_next_epoch() -> None:
    source = shuffled()
    two = plan_order(source, 0), plan_order(source, 1)
    for taken in (0, 1, 20, 39):
        dataset = WorkSourceDataset(source)
        assert list(islice(iter(dataset), taken)) == two[0][:taken]
        restored = WorkSourceDataset(source)
        restored.load_state_dict(dataset.state_dict())
        assert restored.state_dict() == dataset.state_dict()
        assert list(restored) == two[0][taken:]
        assert list(restored) == two[1]


def test_after_the_last_sample_the_state_says_the_next_epoch() -> None:
    source = shuffled()
    dataset = WorkSourceDataset(source)
    for _ in islice(iter(dataset), 40):
        pass
    restored = WorkSourceDataset(source)
    restored.load_state_dict(dataset.state_dict())
    assert list(restored) == plan_order(source, 1)


def test_a_loop_after_a_break_begins_the_epoch_again() -> None:
    dataset = WorkSourceDataset(shuffled())
    for _ in islice(iter(dataset), 10):
        pass
    assert list(dataset) == plan_order(shuffled())


def test_two_loops_at_once_never_mix_silently() -> None:
    dataset, order = WorkSourceDataset(shuffled(600)), plan_order(shuffled(600))
    first = iter(dataset)
    seen = [next(first) for _ in range(10)]
    second = iter(dataset)
    other = [next(second) for _ in range(300)]
    assert other == order[:300]
    try:
        seen += list(first)
        assert seen == order
    except StaleIteratorError:
        pass


def test_an_endless_source_goes_on() -> None:
    source = mixture_of(three_in_memory(), exhausted_policy="repeat")
    dataset = WorkSourceDataset(source)
    first = list(islice(iter(dataset), 1000))
    assert len(first) == 1000
    restored = WorkSourceDataset(source)
    restored.load_state_dict(dataset.state_dict())
    assert len(list(islice(iter(restored), 10))) == 10


def test_a_state_of_another_consumer_or_plan_is_refused() -> None:
    source = shuffled()
    state = WorkSourceDataset(source, rank=0, num_replicas=2).state_dict()
    for rank, num_replicas in ((1, 2), (0, 1), (0, 4)):
        other = WorkSourceDataset(source, rank=rank, num_replicas=num_replicas)
        with pytest.raises(StateError, match="consumer 0 of 2"):
            other.load_state_dict(state)
    with pytest.raises(PlanMismatch, match="samples"):
        WorkSourceDataset(shuffled(41), rank=0, num_replicas=2).load_state_dict(state)
    for foreign in ({}, None, {"epoch": 1}, {**state, "taken": -1}):
        with pytest.raises(StateError):
            WorkSourceDataset(source, rank=0, num_replicas=2).load_state_dict(foreign)  # type: ignore[arg-type]


def test_set_epoch_ends_a_load_only_for_another_epoch() -> None:
    source = shuffled()
    dataset = WorkSourceDataset(source)
    for _ in islice(iter(dataset), 10):
        pass
    state = dataset.state_dict()
    for epoch, expected in ((0, plan_order(source)[10:]), (2, plan_order(source, 2))):
        restored = WorkSourceDataset(source)
        restored.load_state_dict(state)
        restored.set_epoch(epoch)
        assert list(restored) == expected


# --- errors --------------------------------------------------------------------------------------


def test_started_as_one_of_several_but_not_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(WorldError, match="not initialised"):
        next(iter(WorkSourceDataset(shuffled())))


def stops(sample: Any) -> Any:
    return next(iter(()))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_stop_iteration_in_a_transform_is_an_error(num_workers: int) -> None:
    dataset = WorkSourceDataset(shuffled(), transform=stops)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, num_workers=num_workers)
    with pytest.raises(WorkerError, match="StopIteration"):
        list(loader)


def test_a_broken_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n{"id": \n')
    dataset = WorkSourceDataset(one(Dataset.from_path("web", tmp_path)))
    with pytest.raises(RecordError, match=r"'web'.*a\.jsonl.*line 2"):
        list(dataset)
