"""Everything that has a state resumes exactly: nodes, loader on every engine, iterable dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torchdata.nodes
from conformance import Subject, check_resume
from torchdata.stateful_dataloader import StatefulDataLoader
from toys import SIZES, ids, memory, mixture_of, one, three_in_files, three_in_memory

from zephon_torch import ChunkSplitter, DataLoader, WorkSourceDataset
from zephon_torch.io import Dataset
from zephon_torch.work import WorkChunk

MORE_WORKERS_THAN_CPUS = "ignore:This DataLoader will create"
pytestmark = [
    pytest.mark.filterwarnings(MORE_WORKERS_THAN_CPUS),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata's own
]


def chunk_key(chunk: WorkChunk) -> tuple[Any, ...]:
    columns = [column.tolist() for column in chunk.pointers.arrays()]
    return chunk.epoch, chunk.index, chunk.start, chunk.stop, columns


def identity(item: Any) -> Any:
    return item


def load_node(node: Any, state: Any) -> None:
    node.reset(state)


def loop_node(node: Any) -> Iterator[Any]:
    return iter(node)


def node_subject(make: Callable[[], Any], look: Callable[[Any], Any]) -> Subject:
    """A torchdata node by itself, as a plain iterator."""
    return Subject(make=make, look=look, load=load_node, loop=loop_node)


def loader_subject(make: Callable[[], DataLoader], look: Callable[[Any], Any] = ids) -> Subject:
    return Subject(make=make, look=look, close=lambda loader: loader.close())


def close_torchdata(loader: Any) -> None:
    """Ends the threads of the nodes below."""
    root = loader.root
    if hasattr(root, "_it") and root._it is not None:
        root._it._shutdown()


# --- nodes ---------------------------------------------------------------------------------------


def source() -> Any:
    return mixture_of(three_in_memory(), chunk_size=16)


def rank_node() -> Any:
    return ChunkSplitter(source(), batch_size=4, lanes=4, rank=1, num_replicas=2).node()


@pytest.mark.parametrize("make", [source, rank_node])
def test_a_node_by_itself(make: Callable[[], Any]) -> None:
    check_resume(node_subject(make, chunk_key), product=True)


@pytest.mark.parametrize("make", [source, rank_node])
@pytest.mark.parametrize("restart", [True, False])
def test_a_node_under_torchdatas_loader(make: Callable[[], Any], restart: bool) -> None:
    check_resume(
        Subject(
            make=lambda: torchdata.nodes.Loader(make(), restart_on_stop_iteration=restart),
            look=chunk_key,
            fresh=False,  # torchdata hands out the state it keeps
        ),
        product=True,
    )


@pytest.mark.parametrize("make", [source, rank_node])
def test_a_node_under_a_prefetcher(make: Callable[[], Any]) -> None:
    check_resume(
        Subject(
            make=lambda: torchdata.nodes.Loader(
                torchdata.nodes.Prefetcher(make(), prefetch_factor=3)
            ),
            look=chunk_key,
            fresh=False,
            close=close_torchdata,
        )
    )


def test_a_node_under_a_parallel_mapper_of_threads() -> None:
    check_resume(
        Subject(
            make=lambda: torchdata.nodes.Loader(
                torchdata.nodes.ParallelMapper(
                    source(), chunk_key, num_workers=2, method="thread", prebatch=None
                )
            ),
            look=identity,
            fresh=False,
            close=lambda loader: close_mapper(loader.root),
        )
    )


def close_mapper(mapper: Any) -> None:
    iterator = getattr(mapper, "_it", None)
    inner = getattr(iterator, "_it", iterator)
    if inner is not None and hasattr(inner, "_shutdown"):
        inner._shutdown()


def test_a_node_at_the_end_of_an_epoch_resumes_in_the_next_at_the_second_save_too() -> None:
    """torchdata's Loader keeps a stale state at the end of an epoch, and repeats it."""
    reference = torchdata.nodes.Loader(source())
    epochs = [[chunk_key(chunk) for chunk in reference] for _ in range(3)]
    state = None
    for epoch in range(3):
        loader = torchdata.nodes.Loader(source())
        if state is not None:
            loader.load_state_dict(state)
        assert [chunk_key(chunk) for chunk in loader] == epochs[epoch]
        state = loader.state_dict()


# --- the loader ----------------------------------------------------------------------------------

THREAD_ENGINES = {
    "inline": {"num_threads": 0},
    "one reading thread": {},
    "one reading thread, far ahead": {"prefetch_factor": 4},
    "one thread, one batch ahead": {"num_threads": 1, "prefetch_factor": 1},
    "three threads": {"num_threads": 3},
    "three threads, one batch ahead": {"num_threads": 3, "prefetch_factor": 1},
}
WORKER_ENGINES = {
    "1 worker": {"num_workers": 1},
    "2 workers, one batch ahead": {"num_workers": 2, "prefetch_factor": 1},
    "2 persistent workers": {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4},
    "3 workers": {"num_workers": 3},
    "3 persistent workers": {
        "num_workers": 3, "persistent_workers": True, "multiprocessing_context": "fork",
    },
}  # fmt: skip


def draws(sample: Any, rng: np.random.Generator) -> dict[str, Any]:
    return {"id": sample["id"], "draw": int(rng.integers(1 << 40))}


def ids_and_draws(batch: Any) -> Any:
    return batch["id"].tolist(), batch["draw"].tolist()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three")
    three_in_files(folder)
    return folder


def datasets_in(root: Path) -> list[Dataset]:
    return [Dataset.from_path(name, root / name) for name in SIZES]


def make_loader(root: Path, **options: Any) -> DataLoader:
    return DataLoader(
        mixture_of(datasets_in(root), max_samples=46),
        batch_size=4,
        transform=draws,
        takes_rng=True,
        **options,
    )


@pytest.mark.parametrize("engine", THREAD_ENGINES.values(), ids=THREAD_ENGINES)
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loader_in_threads(root: Path, engine: dict[str, Any], drop_last: bool) -> None:
    check_resume(
        loader_subject(lambda: make_loader(root, drop_last=drop_last, **engine), ids_and_draws),
        product=drop_last,
    )


@pytest.mark.parametrize("engine", WORKER_ENGINES.values(), ids=WORKER_ENGINES)
def test_a_loader_with_workers(root: Path, engine: dict[str, Any]) -> None:
    check_resume(loader_subject(lambda: make_loader(root, **engine), ids_and_draws))


def test_a_loader_with_a_spawned_worker(root: Path) -> None:
    """One save in the middle of an epoch, the second over its edge."""
    workers = {
        "num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True,
    }  # fmt: skip
    with make_loader(root) as loader:
        reference = [[ids_and_draws(batch) for batch in loader] for _ in range(2)]
    loader = make_loader(root, **workers)
    loop = iter(loader)
    assert [ids_and_draws(next(loop)) for _ in range(5)] == reference[0][:5]
    state = loader.state_dict()
    loader.close()
    with make_loader(root, **workers) as again:
        again.load_state_dict(state)
        assert [ids_and_draws(batch) for batch in again] == reference[0][5:]
        assert [ids_and_draws(batch) for batch in again] == reference[1]


@pytest.mark.long
@pytest.mark.parametrize("engine", (THREAD_ENGINES | WORKER_ENGINES).values())
@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_loader_in_every_way(
    root: Path, engine: dict[str, Any], lanes: int, drop_last: bool
) -> None:
    def make() -> DataLoader:
        return make_loader(root, lanes=lanes, drop_last=drop_last, **engine)

    check_resume(loader_subject(make, ids_and_draws), product=True)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loader_of_one_of_two_ranks_with_lanes(rank: int) -> None:
    def make() -> DataLoader:
        source = mixture_of(three_in_memory(), shuffle_block_size="global")
        return DataLoader(source, batch_size=3, rank=rank, num_replicas=2, lanes=4)

    check_resume(loader_subject(make), product=True)


def test_a_loader_of_an_endless_plan_goes_on() -> None:
    def make() -> DataLoader:
        return DataLoader(mixture_of(three_in_memory(), exhausted_policy="repeat"), batch_size=5)

    saved = make()
    loop = iter(make())
    stream = [ids(next(loop)) for _ in range(100)]
    loop = iter(saved)
    for _ in range(60):
        next(loop)
    restored = make()
    restored.load_state_dict(saved.state_dict())
    loop = iter(restored)
    assert [ids(next(loop)) for _ in range(40)] == stream[60:]


# --- an iterable dataset under loaders that keep states ------------------------------------------


def stateful_subject(num_workers: int, persistent: bool) -> Subject:
    def make() -> Any:
        dataset = WorkSourceDataset(
            one(memory("a", 40), seed=5, chunk_size=8, shuffle_block_size="global")
        )
        return StatefulDataLoader(
            dataset, batch_size=4, num_workers=num_workers, persistent_workers=persistent
        )

    def set_epoch(loader: Any, epoch: int) -> None:
        if num_workers and not persistent:
            loader.dataset.set_epoch(epoch)

    return Subject(make=make, before_loop=set_epoch, identity=num_workers == 0, fresh=False)


@pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_a_work_source_dataset_under_a_stateful_loader(num_workers: int, persistent: bool) -> None:
    # exactly at the end, before StopIteration, no worker can know that all the others are done too
    points = (0, 1, 5, 7, 9, -1) if num_workers else None
    check_resume(stateful_subject(num_workers, persistent), points=points)


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_saved_at_the_very_end_resume_with_an_empty_loop(persistent: bool) -> None:
    """As torch's own datasets do; nothing is lost and nothing comes twice."""
    subject = stateful_subject(2, persistent)
    epochs = []
    loader = subject.make()
    for epoch in range(2):
        subject.before_loop(loader, epoch)
        epochs.append([ids(batch) for batch in loader])
    saved = subject.make()
    loop = iter(saved)
    for _ in epochs[0]:
        next(loop)
    restored = subject.make()
    restored.load_state_dict(saved.state_dict())
    assert [ids(batch) for batch in restored] == []
    subject.before_loop(restored, 1)
    assert [ids(batch) for batch in restored] == epochs[1]
