"""Engines: the same bytes from the caller's thread, threads and processes; and how they end."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import environment, wait_until
from toys import (
    as_list,
    batches,
    flat,
    ids,
    memory,
    mixture_of,
    one,
    patiently,
    three_in_files,
    write_shards,
)

from zephon_torch import DataLoader
from zephon_torch.errors import ZephonError
from zephon_torch.io import Dataset
from zephon_torch.nodes import open_readers as opened

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

ENGINES: dict[str, dict[str, Any]] = {
    "inline": {"num_threads": 0},
    "one reading thread": {},
    "one thread": {"num_threads": 1},
    "three threads": {"num_threads": 3, "prefetch_factor": 2},
    "two workers": {"num_workers": 2},
    "two persistent workers": {"num_workers": 2, "persistent_workers": True},
}


def test_threads_share_one_limit_of_open_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each shard takes descriptors, of which a process has 1,024 mostly."""
    monkeypatch.setattr(opened, "_MAX_OPEN", 12)
    monkeypatch.setattr(opened, "_MIN_OPEN", 2)
    dataset = Dataset.from_path("web", write_shards(tmp_path / "web", [2] * 60))
    expected: list[int] = []
    for num_threads in (0, 1, 4):
        seen = []
        with DataLoader(dataset, 8, shuffle=True, num_threads=num_threads) as loader:
            for batch in loader:
                seen += batch["id"].tolist()
                maps = Path("/proc/self/maps").read_text().splitlines()
                shards = [line for line in maps if str(tmp_path) in line and line[-6:] == ".jsonl"]
                assert len(shards) <= 12 + 2 * num_threads
        expected = expected or seen
        assert seen == expected and sorted(seen) == list(range(120))


@pytest.fixture(params=ENGINES.values(), ids=ENGINES)
def engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


@pytest.fixture
def source(tmp_path: Path) -> Any:
    return mixture_of(three_in_files(tmp_path), shuffle_block_size="global")


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "zephon" in thread.name]


def children() -> set[int]:
    gc.collect()
    return {process.pid for process in multiprocessing.active_children() if process.pid}


@pytest.fixture(autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    before, num_threads = children(), len(reading_threads())
    yield
    # some are just ending, also of those that were there before
    wait_until(lambda: children() <= before and len(reading_threads()) <= num_threads)


# --- the same bytes ------------------------------------------------------------------------------


def test_every_engine_gives_the_same(source: Any, engine: dict[str, Any]) -> None:
    reference = DataLoader(source, batch_size=4, num_threads=0)
    with DataLoader(source, batch_size=4, **engine) as loader:
        for _ in range(2):
            assert batches(loader) == batches(reference)


def test_readers_opened_before_a_fork_are_not_shared(source: Any) -> None:
    with DataLoader(source, batch_size=4, num_workers=2) as loader:
        reference = [ids(loader.batch(step)) for step in range(len(loader))]
        assert batches(loader) == reference


def test_by_default_user_code_runs_in_the_callers_thread(source: Any) -> None:
    seen = []

    def transform(sample: Any) -> Any:
        seen.append(threading.current_thread())
        return sample["id"]

    def collate(samples: list[Any]) -> Any:
        seen.append(threading.current_thread())
        return torch.tensor(samples, requires_grad=False)

    with DataLoader(source, batch_size=4, transform=transform, collate_fn=collate) as loader:
        batches(loader)
    assert set(seen) == {threading.main_thread()}


def test_by_default_only_files_are_read_in_a_thread(source: Any) -> None:
    with DataLoader(source, batch_size=4) as files, DataLoader([1, 2, 3]) as numbers:
        next(iter(numbers))
        assert reading_threads() == []
        next(iter(files))
        assert len(reading_threads()) == 1


def test_threads_run_user_code_when_asked_for(source: Any) -> None:
    seen = set()

    def transform(sample: Any) -> Any:
        seen.add(threading.current_thread().name)
        return sample["id"]

    with DataLoader(source, batch_size=4, transform=transform, num_threads=2) as loader:
        batches(loader)
    assert all("zephon" in name for name in seen)


@pytest.mark.parametrize("prefetch_factor", [1, 2, 5])
def test_the_depth_bounds_what_is_read_ahead(prefetch_factor: int) -> None:
    read = []

    class Noted:
        def __len__(self) -> int:
            return 80

        def __getitem__(self, index: int) -> int:
            read.append(index)
            return index

    with DataLoader(
        Noted(), batch_size=4, num_threads=1, prefetch_factor=prefetch_factor
    ) as loader:
        for step, _ in enumerate(loader):
            assert len(read) <= (step + 1 + prefetch_factor) * 4


def test_global_random_states_are_left_alone(source: Any, engine: dict[str, Any]) -> None:
    def states() -> Any:
        name, keys, *rest = np.random.get_state()  # noqa: NPY002
        return random.getstate(), torch.get_rng_state().tolist(), (name, keys.tolist(), *rest)

    before = states()
    loader = DataLoader(source, batch_size=4, transform=_draw, takes_rng=True, **engine)
    with loader:
        assert states() == before
        for batch in loader:
            assert states() == before
            del batch
        next(iter(loader))
        assert states() == before
    assert states() == before


def _draw(sample: Any, rng: np.random.Generator) -> float:
    return float(rng.random())


# --- how they end --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:next.iter")  # it looks twice at the same batch
def test_close_ends_threads_and_processes_and_the_loader_works_again(
    source: Any, engine: dict[str, Any]
) -> None:
    before = children()
    loader = DataLoader(source, batch_size=4, **engine)
    reference = batches(DataLoader(source, batch_size=4, num_threads=0))
    for _ in range(2):
        loop = iter(loader)
        next(loop)
        loader.close()
        assert children() == before and reading_threads() == []
        loader.close()
    assert batches(loader) == reference
    loader.close()
    assert children() == before and reading_threads() == []


def test_a_context_manager_closes_after_an_error_too(source: Any, engine: dict[str, Any]) -> None:
    before = children()
    with pytest.raises(ZeroDivisionError), DataLoader(source, batch_size=4, **engine) as loader:
        for _ in loader:
            raise ZeroDivisionError
    assert children() == before and reading_threads() == []


def test_after_close_an_iterator_does_not_end_early(source: Any) -> None:
    loader = DataLoader(source, batch_size=4, num_workers=2)
    reference = batches(DataLoader(source, batch_size=4, num_threads=0))
    loop = iter(loader)
    next(loop)
    loader.close()
    try:
        assert ids(next(loop)) == reference[1]
    except ZephonError:
        pass
    loader.close()


def test_a_forgotten_loader_leaves_nothing(source: Any, engine: dict[str, Any]) -> None:
    """Fixture: no thread and no child remains."""
    loop = iter(DataLoader(source, batch_size=4, **engine))
    next(loop)
    del loop


def open_files(root: Path) -> list[str]:
    maps = Path("/proc/self/maps").read_text()
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    held = [os.readlink(link) for link in links if os.path.islink(link)]
    return [name for name in held if str(root) in name] + [
        line for line in maps.splitlines() if str(root) in line
    ]


def test_close_lets_go_of_files(tmp_path: Path, engine: dict[str, Any]) -> None:
    source = mixture_of(three_in_files(tmp_path))
    loader = DataLoader(source, batch_size=4, **engine)
    next(iter(loader))
    loader.batch(0)
    loader.close()
    gc.collect()
    assert open_files(tmp_path) == []


SCRIPT = """
import sys
from zephon_torch import DataLoader
from zephon_torch.io import Dataset

if __name__ == "__main__":
    dataset = Dataset.from_path("a", sys.argv[1])
    options = eval(sys.argv[2])
    loader = DataLoader(dataset, batch_size=2, **options)
    for step, batch in enumerate(loader):
        if step == 3:
            break
    print(batch["id"].tolist(), flush=True)
    loop = iter(loader)
    next(loop)
"""


@pytest.mark.parametrize(
    "options", [{}, {"num_threads": 2}, {"num_workers": 2, "persistent_workers": True}]
)
def test_a_script_that_never_closes_exits_by_itself(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    root = write_shards(tmp_path / "a", [30])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, str(root), repr(options)],
        env=environment(),
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "[6, 7]\n", "")


def _block_unless(sample: int, gate: Any, blocked: int) -> int:
    if sample == blocked:
        gate.wait(60)
    return sample


class Gated:
    """Numbers; one comes only after a gate is opened."""

    def __init__(self, total: int, blocked: int, gate: Any) -> None:
        self.total, self.blocked, self.gate = total, blocked, gate

    def __len__(self) -> int:
        return self.total

    def __getitem__(self, index: int) -> int:
        return _block_unless(index, self.gate, self.blocked)


def test_after_a_timeout_the_late_batch_is_still_paired_with_its_pointers() -> None:
    gate = multiprocessing.get_context("fork").Event()
    dataset = Dataset.from_torch("a", Gated(24, 9, gate))
    with DataLoader(dataset, batch_size=4, num_workers=1, timeout=1) as loader:
        loop = iter(loader)
        assert [ids(patiently(loop)) for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(RuntimeError, match=r"timed out|did not come"):
            next(loop)
        assert loader.delivered == 8
        gate.set()
        try:
            rest = []
            while loader.delivered or not rest:
                batch = patiently(loop)
                assert loader.pointers is not None
                assert ids(batch) == loader.pointers.sample.tolist()
                assert loader.delivered % 24 == (max(ids(batch)) + 1) % 24
                rest.append(ids(batch))
            assert flat(rest) == [*range(8, 24)]
        except ZephonError:
            assert loader.delivered == 8, "refusing to go on is fine, if nothing was counted"


# --- statistics ----------------------------------------------------------------------------------


def test_statistics_count_batches_and_real_samples(engine: dict[str, Any]) -> None:
    with DataLoader(one(memory("a", 21)), 4, rank=2, num_replicas=4, **engine) as loader:
        list(loader)
        assert (loader.stats.batches, loader.stats.samples) == (2, 5)
        list(loader)
        assert (loader.stats.batches, loader.stats.samples) == (4, 10)
        assert loader.stats.wait_seconds > 0


def test_pin_memory_without_an_accelerator_warns_and_works() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is an accelerator")
    loader = DataLoader([1, 2, 3], batch_size=2, pin_memory=True)
    with pytest.warns(UserWarning, match="no accelerator"):
        assert batches(loader) == [[1, 2], [3]]


def test_worker_options_are_torchs() -> None:
    with pytest.raises(ValueError, match="persistent_workers"):
        DataLoader([1, 2, 3], persistent_workers=True)
    with pytest.raises(ValueError, match="num_workers"):
        DataLoader([1, 2, 3], multiprocessing_context="fork")
    with (
        DataLoader(
            memory("a", 8), batch_size=4, num_workers=1, worker_init_fn=_fail_in_worker
        ) as loader,
        pytest.raises(RuntimeError, match="no worker today"),
    ):
        next(iter(loader))


def _fail_in_worker(number: int) -> None:
    raise RuntimeError("no worker today")


def unpicklable_with_5(samples: list[int]) -> Any:
    return (lambda: samples) if 5 in samples else samples


def failing_at_5(sample: int) -> int:
    class Local(Exception):
        """Of a class that no other process can find."""

    if sample == 5:
        raise Local("five")
    return sample


class Titled(Exception):
    """torch takes a class with such an attribute for one that is made from message=."""

    message = "a title"

    def __init__(self, code: int) -> None:
        super().__init__(code)


def titled_at_5(sample: int) -> int:
    if sample == 5:
        raise Titled(50)
    return sample


def with_a_gradient_at_5(sample: int) -> torch.Tensor:
    return torch.tensor(sample / 2, requires_grad=sample == 5) * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"collate_fn": unpicklable_with_5}, r"cannot be sent from its worker.*num_workers=0"),
        ({"collate_fn": as_list, "transform": failing_at_5}, r"(?s)Local.*failing_at_5.*five"),
        (
            {"collate_fn": as_list, "transform": titled_at_5},
            r"(?s)Caught Titled in.*titled_at_5.*50",
        ),
        ({"collate_fn": as_list, "transform": with_a_gradient_at_5}, "requires_grad"),
    ],
)
def test_what_cannot_be_sent_from_a_worker_is_an_error_of_its_batch_and_no_hang(
    options: dict[str, Any], message: str
) -> None:
    with DataLoader(list(range(12)), 4, num_workers=1, **options) as loader:
        loop = iter(loader)
        assert ids(next(loop)) == [0, 1, 2, 3]
        with pytest.raises(RuntimeError, match=message):
            next(loop)
        assert ids(next(loop)) == [8, 9, 10, 11]


@pytest.mark.parametrize("engine", [{"num_threads": 2}, {"num_workers": 1}])
def test_an_interrupted_close_leaves_a_loader_that_works(
    source: Any, engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = DataLoader(source, batch_size=4, persistent_workers="num_workers" in engine, **engine)
    whole = batches(loader)
    loop = iter(loader)
    next(loop)
    with monkeypatch.context() as patch:
        for owner, name in [
            (ThreadPoolExecutor, "shutdown"),
            (torch.utils.data.dataloader._MultiProcessingDataLoaderIter, "_shutdown_workers"),
        ]:
            patch.setattr(owner, name, interrupt)
        with pytest.raises(KeyboardInterrupt):
            loader.close()
    del loop
    loader.load_state_dict(loader.state_dict() | {"epoch": 0, "delivered": 4})
    assert batches(loader) == whole[1:]
    loader.close()


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt
