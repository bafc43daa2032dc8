"""A resume costs the same anywhere: nothing is read, transformed or computed for what was skipped.

The datasets are computed from the number of a sample, a trillion of them, and everything goes
through the loader.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from toys import as_list, ids, one, write_shards

from zephon_torch import ChunkSplitter, DataLoader, StaticMixtureWorkSource, WorkSourceDataset
from zephon_torch.io import Dataset
from zephon_torch.io.formats.json import mapped_lines
from zephon_torch.nodes.windows import FOR_READER
from zephon_torch.work import Plan, Pointers

TRILLION = 10**12
BATCH = 16
PREFETCH = 2
FIRST_SLAB = 8 * BATCH  # positions that are computed before the first batch
SLAB = 1 << 14
PLACES = [0, BATCH, TRILLION // 2, TRILLION - 10 * BATCH]
PLACE_IDS = ["at the start", "near the start", "in the middle", "near the end"]


class Computed:
    """Sample number n, made on demand; counts how often it is asked."""

    def __init__(self, total: int) -> None:
        self.total, self.calls = total, 0

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> int:
        assert 0 <= index < self.total
        self.calls += 1
        return index


@dataclass
class Counted:
    """What was computed since it was last cleared."""

    positions: int = 0
    transforms: int = 0
    seen: list[int] = field(default_factory=list)

    def transform(self, sample: int, rng: np.random.Generator) -> int:
        self.transforms += 1
        return sample


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    """Counts plan positions; all of them go through Plan.pointers."""
    counts = Counted()
    pointers = Plan.pointers

    def counting(self: Plan, positions: npt.ArrayLike, epoch: int = 0) -> Pointers:
        found = pointers(self, positions, epoch)
        counts.positions += len(found)
        return found

    monkeypatch.setattr(Plan, "pointers", counting)
    yield counts


def sources(block: Any) -> tuple[StaticMixtureWorkSource, list[Computed]]:
    computed = [Computed(TRILLION), Computed(TRILLION // 10)]
    datasets = [Dataset.from_torch(name, data) for name, data in zip("ab", computed, strict=True)]
    source = StaticMixtureWorkSource(
        datasets, {"a": 0.9, "b": 0.1}, shuffle_block_size=block, max_samples=TRILLION
    )
    return source, computed


@pytest.mark.parametrize("delivered", PLACES, ids=PLACE_IDS)
@pytest.mark.parametrize("block", [None, 1000, "global"])
@pytest.mark.parametrize("num_threads", [0, 2])
def test_nothing_is_done_for_what_was_skipped(
    counted: Counted, delivered: int, block: Any, num_threads: int
) -> None:
    source, computed = sources(block)
    loader = DataLoader(
        source, BATCH, transform=counted.transform, takes_rng=True, collate_fn=as_list,
        num_threads=num_threads, prefetch_factor=PREFETCH,
    )  # fmt: skip
    state = loader.state_dict() | {"epoch": 7, "delivered": delivered}
    assert counted.positions == 0

    loader.load_state_dict(state)
    assert loader.state_dict() == state and loader.remaining > 0 and len(loader) > 0
    assert counted.positions == counted.transforms == sum(c.calls for c in computed) == 0

    loop = iter(loader)
    first = next(loop)
    assert counted.positions <= FIRST_SLAB
    assert sum(c.calls for c in computed) <= (1 + PREFETCH) * BATCH
    assert counted.transforms <= (1 + PREFETCH) * BATCH
    second = next(loop)
    assert counted.positions <= FIRST_SLAB
    assert sum(c.calls for c in computed) <= (2 + PREFETCH) * BATCH
    loader.close()

    expected = source.pointers(np.arange(delivered, delivered + 2 * BATCH), 7)
    assert first + second == expected.sample.tolist()


@pytest.mark.parametrize("delivered", PLACES, ids=PLACE_IDS)
def test_with_lanes_and_ranks_too(counted: Counted, delivered: int) -> None:
    source, computed = sources("global")
    loader = DataLoader(source, BATCH, lanes=64, rank=3, num_replicas=4)
    delivered = delivered // 64 * 64
    loader.load_state_dict(loader.state_dict() | {"delivered": delivered, "lanes": 64})
    next(iter(loader))
    assert counted.positions <= FIRST_SLAB
    assert sum(c.calls for c in computed) == BATCH


def test_a_long_run_computes_each_position_once(counted: Counted) -> None:
    source, computed = sources("global")
    loader = DataLoader(source, BATCH)
    loader.load_state_dict(loader.state_dict() | {"delivered": TRILLION // 2})
    steps = 3000
    for _, _ in zip(range(steps), loader, strict=False):
        pass
    assert sum(c.calls for c in computed) <= (steps + 1) * BATCH
    assert counted.positions <= (steps + 1) * BATCH + SLAB


@pytest.mark.parametrize("delivered", PLACES, ids=PLACE_IDS)
def test_a_single_step_computes_its_own_samples_only(counted: Counted, delivered: int) -> None:
    source, computed = sources("global")
    loader = DataLoader(source, BATCH)
    loader.batch(delivered // BATCH)
    assert counted.positions == sum(c.calls for c in computed) == BATCH


@pytest.mark.parametrize("delivered", PLACES, ids=PLACE_IDS)
def test_the_last_batches_end_the_epoch(counted: Counted, delivered: int) -> None:
    """Near the end the rest of the epoch is run to its end, and the next begins."""
    if TRILLION - delivered > 1000:
        pytest.skip("too far from the end")
    source, computed = sources("global")
    loader = DataLoader(source, BATCH)
    loader.load_state_dict(loader.state_dict() | {"delivered": delivered})
    batches = [ids(batch) for batch in loader]
    assert len(batches) == 10
    assert (loader.epoch, loader.delivered) == (1, 0)
    assert ids(next(iter(loader))) == source.pointers(np.arange(BATCH), 1).sample.tolist()
    assert counted.positions <= 10 * BATCH + FIRST_SLAB + BATCH
    assert sum(c.calls for c in computed) == 11 * BATCH


def test_readers_of_files_are_asked_for_what_is_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = Dataset.from_path("a", write_shards(tmp_path, [300] * 10))
    asked: list[Any] = []
    parse = mapped_lines.parse_lines

    def noting(lines: Sequence[Any]) -> list[Any]:
        asked.extend(lines)
        return parse(lines)

    monkeypatch.setattr(mapped_lines, "parse_lines", noting)
    for prefetch_factor, most in ((PREFETCH, 1 + PREFETCH), (None, 1 + 2 * FOR_READER.text)):
        for delivered in (0, 1488, 2992):
            source = one(dataset, max_samples=3000, shuffle_block_size="global")
            with DataLoader(source, BATCH, prefetch_factor=prefetch_factor) as loader:
                loader.load_state_dict(loader.state_dict() | {"delivered": delivered})
                asked.clear()
                next(iter(loader))
                assert 8 <= len(asked) <= most * BATCH


def test_nodes_and_iterable_datasets_do_not_replay_either(counted: Counted) -> None:
    source, computed = sources("global")
    k = TRILLION // source.chunk_size // 2
    source.reset(source.state_dict() | {"chunks": k})
    assert next(source).start == k * source.chunk_size
    assert counted.positions == source.chunk_size

    counted.positions = 0
    node = ChunkSplitter(source, batch_size=1, lanes=4, rank=1, num_replicas=2).node()
    node.reset(node.state_dict() | {"chunks": 10**6})
    next(node)
    assert counted.positions == source.chunk_size

    counted.positions = 0
    dataset = WorkSourceDataset(source)
    dataset.load_state_dict(dataset.state_dict() | {"taken": TRILLION // 2})
    next(iter(dataset))
    assert counted.positions == sum(c.calls for c in computed) <= 1024


@pytest.mark.parametrize("delivered", PLACES, ids=PLACE_IDS)
def test_memory_does_not_grow_with_the_number_of_samples(delivered: int) -> None:
    sources("global")  # what is imported and cached once
    tracemalloc.start()
    try:
        source, _ = sources("global")
        loader = DataLoader(source, BATCH)
        loader.load_state_dict(loader.state_dict() | {"delivered": delivered})
        loop = iter(loader)
        for _ in range(9):
            next(loop)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20, "a slab of pointers and a few batches"
