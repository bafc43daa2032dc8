"""What torch's DataLoader promises, asked of ours and of torch's own side by side."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import random
import threading
import time
import warnings
from collections import namedtuple
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from toys import ENGINES, as_list, batches, flat, ids, patiently, write_shards

from zephon_torch import DataLoader
from zephon_torch.errors import ConfigurationError, WorkerError
from zephon_torch.io import Dataset

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
Torchs = torch.utils.data.DataLoader
BOTH = pytest.mark.parametrize("loader", [Torchs, DataLoader], ids=["torch's", "ours"])


class Numbers:
    """A map-style dataset of squares."""

    def __init__(self, length: int = 12) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index**2


def closed(loader: Any) -> None:
    if isinstance(loader, DataLoader):
        loader.close()


def outcome(loader: Any) -> Any:
    """All batches, or the error in their place."""
    try:
        return list(loader)
    except Exception as error:
        return error
    finally:
        closed(loader)


def same(left: Any, right: Any) -> bool:
    """Equal in value, type, dtype and shape, all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype is right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


# --- collate -------------------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


class Labelled(torch.Tensor):
    """A tensor of a class of its own."""


STRUCTURES: dict[str, list[Any]] = {
    "integers": [1, 2, 3],
    "floats": [0.5, 1.5, 2.5],
    "truths": [True, False, True],
    "texts": ["a", "bb", ""],
    "bytes": [b"a", b"\x00b", b""],
    "numpy scalars": [np.float32(1), np.float32(2), np.float32(3)],
    "numpy scalars of several types": [np.float32(1), np.int64(2), np.int8(3)],
    "numpy arrays": [np.full((2, 2), i, np.int16) for i in range(3)],
    "numpy arrays without dimensions": [np.array(i) for i in range(3)],
    "tensors": [torch.full((2,), i, dtype=torch.int32) for i in range(3)],
    "tensors of a class": [torch.full((2,), float(i)).as_subclass(Labelled) for i in range(3)],
    "empty tensors": [torch.zeros(0) for _ in range(3)],
    "tuples": [(i, str(i)) for i in range(3)],
    "lists": [[i, float(i)] for i in range(3)],
    "named tuples": [Point(i, [i]) for i in range(3)],
    "dicts": [{"a": i, "b": str(i)} for i in range(3)],
    "nested": [
        {"p": Point(i, {"t": torch.ones(i + 1)[:1]}), "l": [(i, [f"{i}"]), b"x"]} for i in range(3)
    ],
    # what cannot be collated
    "nothing": [None, None, None],
    "nothing in a dict": [{"a": None}] * 3,
    "sets": [{1}, {2}, {3}],
    "objects": [Numbers(), Numbers(), Numbers()],
    "text arrays": [np.array(["a"])] * 3,
    "tensors of several lengths": [torch.zeros(i) for i in range(3)],
    "lists of several lengths": [[0] * (i + 1) for i in range(3)],
    "tuples of several lengths": [(0,) * (i + 1) for i in range(3)],
    "arrays of several shapes": [np.zeros((i, 2)) for i in range(3)],
    "integers and texts": [1, "a", 2],
}


@pytest.mark.parametrize("samples", STRUCTURES.values(), ids=STRUCTURES)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_samples_are_collated_or_refused_as_torch_does(samples: list[Any], batch_size: int) -> None:
    theirs, ours = outcome(Torchs(samples, batch_size)), outcome(DataLoader(samples, batch_size))
    if isinstance(theirs, Exception):
        assert (type(ours), str(ours)) == (type(theirs), str(theirs))
    else:
        assert same(ours, theirs), (ours, theirs)


@pytest.mark.parametrize("name", ["nested", "named tuples", "tensors of a class", "bytes"])
def test_a_batch_keeps_its_types_over_the_way_from_a_worker(name: str) -> None:
    with DataLoader(STRUCTURES[name], 2, num_workers=1) as loader:
        assert same(list(loader), list(Torchs(STRUCTURES[name], 2, num_workers=1)))


@BOTH
def test_large_tensors_from_a_worker_are_in_shared_memory(loader: Any) -> None:
    """Small ones only from torch's; ours own their memory, see tests/test_sending.py."""
    made = loader([{"t": torch.ones(1 << 16)}] * 2, 2, num_workers=1)
    (batch,) = made
    assert batch["t"].is_shared()
    closed(made)


def test_keys_that_torch_would_drop_silently_are_an_error() -> None:
    """The one difference: torch takes the keys of the first sample for those of all."""
    samples = [{"a": 1}, {"a": 2, "b": 3}]
    assert same(list(Torchs(samples, 2)), [{"a": torch.tensor([1, 2])}])
    assert "different keys" in str(outcome(DataLoader(samples, 2)))


@pytest.mark.parametrize("samples", [[None, 1], [[1], [1, 2]], [{"a": None}] * 2])
def test_what_torch_cannot_join_is_its_own_error_with_the_dataset_and_a_remedy(
    samples: list[Any],
) -> None:
    error = outcome(DataLoader(Dataset.from_samples("odd", samples), 2))
    torchs = outcome(Torchs(samples, 2))
    assert type(error) is type(torchs)
    assert str(error) == str(torchs)
    assert any("'odd': give a transform" in note for note in error.__notes__)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_pinned_memory(num_workers: int) -> None:
    samples = [{"t": torch.ones(3), "p": Point(1, "a")}] * 2
    with DataLoader(samples, 2, num_workers=num_workers, pin_memory=True) as loader:
        (batch,) = loader
        assert loader.valid is not None and loader.pointers is not None
    (theirs,) = Torchs(samples, 2, num_workers=num_workers, pin_memory=True)
    assert same(batch, theirs)
    assert batch["t"].is_pinned() and batch["p"].x.is_pinned()


# --- datasets ------------------------------------------------------------------------------------


class AtOnce(Numbers):
    """Has __getitems__, torch's way to ask for a whole batch."""

    def __getitem__(self, index: int) -> int:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> list[int]:
        assert all(type(index) is int for index in indices)
        return [index**2 for index in indices]


class NotAtOnce(Numbers):
    __getitems__ = None


class Lying(Numbers):
    """Says another length than it has."""

    def __init__(self, said: Any) -> None:
        super().__init__(8)
        self.said = said

    def __len__(self) -> int:
        if isinstance(self.said, Exception):
            raise self.said
        return self.said  # type: ignore[no-any-return]


DATASETS: dict[str, Callable[[], Any]] = {
    "plain": Numbers,
    "asked at once": AtOnce,
    "not asked at once": NotAtOnce,
    "a list": lambda: [3, 1, 2],
    "a range": lambda: range(10, 17),
    "a tensor": lambda: torch.arange(7),
    "an array": lambda: np.arange(7),
    "a text file's lines": lambda: ["a", "b"],
    "says too few": lambda: Lying(5),
    "says too many": lambda: Lying(9),
    "cannot say": lambda: Lying(ValueError("no length today")),
    "a TensorDataset": lambda: torch.utils.data.TensorDataset(torch.arange(5), torch.ones(5)),
    "a Subset": lambda: torch.utils.data.Subset(Numbers(), [3, 1, 1]),  # type: ignore[arg-type]
    "a ConcatDataset": lambda: torch.utils.data.ConcatDataset([Numbers(3), Numbers(2)]),  # type: ignore[list-item]
}


@pytest.mark.parametrize("make", DATASETS.values(), ids=DATASETS)
def test_a_dataset_is_read_as_torch_reads_it(make: Callable[[], Any]) -> None:
    def read(cls: Any) -> Any:
        try:
            return outcome(cls(make(), batch_size=2))
        except Exception as error:  # asked for its length at once
            return error

    theirs, ours = read(Torchs), read(DataLoader)
    if isinstance(theirs, Exception):
        assert (type(ours), str(ours)) == (type(theirs), str(theirs))
    else:
        assert same(ours, theirs)


@pytest.mark.parametrize(
    ("length", "batch_size", "drop_last"), [*product([1, 5, 6, 7], [1, 3, 5, 50], [False, True])]
)
def test_lengths_and_batches_are_torchs(length: int, batch_size: int, drop_last: bool) -> None:
    theirs = Torchs(Numbers(length), batch_size, drop_last=drop_last)  # type: ignore[arg-type,var-annotated]
    if len(theirs) == 0:  # an epoch without a batch: torch's loop does nothing, ours says so
        with pytest.raises(ConfigurationError, match=f"{length} samples"):
            DataLoader(Numbers(length), batch_size, drop_last=drop_last, rank=0, num_replicas=1)
        return
    ours = DataLoader(Numbers(length), batch_size, drop_last=drop_last)
    assert len(ours) == len(theirs)
    assert batches(ours) == batches(theirs)


class Refusing(Numbers):
    """Raises at index 5."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.error = error

    def __getitem__(self, index: int) -> int:
        if index == 5:
            self.refuse()
        return index

    def refuse(self) -> None:
        raise self.error("not this one")


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("error", [IndexError, KeyError, ValueError, RuntimeError, OSError])
def test_what_a_dataset_raises_keeps_its_type_and_tells_where_it_was_raised(
    error: type[Exception], num_workers: int
) -> None:
    for cls in (Torchs, DataLoader):
        made: Any = cls(Refusing(error), 2, num_workers=num_workers)  # type: ignore[arg-type]
        loop = iter(made)
        assert [ids(next(loop)) for _ in range(2)] == [[0, 1], [2, 3]]
        with pytest.raises(error, match="not this one") as caught:
            next(loop)
        if num_workers:
            assert "in DataLoader worker process 0" in str(caught.value)
            assert "in refuse" in str(caught.value)
        else:
            assert caught.traceback[-1].name == "refuse"
        assert flat(batches(loop)) == [*range(6, 12)], "the loop can go on, as torch's"
        closed(made)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_stop_iteration_in_a_dataset_ends_no_epoch(num_workers: int) -> None:
    """With torch's loader and no workers it does, without a word."""
    assert len(list(Torchs(Refusing(StopIteration), 2))) == 2  # type: ignore[arg-type]
    with DataLoader(Refusing(StopIteration), 2, num_workers=num_workers) as loader:
        loop = iter(loader)
        assert [ids(next(loop)) for _ in range(2)] == [[0, 1], [2, 3]]
        with pytest.raises(WorkerError, match="StopIteration"):
            next(loop)
        assert flat(batches(loop)) == [*range(6, 12)]


# --- inside of the workers -----------------------------------------------------------------------


def initialised(worker_id: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None and info.id == worker_id
    info.dataset.opened_by = worker_id  # as torch's documentation shows it


class Informed(Numbers):
    opened_by: int | None = None

    def __getitem__(self, index: int) -> Any:
        info = torch.utils.data.get_worker_info()
        if info is None:
            return None
        return info.id, info.num_workers, info.seed, info.dataset is self, self.opened_by


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_worker_init_fn_and_get_worker_info_are_as_in_torch(persistent_workers: bool) -> None:
    options: dict[str, Any] = {
        "num_workers": 3, "worker_init_fn": initialised, "collate_fn": as_list,
        "persistent_workers": persistent_workers,
    }  # fmt: skip
    seeds: list[set[int]] = []
    for cls in (Torchs, DataLoader):
        made: Any = cls(Informed(), 2, **options)  # type: ignore[arg-type]
        for _ in range(2):
            seen = flat(made)
            workers = [worker for worker, *_ in seen]  # type: ignore[misc]
            assert workers == [0, 0, 1, 1, 2, 2] * 2, "batches go round"
            assert {told[1] for told in seen} == {3}  # type: ignore[index]
            assert all(told[3] and told[4] == told[0] for told in seen)  # type: ignore[index]
            seeds.append({told[2] for told in seen})  # type: ignore[index]
            low = min(seeds[-1])
            assert seeds[-1] == {low, low + 1, low + 2}
        closed(made)
    assert torch.utils.data.get_worker_info() is None
    if not persistent_workers:
        assert not seeds[2] & seeds[3], "new seeds in every epoch"


def transformed(sample: Any) -> Any:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    return info.id, sorted(info.dataset)


def test_a_transform_knows_its_worker_and_a_mixtures_datasets_by_name() -> None:
    given = {"a": [1, 2], "b": [3, 4]}
    with DataLoader(
        given, 4, mixture={"a": 1, "b": 1}, num_workers=1, transform=transformed, collate_fn=as_list
    ) as loader:
        assert flat(loader) == [(0, ["a", "b"])] * 4


class Pids(Numbers):
    def __getitem__(self, index: int) -> int:
        return os.getpid()


@pytest.mark.parametrize("persistent_workers", [False, True])
def test_persistent_workers_are_the_same_processes_over_epochs_breaks_and_loads(
    persistent_workers: bool,
) -> None:
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent_workers}

    def epoch(made: Any) -> frozenset[int]:
        return frozenset(flat(batches(made)))

    torchs: Any = Torchs(Pids(), 2, **options)  # type: ignore[arg-type]
    theirs = [epoch(torchs) for _ in range(2)]
    with DataLoader(Pids(), 2, **options) as loader:
        ours = [epoch(loader) for _ in range(2)]
        for batch in loader:
            del batch
            break
        ours.append(epoch(loader))
        loader.load_state_dict(loader.state_dict() | {"delivered": 4})
        ours.append(epoch(loader))
    assert len(set(theirs)) == (1 if persistent_workers else 2)
    assert len(set(ours)) == (1 if persistent_workers else 4)
    assert all(len(pids) == 2 for pids in ours)


def test_global_random_states_are_drawn_from_and_moved_by_nothing(
    tmp_path: Path, engine: dict[str, Any]
) -> None:
    """Over two epochs, a break, a restore, and a look at one batch."""

    def states() -> Any:
        name, keys, *rest = np.random.get_state()  # noqa: NPY002
        return random.getstate(), torch.get_rng_state().tolist(), (name, keys.tolist(), *rest)

    dataset = Dataset.from_path("a", write_shards(tmp_path, [9, 8]))
    seen = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        start = states()
        with DataLoader(dataset, 4, shuffle=True, **engine) as loader:
            seen.append([batches(loader), batches(loader)])
            next(iter(loader))
            loader.load_state_dict(loader.state_dict())
            seen[-1] += [batches(loader), [ids(loader.batch(1))]]
        assert states() == start
    assert seen[0] == seen[1]


@pytest.fixture(params=ENGINES.values(), ids=ENGINES)
def engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


# --- time-outs -----------------------------------------------------------------------------------


class LateOnce(Numbers):
    """Index 4 comes only after a file is there."""

    def __init__(self, gate: Path) -> None:
        super().__init__()
        self.gate = gate

    def __getitem__(self, index: int) -> int:
        while index == 4 and not self.gate.exists():
            time.sleep(0.01)
        return index


@BOTH
def test_after_a_time_out_the_loop_goes_on_with_the_late_batch(loader: Any, tmp_path: Path) -> None:
    made = loader(LateOnce(tmp_path / "gate"), 4, num_workers=1, timeout=0.5)
    loop = iter(made)
    assert ids(patiently(loop)) == [0, 1, 2, 3]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"timed out after 0\.5 seconds"):
            next(loop)
    (tmp_path / "gate").touch()
    assert [ids(patiently(loop)) for _ in range(2)] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert next(loop, None) is None
    closed(made)


# --- start methods -------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("method", ["no such method", 3])
def test_an_unknown_start_method_is_refused_at_construction(loader: Any, method: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="multiprocessing_context"):
        loader(Numbers(), num_workers=1, multiprocessing_context=method)


def own_context() -> Any:
    return multiprocessing.get_context("fork")


@pytest.mark.parametrize("context", ["fork", own_context()], ids=["name", "object"])
def test_a_start_method_is_given_by_name_or_as_a_context(context: Any) -> None:
    with DataLoader(Numbers(), 4, num_workers=1, multiprocessing_context=context) as loader:
        assert loader.multiprocessing_context is (
            context if not isinstance(context, str) else multiprocessing.get_context(context)
        )
        assert batches(loader) == batches(Torchs(Numbers(), 4))  # type: ignore[arg-type]


class Locked(Numbers):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


UNSENDABLE: dict[str, tuple[Any, dict[str, Any], str]] = {
    "transform": (Numbers(), {"transform": lambda x: x}, r"transform \(<function <lambda> at"),
    "collate_fn": (Numbers(), {"collate_fn": lambda x: x}, r"collate_fn \(<function <lambda> at"),
    "worker_init_fn": (
        Numbers(), {"worker_init_fn": lambda i: None}, r"worker_init_fn \(<function <lambda> at",
    ),
    "dataset": (Locked(), {}, r"dataset 'dataset' .*cannot pickle '_thread\.lock' object"),
    "one of two datasets": (
        {"good": Numbers(), "bad": Locked()}, {"mixture": {"good": 1, "bad": 1}}, r"^dataset 'bad'",
    ),
    "several": (
        Locked(), {"collate_fn": as_list, "transform": threading.Lock().__enter__},
        r"transform .* and dataset 'dataset'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("dataset", "options", "message"), UNSENDABLE.values(), ids=UNSENDABLE)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
@pytest.mark.parametrize("warned", ["ignore", "error"])
def test_what_cannot_be_sent_to_a_worker_is_named_and_nothing_is_left_behind(
    dataset: Any, options: dict[str, Any], message: str, method: str, warned: Any
) -> None:
    before = multiprocessing.active_children()
    with DataLoader(dataset, 2, num_workers=1, multiprocessing_context=method, **options) as loader:
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter(warned)
                with pytest.raises(ConfigurationError, match=message) as caught:
                    next(iter(loader))
            assert 'multiprocessing_context="fork"' in str(caught.value)
        assert loader.delivered == 0
    assert set(multiprocessing.active_children()) <= set(before)
    if not isinstance(dataset, Locked):
        with DataLoader(dataset, 2, **options) as inline:
            next(iter(inline))


# --- several loaders at a time -------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("training", "evaluation"),
    [
        ({}, {"num_workers": 2}),
        ({"num_threads": 3}, {"num_workers": 2}),
        ({"num_workers": 2}, {"num_threads": 3}),
        ({"num_workers": 2}, {"num_workers": 2}),
        ({"num_workers": 2, "persistent_workers": True}, {"num_workers": 1}),
    ],
)
def test_an_evaluation_in_the_middle_of_an_epoch_disturbs_nothing(
    tmp_path: Path, training: dict[str, Any], evaluation: dict[str, Any]
) -> None:
    """Forked while the training loader's threads or processes are at work, on the same dataset."""
    dataset = Dataset.from_path("a", write_shards(tmp_path, [30, 25]))
    with (
        DataLoader(dataset, 4, shuffle=True, **training) as train,
        DataLoader(dataset, 5, **evaluation) as evaluate,
    ):
        expected = batches(DataLoader(dataset, 4, shuffle=True, num_threads=0))
        seen = []
        for number, batch in enumerate(train):
            seen.append(ids(batch))
            if number % 5 == 2:
                assert flat(batches(evaluate)) == [*range(55)]
        assert seen == expected
        assert (train.epoch, train.delivered, evaluate.epoch) == (1, 0, 3)


# --- the constructor -----------------------------------------------------------------------------

HONOURED = {
    "dataset", "batch_size", "shuffle", "num_workers", "collate_fn", "pin_memory", "drop_last",
    "timeout", "worker_init_fn", "multiprocessing_context", "prefetch_factor", "persistent_workers",
}  # fmt: skip
REFUSED: dict[str, tuple[Any, str]] = {
    "sampler": ([0, 1], "without a DistributedSampler use shuffle="),
    "batch_sampler": ([[0, 1]], "use batch_size="),
    "generator": (torch.Generator(), "use seed="),
    "in_order": (False, "could not be resumed"),
    "pin_memory_device": ("cuda", "leave it out"),
}


def test_each_argument_of_torchs_constructor_is_honoured_or_refused() -> None:
    """A new one in a torch to come is to be decided on here."""
    torchs = {*inspect.signature(Torchs.__init__).parameters} - {"self"}
    assert torchs == HONOURED | set(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_argument_says_what_to_do(name: str) -> None:
    value, message = REFUSED[name]
    with pytest.raises(ConfigurationError, match=f"{name}.*{message}"):
        DataLoader(Numbers(), **{name: value})


@pytest.mark.parametrize(
    "options",
    [
        {"persistent_workers": True},
        {"timeout": -1},
        {"timeout": 5},
        {"multiprocessing_context": "fork"},
        {"prefetch_factor": -1, "num_workers": 1},
        {"num_workers": -1},
        {"batch_size": 0},
        {"batch_size": -1},
        {"batch_size": 1.5},
        {"batch_size": None, "drop_last": True},
    ],
    ids=str,
)
def test_options_that_torch_refuses_are_refused(options: dict[str, Any]) -> None:
    for cls in (Torchs, DataLoader):
        with pytest.raises((ValueError, TypeError, AssertionError)):
            list(cls(Numbers(), **options))  # type: ignore[arg-type]


def test_the_signature_names_what_torchs_loader_has() -> None:
    ours = DataLoader(Numbers(), 3, num_workers=2, timeout=7, persistent_workers=True)
    theirs: Any = Torchs(Numbers(), 3, num_workers=2, timeout=7, persistent_workers=True)  # type: ignore[arg-type]
    same_values = (
        "batch_size", "num_workers", "timeout", "persistent_workers", "drop_last", "pin_memory",
        "worker_init_fn", "multiprocessing_context", "pin_memory_device", "in_order",
    )  # fmt: skip
    for name in same_values:
        assert getattr(ours, name) == getattr(theirs, name), name
    assert {name for name in vars(theirs) if not name.startswith("_")} <= {*vars(ours)}


def test_iterable_style_datasets_are_refused() -> None:
    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    assert len(list(Torchs(Stream()))) == 3
    with pytest.raises(ConfigurationError, match="map-style"):
        DataLoader(Stream())
