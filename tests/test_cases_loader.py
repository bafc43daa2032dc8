"""Failures of other loaders, as small inputs with the right result, for this one.

Each test carries the number of its case. *Reference* is one uninterrupted run; sequences of ids are
compared, never statistics. A hang is a failure.
"""

from __future__ import annotations

import gc
import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torchdata.nodes
from launch import Launch
from processes import environment, is_running, started, wait_until
from toys import (
    STARTS,
    as_list,
    batches,
    flat,
    ids,
    memory,
    mixture_of,
    one,
    three_in_memory,
    write_shards,
)

from zephon_torch import DataLoader, StaticMixtureWorkSource, bind
from zephon_torch.errors import ConfigurationError, DatasetError, PlanMismatch, RecordError
from zephon_torch.io import Dataset
from zephon_torch.work import Progress

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


def notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def children() -> list[Any]:
    gc.collect()
    return multiprocessing.active_children()


# --- C01 every boundary --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "engine",
    [
        {"num_threads": 1, "prefetch_factor": 1},
        {"num_threads": 1, "prefetch_factor": 4},
        {"num_workers": 2, "prefetch_factor": 1},
        {"num_workers": 2, "prefetch_factor": 4},
    ],
)
def test_c01_restored_from_every_batch(engine: dict[str, Any]) -> None:
    def make() -> DataLoader:
        return DataLoader(mixture_of(three_in_memory()), batch_size=4, **engine)

    reference = batches(DataLoader(mixture_of(three_in_memory()), batch_size=4))
    states = []
    with make() as loader:
        states.append(loader.state_dict())
        states += [loader.state_dict() for _ in loader]
    for k, state in enumerate(states[:-1]):
        with make() as restored:
            restored.load_state_dict(json.loads(json.dumps(state)))
            assert batches(restored) == reference[k:], f"restored after batch {k}"
    assert states[-1]["epoch"] == 1


# --- C02 workers are a speed knob ----------------------------------------------------------------


def draw(sample: int, rng: np.random.Generator) -> tuple[int, int]:
    return sample, int(rng.integers(1 << 60))


SPEEDS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 0, "num_threads": 3, "prefetch_factor": 4},
    {"num_workers": 1, "prefetch_factor": 4, "multiprocessing_context": "fork"},
    {"num_workers": 2, "prefetch_factor": 1, "persistent_workers": True},
    {"num_workers": 3, "prefetch_factor": 4, "persistent_workers": True},
    {"num_workers": 3, "prefetch_factor": 1},
    {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True},
]


def with_draws(**speed: Any) -> DataLoader:
    return DataLoader(
        mixture_of(three_in_memory()), 4, transform=draw, takes_rng=True, collate_fn=as_list,
        **speed,
    )  # fmt: skip


def test_c02_any_number_of_workers_gives_the_same_and_resumes_any_other() -> None:
    loader = with_draws()
    state = loader.state_dict()
    reference = [list(loader), list(loader)]
    for number, speed in enumerate(SPEEDS):
        with with_draws(**speed) as loader:
            assert [list(loader), list(loader)] == reference, speed
            # a relay: each goes on where the one before it stopped, three batches further
            loader.load_state_dict(state)
            loop = iter(loader)
            done = 3 * number
            assert [next(loop) for _ in range(3)] == reference[0][done : done + 3], speed
            state = loader.state_dict()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("speed", [*product([1, 2, 3], [1, 4], [False, True], ["fork", "spawn"])])
def test_c02_in_every_combination(speed: tuple[Any, ...]) -> None:
    names = ("num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context")
    loader = with_draws()
    reference = [list(loader), list(loader)]
    with with_draws(**dict(zip(names, speed, strict=True))) as loader:
        assert [list(loader), list(loader)] == reference


# --- C03 save right after load -------------------------------------------------------------------


def test_c03_a_state_taken_right_after_a_load() -> None:
    def make(**options: Any) -> DataLoader:
        return DataLoader(mixture_of(three_in_memory()), batch_size=4, **options)

    reference, saved = batches(make()), make()
    loop = iter(saved)
    for _ in range(9):
        next(loop)
    state = saved.state_dict()
    for taken in (0, 1, 2):
        with make(num_workers=3) as loader:
            loader.load_state_dict(state)
            if taken:
                loop = iter(loader)
                for _ in range(taken):
                    next(loop)
            later = loader.state_dict()
        assert later["delivered"] // 4 == 9 + taken
        if not taken:
            assert later == state
        with make() as again:
            again.load_state_dict(later)
            assert batches(again) == reference[9 + taken :]


# --- C04 epoch edge ------------------------------------------------------------------------------


class Nested:
    """A torchdata Loader around a rank's chunks, seen as batches of ids."""

    def __init__(self) -> None:
        self.source = one(memory("a", 24), chunk_size=4, seed=1, shuffle_block_size="global")
        self.loader = torchdata.nodes.Loader(self.source)

    def __iter__(self) -> Iterator[list[int]]:
        for chunk in self.loader:
            yield chunk.pointers.sample.tolist()

    def state_dict(self) -> Any:
        return self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.loader.load_state_dict(state)


def edge_loader(**engine: Any) -> DataLoader:
    source = one(memory("a", 24), chunk_size=4, seed=1, shuffle_block_size="global")
    return DataLoader(source, batch_size=4, **engine)


@pytest.mark.parametrize(
    "make",
    [edge_loader, lambda: edge_loader(num_workers=2), Nested],
    ids=["inline", "workers", "torchdata"],
)
@pytest.mark.parametrize("ask", [False, True], ids=["six batches", "until StopIteration"])
def test_c04_the_edge_of_an_epoch(make: Callable[[], Any], ask: bool) -> None:
    def seen(loader: Any) -> list[list[int]]:
        return [batch if isinstance(batch, list) else ids(batch) for batch in loader]

    thing = make()
    reference = [seen(thing) for _ in range(4)]
    assert all(sorted(flat(epoch)) == [*range(24)] for epoch in reference)

    def run_an_epoch(thing: Any) -> None:
        loop = iter(thing)
        for _ in range(6):
            next(loop)
        if ask:
            assert next(loop, None) is None

    first = make()
    run_an_epoch(first)
    second = make()
    second.load_state_dict(first.state_dict())
    assert [seen(second), seen(second)] == reference[1:3]

    second = make()
    second.load_state_dict(first.state_dict())
    run_an_epoch(second)
    third = make()
    third.load_state_dict(second.state_dict())
    assert [seen(third), seen(third)] == reference[2:4]
    for loader in (thing, first, second, third):
        if isinstance(loader, DataLoader):
            loader.close()


# --- C05 uneven ranks ----------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_c05_uneven_ranks_over_gloo(tmp_path: Path, world: int) -> None:
    """1003 ids, chunk 10, batch 4, real processes that all-reduce at every step."""
    launch = Launch("uneven.py", tmp_path, world=world, output=tmp_path / "output")
    try:
        launch.wait()
    finally:
        launch.kill()
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(world)]
    whole, rest = divmod(1003, 4 * world)
    for epoch in range(2):
        dropped = [rank["drop"][epoch] for rank in ranks]
        padded = [rank["pad"][epoch] for rank in ranks]
        assert {len(steps) for steps in dropped} == {whole}
        assert {len(steps) for steps in padded} == {whole + 1}
        kept = [i for rank in dropped for step in rank for i, _ in step]
        assert len(kept) == len(set(kept)) == 1003 - rest
        real = [i for rank in padded for step in rank for i, valid in step if valid]
        everything = [i for rank in padded for step in rank for i, _ in step]
        assert sorted(real) == [*range(1003)]
        assert set(everything) == set(real)
        assert len(everything) == 1003 + -rest % world, "each rank gets as many"
        assert {rank["sums"][epoch] for rank in ranks} == {sum(range(1003))}
    orders = [str(ranks[0]["drop"][epoch]) for epoch in range(2)]
    assert orders[0] != orders[1]


# --- C06 fewer shards than consumers -------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[50], [7, 30, 1], [7, 0, 30, 1]])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_c06_fewer_files_than_consumers(tmp_path: Path, sizes: list[int], num_workers: int) -> None:
    dataset = Dataset.from_path("a", write_shards(tmp_path, sizes))
    union: list[int] = []
    for rank in range(2):
        with DataLoader(
            dataset, batch_size=4, num_workers=num_workers, rank=rank, num_replicas=2
        ) as loader:
            own: list[int] = []
            for batch in loader:
                assert len(batch["id"]) > 0, "an empty batch"
                own += batch["id"][loader.valid].tolist()
            assert own, "a silently empty rank"
            union += own
    assert sorted(union) == [*range(sum(sizes))]


# --- C07 epochs ----------------------------------------------------------------------------------


def test_c07_three_epochs_three_orders_whatever_the_workers() -> None:
    def run(call: bool, **engine: Any) -> list[list[int]]:
        with DataLoader(
            one(memory("a", 64), seed=2, shuffle_block_size="global"), batch_size=8, **engine
        ) as loader:
            epochs = []
            for epoch in range(3):
                if call:
                    loader.set_epoch(epoch)
                epochs.append(flat(batches(loader)))
            return epochs

    reference = run(False)
    assert all(sorted(epoch) == [*range(64)] for epoch in reference)
    assert len({str(epoch) for epoch in reference}) == 3
    for call in (False, True):
        for persistent in (False, True):
            assert run(call, num_workers=2, persistent_workers=persistent) == reference
        assert run(call) == reference


# --- C13 worker failure --------------------------------------------------------------------------


class TwoArguments(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"code {code}: {text}")


class Broken:
    """A map-style dataset; record 30 fails in its own way."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        if index == 30:
            self.fail_here()
        return index

    def fail_here(self) -> None:
        if self.kind == "two arguments":
            raise TwoArguments(7, "no luck")
        raise KeyError("a key\nwith newlines")


@pytest.mark.parametrize("kind", ["two arguments", "newlines"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("where", ["dataset", "transform"])
def test_c13a_an_exception_arrives_whole(kind: str, num_workers: int, where: str) -> None:
    broken = Broken(kind)
    given: dict[str, Any] = {"transform": broken.__getitem__} if where == "transform" else {}
    dataset = Dataset.from_torch("web", broken) if where == "dataset" else memory("web", 64)
    with DataLoader(dataset, batch_size=16, num_workers=num_workers, **given) as loader:
        loop = iter(loader)
        next(loop)
        with pytest.raises(Exception, match=r"no luck|with newlines") as caught:
            next(loop)
        text = "\n".join([type(caught.value).__name__, str(caught.value), *notes(caught.value)])
        assert ("TwoArguments" if kind == "two arguments" else "KeyError") in text
        assert "'web'" in text and "record" in text and "30" in text
        if num_workers:
            assert "Traceback" in text and "fail_here" in text
        assert ids(next(loop)) == [*range(32, 48)], "the batch after it comes"
    assert children() == []


def kill_a_worker() -> None:
    """Returns when it is dead; torch's signal handler may raise before that."""
    victim = children()[0]
    os.kill(victim.pid, signal.SIGKILL)
    victim.join()


SURVIVOR = """
import multiprocessing, os, signal, sys, time
from zephon_torch import DataLoader

if __name__ == "__main__":
    persistent = sys.argv[1] == "True"
    loader = DataLoader(
        list(range(4000)), batch_size=4, num_workers=2, persistent_workers=persistent
    )
    loop = iter(loader)
    next(loop)
    begun = time.monotonic()
    victim = multiprocessing.active_children()[0]
    os.kill(victim.pid, signal.SIGKILL)
    try:
        for _ in loop:
            pass
    except RuntimeError as error:
        print(type(error).__name__, str(error).splitlines()[0], flush=True)
    print(time.monotonic() - begun < 60, flush=True)
    while True:
        try:
            state = loader.state_dict()
            loader.load_state_dict(state)
            print(next(iter(loader))[0].item() == state["delivered"], flush=True)
            loader.close()
            print(multiprocessing.active_children(), flush=True)
            break
        except RuntimeError as error:  # torch's handler of the signal may raise once more, anywhere
            if "worker" not in str(error) or time.monotonic() - begun > 100:
                raise
"""


@pytest.mark.parametrize("persistent", [False, True])
def test_c13b_a_killed_worker_is_an_error_and_the_loader_can_begin_again(persistent: bool) -> None:
    # in a process of its own: torch's handler of the signal raises wherever Python happens to be
    done = subprocess.run(
        [sys.executable, "-c", SURVIVOR, str(persistent)],
        env=environment(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    told, *rest = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert told.split()[0] in ("WorkerError", "RuntimeError") and "worker" in told
    assert rest == ["True", "True", "[]"]


KILLER = """
import multiprocessing, os, signal
from zephon_torch import DataLoader

if __name__ == "__main__":
    for _ in range(8):
        loader = DataLoader(list(range(4000)), batch_size=4, num_workers=2)
        victim = None
        try:
            loop = iter(loader)
            next(loop)
            victim = multiprocessing.active_children()[0]
            os.kill(victim.pid, signal.SIGKILL)
            for _ in loop:
                pass
            print("not noticed", flush=True)
        except Exception as error:
            first = error
        try:
            victim.join()  # torch's handler of the signal may raise once more, anywhere
        except RuntimeError:
            pass
        print(type(first).__name__, str(first).replace(chr(10), " "), flush=True)
        loader.close()
"""


def test_c13b_a_worker_killed_while_it_hands_over_is_named_as_the_cause() -> None:
    """Whatever breaks first in the queue between the processes, a dead worker is what is told."""
    done = subprocess.run(
        [sys.executable, "-c", KILLER],
        env=environment(), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    told = done.stdout.splitlines()
    assert done.returncode == 0 and len(told) == 8, done.stdout + done.stderr
    for line in told:
        assert line.split()[0] in ("WorkerError", "RuntimeError") and "worker" in line, line


TRAINER = """
import multiprocessing, sys, time
import torch.utils.data._utils.worker
from zephon_torch import DataLoader

# seconds after which a worker looks whether its parent lives: 5
torch.utils.data._utils.worker.MP_STATUS_CHECK_INTERVAL = 0.5

class Texts:
    "A batch is more than a pipe holds: its worker waits for somebody to take it."
    def __len__(self):
        return 10_000_000
    def __getitem__(self, index):
        return "x" * 50_000

if __name__ == "__main__":
    loader = DataLoader(
        Texts(), batch_size=4, num_workers=1, multiprocessing_context=sys.argv[1],
        persistent_workers=True,
    )
    loop = iter(loader)
    next(loop)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    for _ in loop:
        time.sleep(0.01)
"""


def test_c13c_a_killed_trainer_leaves_no_orphan(tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"  # a file, because spawned processes import it again
    script.write_text(TRAINER)
    with ExitStack() as stack:
        trainers = [
            stack.enter_context(started([sys.executable, str(script), method], stdout=PIPE))
            for method in ("fork", "spawn", "forkserver")
        ]
        workers: list[int] = []
        for trainer in trainers:
            assert trainer.stdout is not None
            workers += [int(pid) for pid in trainer.stdout.readline().split()]
        assert len(workers) == 3 and all(map(is_running, workers))
        for trainer in trainers:
            trainer.kill()
            trainer.wait(timeout=200)
        wait_until(lambda: not any(map(is_running, workers)), seconds=150)


# --- C14 len tells the truth ---------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize(
    ("total", "batch_size", "drop_last", "num_replicas"),
    [(1, 4, False, 2), (7, 1, True, 1), (9, 4, True, 2), (9, 10, False, 1), (64, 10, True, 1)],
)
def test_c14_lengths_with_workers(
    total: int, batch_size: int, drop_last: bool, num_replicas: int, num_workers: int
) -> None:
    """Without workers: the whole product, in test_loader.py."""
    for rank in range(num_replicas):
        options: dict[str, Any] = {
            "num_workers": num_workers, "drop_last": drop_last, "rank": rank,
            "num_replicas": num_replicas,
        }  # fmt: skip
        with DataLoader(memory("a", total), batch_size, **options) as loader:
            n = len(loader)
            assert loader.remaining == n
            loop = iter(loader)
            for _ in range(n // 2):
                next(loop)
            state = loader.state_dict()
        with DataLoader(memory("a", total), batch_size, **options) as restored:
            restored.load_state_dict(state)
            assert len(restored) == n
            assert restored.remaining == len(list(restored)) == n - n // 2


def test_c14_an_epoch_without_a_batch_names_the_sizes() -> None:
    with pytest.raises(ConfigurationError, match=r"7 samples.*10"):
        DataLoader(memory("a", 7), 10, drop_last=True, rank=0, num_replicas=1)
    with pytest.raises(ConfigurationError, match=r"7 samples.*\b8\b"):
        DataLoader(memory("a", 7), 4, drop_last=True, rank=0, num_replicas=2)


# --- C16 changed data ----------------------------------------------------------------------------


def two_folders(root: Path) -> Path:
    write_shards(root / "web", [20, 21, 22], STARTS["a"])
    write_shards(root / "code", [15, 15], STARTS["b"])
    return root


def over(root: Path, **changes: Any) -> DataLoader:
    weights = changes.pop("weights", {"web": 0.6, "code": 0.4})
    datasets = [Dataset.from_path(name, root / name) for name in ("web", "code")]
    options = {"seed": 1, "chunk_size": 16} | changes
    return DataLoader(StaticMixtureWorkSource(datasets, weights, **options), batch_size=4)


def saved_over(root: Path, **changes: Any) -> dict[str, Any]:
    with over(root, **changes) as loader:
        loop = iter(loader)
        for _ in range(3):
            next(loop)
        return loader.state_dict()


def add_shard(root: Path) -> None:
    (root / "web" / "99.jsonl").write_text('{"id": 1}\n')


def drop_shard(root: Path) -> None:
    (root / "web" / "02.jsonl").unlink()


def add_record(root: Path) -> None:
    with (root / "web" / "01.jsonl").open("a") as file:
        file.write('{"id": 5}\n')


def rename_shard(root: Path) -> None:
    (root / "web" / "01.jsonl").rename(root / "web" / "01b.jsonl")


CHANGES: dict[str, tuple[Callable[[Path], None] | None, dict[str, Any], str]] = {
    "a shard more": (add_shard, {}, "'web': 3 shards at the checkpoint, 4 now"),
    "a shard fewer": (drop_shard, {}, "'web': 3 shards at the checkpoint, 2 now"),
    "a record more": (add_record, {}, "'web': 63 samples at the checkpoint, 64 now"),
    "a renamed shard": (rename_shard, {}, "'web': its shards have other names"),
    "seed": (None, {"seed": 2}, "seed: 1 at the checkpoint, 2 now"),
    "a weight": (None, {"weights": {"web": 0.7, "code": 0.3}}, "weight of dataset '(web|code)'"),
    "chunk_size": (None, {"chunk_size": 32}, "chunk_size: 16 at the checkpoint, 32 now"),
    "an option": (None, {"shuffle_block_size": "global"}, "shuffle_block_size"),
}


@pytest.mark.filterwarnings("ignore::zephon_torch.io.index.index.StaleIndexWarning")
@pytest.mark.parametrize(("change", "options", "message"), CHANGES.values(), ids=CHANGES)
def test_c16_a_changed_plan_is_told_in_words_and_can_be_overridden(
    tmp_path: Path, change: Callable[[Path], None] | None, options: dict[str, Any], message: str
) -> None:
    root = two_folders(tmp_path)
    state = saved_over(root)
    if change is not None:
        change(root)
    with over(root, **options) as loader:
        loader.load_state_dict(state)
        with pytest.raises(PlanMismatch, match=message) as caught:
            iter(loader)
        assert "strict=False" in str(caught.value) and "repeat or be missed" in str(caught.value)
        reference = [ids(loader_batch) for loader_batch in over(root, **options)]
        loader.load_state_dict(state, strict=False)
        assert batches(loader) == reference[3:]


def test_c16_another_format_is_told() -> None:
    """As memory and as a torch dataset: the same ids, another kind of dataset."""
    state = DataLoader(one(memory("web", 9)), batch_size=4).state_dict()
    loader = DataLoader(one(Dataset.from_torch("web", range(9))), batch_size=4)
    loader.load_state_dict(state)
    with pytest.raises(PlanMismatch, match="'web': format memory at the checkpoint, torch now"):
        iter(loader)


def test_c16_the_same_files_elsewhere_are_the_same_plan(tmp_path: Path) -> None:
    root = two_folders(tmp_path / "here")
    state = saved_over(root)
    with over(root) as loader:
        reference = batches(loader)
    shutil.move(root, tmp_path / "there")
    with over(tmp_path / "there") as loader:
        loader.load_state_dict(state)
        assert batches(loader) == reference[3:]


# --- C17 leaks -----------------------------------------------------------------------------------


def held() -> dict[str, int]:
    gc.collect()
    return {
        "threads": threading.active_count(),
        "children": len(children()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared memory": len([name for name in os.listdir("/dev/shm") if "torch" in name]),
    }


def with_a_large_tensor(sample: dict[str, Any]) -> dict[str, Any]:
    """A batch of them comes through shared memory, in a segment with a descriptor."""
    return sample | {"row": torch.zeros(1 << 15)}


@pytest.mark.parametrize(
    ("engine", "times"),
    [
        ({"num_threads": 0}, 100),
        ({}, 100),
        ({"num_threads": 1}, 100),
        ({"num_threads": 3}, 100),
        ({"num_workers": 2}, 25),
        ({"num_workers": 2, "persistent_workers": True}, 25),
        pytest.param({"num_workers": 2}, 100, marks=pytest.mark.long),
    ],
)
def test_c17_break_after_one_batch_again_and_again(
    tmp_path: Path, engine: dict[str, Any], times: int
) -> None:
    dataset = Dataset.from_path("a", write_shards(tmp_path, [40, 40]))
    options = {"batch_size": 4, "transform": with_a_large_tensor, **engine}
    with DataLoader(dataset, **options) as loader:
        next(iter(loader))  # what Python and torch start once for the whole process
    before = held()
    with DataLoader(dataset, **options) as loader:
        for number in range(times):
            for batch in loader:
                del batch  # its memory is shared with the worker through a descriptor
                break
            if number == 2:
                early = held()
        # what is just ending may still be there; a leak would be there a hundred times
        wait_until(lambda: all(count <= early[kind] + 8 for kind, count in held().items()))
    # fewer is no leak: what another test or the first loader left was still ending at `before`
    wait_until(lambda: all(count <= before[kind] for kind, count in held().items()))


def test_c17_loaders_made_and_forgotten(tmp_path: Path) -> None:
    dataset = Dataset.from_path("a", write_shards(tmp_path, [40, 40]))
    for number in range(20):
        for _ in DataLoader(dataset, batch_size=4, num_threads=2):
            break
        if number == 2:
            early = held()
    wait_until(lambda: all(count <= early[kind] + 4 for kind, count in held().items()))


# --- C18 state is small and plain ----------------------------------------------------------------


def test_c18_the_state_is_small_plain_and_quick(tmp_path: Path) -> None:
    class Many:
        def __len__(self) -> int:
            return 50_000_000

        def __getitem__(self, index: int) -> int:
            return index

    names = [f"dataset-{i:02d}" for i in range(20)]
    loader = DataLoader(
        {name: Many() for name in names}, batch_size=4, mixture=dict.fromkeys(names, 1)
    )
    model = torch.nn.Linear(1, 1)
    bind(model, loader)
    next(iter(loader))
    state = loader.state_dict()
    assert len(json.dumps(state | {"description": ""})) < 1024
    assert json.loads(json.dumps(state)) == state
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state

    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(model.state_dict(), path)
    words = safetensors.torch.load_file(path)["data_progress._extra_state"].tolist()
    assert Progress.from_words(words) == loader.progress

    times = []
    for _ in range(200):
        begun = time.perf_counter()
        loader.state_dict()
        times.append(time.perf_counter() - begun)
    assert min(times) < 50e-6


# --- C19 slow sample -----------------------------------------------------------------------------


class Slow:
    """Sample 9 takes its time, once the loop wants it."""

    def __init__(self, wanted: Path) -> None:
        self.wanted = wanted

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        if index == 9:
            wait_until(self.wanted.exists)
            time.sleep(1)
        return index


@pytest.mark.parametrize(
    "engine", [{"num_threads": 0}, {"num_threads": 1}, {"num_threads": 3}, {"num_workers": 2}]
)
def test_c19_a_slow_sample_keeps_the_order_and_its_wait_is_counted(
    tmp_path: Path, engine: dict[str, Any]
) -> None:
    with DataLoader(Slow(tmp_path / "wanted"), batch_size=4, **engine) as loader:
        loop = iter(loader)
        assert [ids(next(loop)) for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        (tmp_path / "wanted").touch()
        assert flat(batches(loop)) == [*range(8, 24)]
        assert 0.2 < loader.stats.wait_seconds < 200


# --- C22 stale index -----------------------------------------------------------------------------


def test_c22_a_folder_with_an_index_of_its_own(tmp_path: Path) -> None:
    """Someone else's index.json that lists other rows is neither data nor believed."""
    root = write_shards(tmp_path, [7, 5])
    (root / "index.json").write_text(json.dumps({"shards": [{"name": "00.jsonl", "samples": 3}]}))
    with DataLoader(Dataset.from_path("a", root), batch_size=4) as loader:
        assert flat(batches(loader)) == [*range(12)]


@pytest.mark.parametrize("rows", [3, 9])
def test_c22_a_shard_that_changed_since_it_was_counted(tmp_path: Path, rows: int) -> None:
    root = write_shards(tmp_path, [7, 5])
    dataset = Dataset.from_path("a", root)
    write_shards(root, [rows])
    with (
        DataLoader(dataset, batch_size=4) as loader,
        pytest.raises(DatasetError, match=r"00\.jsonl"),
    ):
        batches(loader)


def test_c22_a_stale_index_is_named_and_built_anew(tmp_path: Path) -> None:
    root = write_shards(tmp_path, [7, 5])
    Dataset.from_path("a", root)
    write_shards(root, [9])
    with pytest.warns(UserWarning, match=r"00\.jsonl"):
        dataset = Dataset.from_path("a", root)
    with DataLoader(dataset, batch_size=4) as loader:
        assert sorted(flat(batches(loader))) == sorted([*range(9), *range(7, 12)])


def test_c22_a_shard_added_beside_is_seen_by_the_next_dataset_and_named_at_resume(
    tmp_path: Path,
) -> None:
    root = write_shards(tmp_path, [7, 5])
    state = DataLoader(Dataset.from_path("a", root), batch_size=4).state_dict()
    (root / "zz.jsonl").write_text('{"id": 12}\n')
    loader = DataLoader(Dataset.from_path("a", root), batch_size=4)
    assert flat(batches(loader)) == [*range(13)]
    loader.load_state_dict(state)
    with pytest.raises(PlanMismatch, match="2 shards at the checkpoint, 3 now"):
        iter(loader)
    loader.close()


# --- C24 bad record far away ---------------------------------------------------------------------


@pytest.mark.parametrize("engine", [{}, {"num_threads": 2}, {"num_workers": 2}])
@pytest.mark.parametrize("operator", ["read", "transform"])
def test_c24_a_bad_record_is_named_with_what_failed_on_it(
    tmp_path: Path, engine: dict[str, Any], operator: str
) -> None:
    root = write_shards(tmp_path, [60] * 5)
    lines = (root / "03.jsonl").read_text().splitlines()
    lines[41] = '{"id" 1}' if operator == "read" else '{"id": "text"}'
    (root / "03.jsonl").write_text("\n".join(lines) + "\n")
    dataset = Dataset.from_path("web", root)
    given: dict[str, Any] = {} if operator == "read" else {"transform": doubled}
    with DataLoader(dataset, batch_size=16, **given, **engine) as loader:
        loop = iter(loader)
        for _ in range(13):
            next(loop)
        expected = RecordError if operator == "read" else TypeError
        with pytest.raises(expected) as caught:
            next(loop)
    text = "\n".join([str(caught.value), *notes(caught.value)])
    assert "'web'" in text and "03.jsonl" in text
    assert re.search(r"record 41\b", text)
    assert ("JSON" if operator == "read" else "in transform") in text


def doubled(record: dict[str, Any]) -> int:
    return int(record["id"] - 1)
