"""Attributes that are set on a loader that is made: each works as torch's, or raises."""

from __future__ import annotations

import copy
import inspect
import pickle
from typing import Any

import pytest
import torch
import torch.utils.data
from toys import ENGINES, batches, write_shards

from zephon_torch import ConfigurationError, DataLoader
from zephon_torch.io import Dataset

Torchs = torch.utils.data.DataLoader


class Scaled(torch.utils.data.Dataset[int]):
    """Numbers times something that users set."""

    scale = 1
    classes = ("a", "b")

    def __init__(self, size: int = 8) -> None:
        self.size, self.transform = size, None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> int:
        value = number * self.scale
        return value if self.transform is None else self.transform(value)


def plus_one(value: int) -> int:
    return value + 1


# --- the dataset behind --------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))
def test_attributes_of_the_dataset_are_read_and_set_through_the_loader(
    engine: dict[str, Any],
) -> None:
    """Public report: pytorch/pytorch#12536."""
    dataset = Scaled()
    with DataLoader(dataset, 4, **engine) as loader:
        assert loader.dataset.classes == ("a", "b")  # type: ignore[attr-defined]
        assert batches(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        loader.dataset.scale = 10  # type: ignore[attr-defined]
        assert batches(loader) == [[0, 10, 20, 30], [40, 50, 60, 70]]
        loader.dataset.transform = plus_one  # type: ignore[attr-defined]
        assert batches(loader) == [[1, 11, 21, 31], [41, 51, 61, 71]]
        del loader.dataset.scale  # type: ignore[attr-defined]
        assert batches(loader) == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert (dataset.scale, dataset.transform) == (1, plus_one)


def test_a_wrapper_of_a_dataset_is_passed_through_as_with_torch() -> None:
    inner = Scaled()
    loader: Any = DataLoader(torch.utils.data.Subset(inner, [5, 1]), 2)
    loader.dataset.dataset.scale = 3
    assert batches(loader) == [[15, 3]]
    assert loader.dataset.indices == [5, 1]


def test_an_attribute_that_nothing_has_is_the_datasets_error() -> None:
    loader: Any = DataLoader(Scaled(), 4)
    with pytest.raises(AttributeError, match="'Scaled' object has no attribute 'targets'"):
        loader.dataset.targets  # noqa: B018
    with pytest.raises(AttributeError):
        DataLoader([1, 2, 3]).dataset.scale = 3  # type: ignore[attr-defined]
    assert not hasattr(loader.dataset, "collate")


def test_of_several_datasets_the_message_names_each(tmp_path: Any) -> None:
    files = Dataset.from_path("files", write_shards(tmp_path, [4]))
    loader: Any = DataLoader(
        [files, Dataset.from_torch("a", Scaled())], 4, mixture={"files": 1, "a": 1}
    )
    for use in (
        lambda: loader.dataset.classes,
        lambda: setattr(loader.dataset, "classes", 1),
        lambda: delattr(loader.dataset, "classes"),
    ):
        message = r"no attribute 'classes' of its own.*ask loader.datasets\[0\].samples \('a'\)"
        with pytest.raises(AttributeError, match=message):
            use()
    loader = DataLoader(files, 4)
    with pytest.raises(AttributeError, match=r"stands for \['files'\]: those of files have no"):
        loader.dataset.classes  # noqa: B018


def test_a_copy_and_a_pickle_of_the_dataset_pass_on_too() -> None:
    loader: Any = DataLoader(Scaled(), 4)
    for other in (copy.deepcopy(loader.dataset), pickle.loads(pickle.dumps(loader.dataset))):
        other.scale = 7
        assert (other.scale, len(other)) == (7, 8)


# --- the loader's own ----------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))
def test_a_collate_fn_that_is_set_is_that_of_the_next_loop(engine: dict[str, Any]) -> None:
    with DataLoader(Scaled(), 4, **engine) as loader:
        loop = iter(loader)
        assert next(loop).tolist() == [0, 1, 2, 3]
        loader.collate_fn = sum  # type: ignore[assignment]
        assert next(loop).tolist() == [4, 5, 6, 7], "a loop goes on as it began"
        assert list(loader) == [6, 22]
        assert loader.batch(0) == 6 and list(loader.uncounted()) == [6, 22]
        assert loader.collate_fn is sum
        loader.collate_fn = None  # type: ignore[assignment]
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_in_the_middle_of_a_loop_with_persistent_workers_it_goes_on_as_it_began() -> None:
    with DataLoader(Scaled(40), 4, num_workers=2, persistent_workers=True) as loader:
        loop = iter(loader)
        seen = [next(loop).tolist()]
        loader.dataset.scale = 10  # type: ignore[attr-defined]
        seen += [batch.tolist() for batch in loop]
        assert seen == [list(range(n, n + 4)) for n in range(0, 40, 4)]
        assert next(iter(loader)).tolist() == [0, 10, 20, 30]


class Where(torch.utils.data.Dataset[int]):
    """The number of the worker that reads, plus one; 0 in the main process."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> int:
        worker = torch.utils.data.get_worker_info()
        return 0 if worker is None else 1 + worker.id


def of_where(batch: torch.Tensor) -> set[int]:
    return set(batch.tolist())


def test_the_number_of_workers_may_be_set() -> None:
    for cls in (Torchs, DataLoader):
        loader: Any = cls(Where(), 4, num_workers=1)  # torch's cannot go up from 0
        loader.num_workers = 2
        assert set.union(*map(of_where, loader)) == {1, 2}, cls
        loader.num_workers = 0
        assert set.union(*map(of_where, loader)) == {0}, cls
    fresh: Any = DataLoader(Where(), 4)
    fresh.num_workers = 2
    assert set.union(*map(of_where, fresh)) == {1, 2}


def raising(worker_id: int) -> None:
    raise KeyError(f"worker {worker_id} is set up")


def test_what_workers_are_started_with_may_be_set() -> None:
    for cls in (Torchs, DataLoader):
        loader: Any = cls(Scaled(), 4, num_workers=1)
        loader.worker_init_fn = raising
        with pytest.raises(KeyError, match="worker 0 is set up"):
            list(loader)
        loader = cls(Scaled(), 4, num_workers=1)
        loader.multiprocessing_context = "spawn"
        loader.prefetch_factor = 3
        loader.timeout = 60
        assert batches(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        with pytest.raises(ValueError, match="valid start method"):
            loader.multiprocessing_context = "teleport"


def test_pin_memory_that_is_set_holds() -> None:
    loader = DataLoader(Scaled(), 4)
    loader.pin_memory = True
    if torch.cuda.is_available():
        assert next(iter(loader)).is_pinned()
    else:
        with pytest.warns(UserWarning, match="pin_memory=True has no effect"):
            next(iter(loader))


VALUES: dict[str, Any] = {
    "batch_size": 8, "drop_last": True, "sampler": [1], "batch_sampler": [[1]], "shuffle": True,
    "dataset": [1], "persistent_workers": True, "generator": torch.Generator(), "in_order": False,
    "pin_memory_device": "cuda", "mixture": {"a": 1}, "seed": 5, "lanes": 2,
    "global_batch_size": 8, "transform": plus_one, "takes_rng": True, "on_error": "skip",
    "provenance": True, "num_threads": 2, "cache_dir": "x", "cache_limit": 9, "rank": 1,
    "num_replicas": 2, "mesh": None,
}  # fmt: skip
WORK = {
    "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn",
    "multiprocessing_context", "prefetch_factor",
}  # fmt: skip


def test_each_argument_of_the_constructor_works_or_raises_when_it_is_set() -> None:
    """An argument to come is to be decided on here."""
    arguments = {*inspect.signature(DataLoader.__init__).parameters} - {"self"}
    assert arguments == {*VALUES} | WORK


@pytest.mark.parametrize("name", VALUES)
def test_what_belongs_to_the_plan_cannot_be_set(name: str) -> None:
    loader = DataLoader(Scaled(), 4)
    before = vars(loader).copy()
    with pytest.raises(ConfigurationError, match=f"{name}.*(give|use|leave|not taken)"):
        setattr(loader, name, VALUES[name])
    assert vars(loader) == before
    assert batches(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("collate_fn", 3, "expected a function"),
        ("num_workers", -1, "expected an integer >= 0"),
        ("num_workers", 2, "num_threads=1: use processes or threads"),
        ("prefetch_factor", 0, "expected an integer >= 1"),
        ("timeout", 5, "without worker processes"),
    ],
)
def test_values_that_cannot_work_are_refused_at_once(name: str, value: Any, message: str) -> None:
    loader = DataLoader(Scaled(), 4, num_threads=1)
    with pytest.raises(ConfigurationError, match=message):
        setattr(loader, name, value)
    assert batches(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_the_message_leads_to_the_same_sample() -> None:
    loader = DataLoader(Scaled(), 2)
    next(iter(loader))
    message = r"give batch_size= to a new one.*new.load_state_dict\(loader.state_dict\(\)\)"
    with pytest.raises(ConfigurationError, match=message):
        loader.batch_size = 3
    new = DataLoader(Scaled(), 3)
    new.load_state_dict(loader.state_dict())
    assert batches(new) == [[2, 3, 4], [5, 6, 7]]


def test_a_subclass_has_attributes_of_its_own() -> None:
    class Mine(DataLoader):
        def __init__(self, *arguments: Any, seed: int, transform: Any) -> None:
            super().__init__(*arguments, seed=seed)
            self.seed, self.transform, self.tag = seed, transform, "mine"

    loader = Mine(Scaled(), 4, seed=3, transform=None)
    loader.tag = "other"
    assert (loader.seed, loader.tag) == (3, "other")
    with pytest.raises(ConfigurationError, match="batch_size"):
        loader.batch_size = 3


@pytest.mark.parametrize("name", ["seed", "shuffle", "drop_last", "dataset"])
def test_the_samplers_attributes_cannot_be_set_either(name: str) -> None:
    loader: Any = DataLoader(Scaled(), 4)
    with pytest.raises(ConfigurationError, match=f"{name} of a sampler.*to a new loader"):
        setattr(loader.sampler, name, 1)
    with pytest.raises(AttributeError):
        loader.batch_sampler.batch_size = 3


def test_the_samplers_epoch_may_be_set_as_with_a_distributed_sampler() -> None:
    loader: Any = DataLoader(Scaled(), 4, shuffle=True)
    loader.sampler.epoch = 3
    assert loader.epoch == loader.sampler.epoch == 3
    assert batches(loader) == [batch.tolist() for batch in DataLoader(
        Scaled(), 4, shuffle=True).uncounted(3)]  # fmt: skip
    assert loader.epoch == loader.sampler.epoch == 4


# --- a loader is no dataset ----------------------------------------------------------------------


def test_a_loader_is_refused_as_a_dataset() -> None:
    """Public report: microsoft/DeepSpeed#1081."""
    inner = DataLoader(Scaled(), 4)
    for loader in (inner, Torchs(Scaled(), 4)):
        with pytest.raises(ConfigurationError, match="is a DataLoader, whose items would be"):
            DataLoader(loader, 2)
        with pytest.raises(ConfigurationError, match="'a' is a DataLoader"):
            DataLoader({"a": loader}, 2, mixture={"a": 1})
        with pytest.raises(ConfigurationError, match="'a' is a DataLoader"):
            Dataset.from_samples("a", loader)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="give that loader's source"):
        DataLoader(inner.dataset, 2)
    assert batches(DataLoader(inner.source, 2)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_torch_refuses_it_too_with_what_to_do(num_workers: int) -> None:
    inner = DataLoader(Scaled(), 4)
    with pytest.raises(TypeError, match=r"a loader is no dataset.*loader.batch\(step\)"):
        next(iter(Torchs(inner, 2, num_workers=num_workers)))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a loader is no dataset"):
        torch.utils.data.Subset(inner, [0])[0]  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a loader is no dataset"):
        inner[0]
