"""What people misread is told: keywords, filters, provenance, and what follows a bad record."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import SequentialSampler

from zephon_torch import DataLoader, StaticMixtureWorkSource
from zephon_torch.errors import ConfigurationError, MixtureError, RecordError, WorkerError
from zephon_torch.io import Dataset

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEPHON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


ENGINES: dict[str, dict[str, Any]] = {
    "inline": {"num_threads": 0},
    "default": {},
    "threads": {"num_threads": 2},
    "worker": {"num_workers": 1},
    "workers": {"num_workers": 2},
    "kept workers": {"num_workers": 2, "persistent_workers": True},
}
on_each_engine = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "weights", "messages"),
    [
        (["a", "b"], ["a", "c"], ["dataset 'b' has no weight", "weight 'c' has no dataset"]),
        (["a", "b", "d"], ["a"], ["datasets 'b', 'd' have no weight"]),
        (["a"], ["a", "c", "b"], ["weights 'b', 'c' have no dataset: the datasets are ['a']"]),
        (["Web"], ["web"], ["dataset 'Web' has no weight", "weight 'web' has no dataset"]),
    ],
)
def test_all_names_that_do_not_match_are_named(
    names: list[str], weights: list[str], messages: list[str]
) -> None:
    datasets = [Dataset.from_samples(name, [1]) for name in names]
    with pytest.raises(MixtureError) as caught:
        StaticMixtureWorkSource(datasets, dict.fromkeys(weights, 1))
    assert all(message in str(caught.value) for message in messages)
    assert (" no dataset" in str(caught.value)) == bool(set(weights) - set(names))


# --- keywords -------------------------------------------------------------------------------------

OF_SOURCE = set(inspect.signature(StaticMixtureWorkSource).parameters)
OF_SOURCE -= {"datasets", "mixture", "seed"}


@pytest.mark.parametrize("name", sorted(OF_SOURCE))
def test_options_of_a_source_say_where_they_belong(name: str) -> None:
    way = rf"DataLoader\(StaticMixtureWorkSource\(datasets, mixture, {name}=\.\.\.\), \.\.\.\)"
    with pytest.raises(TypeError, match=rf"DataLoader takes no {name}=: .*{way}"):
        DataLoader([1, 2], **{name: 1})


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"batchsize": 2}, "did you mean 'batch_size'"),
        ({"num_worker": 2}, "did you mean 'num_workers'"),
        ({"max_sample": 2}, r"did you mean 'max_samples'\? \(.*StaticMixtureWorkSource"),
        ({"xyzzy": 2}, "DataLoader has no argument 'xyzzy'$"),
        ({"batchsize": 2, "lane": 3}, "'batch_size'.*'lanes'"),
    ],
)
def test_misspelt_keywords_get_a_near_miss(given: dict[str, Any], meant: str) -> None:
    with pytest.raises(TypeError, match=meant):
        DataLoader([1, 2], **given)


def test_a_source_too_says_what_was_meant() -> None:
    with pytest.raises(TypeError, match="has no argument 'max_sample': did you mean 'max_samples'"):
        StaticMixtureWorkSource([], {}, max_sample=3)  # type: ignore[call-arg]


def test_signatures_stay_those_of_the_constructors() -> None:
    """Frameworks look at them to build loaders anew."""
    names = list(inspect.signature(DataLoader).parameters)
    assert names[:4] == ["dataset", "batch_size", "shuffle", "sampler"] and "mesh" in names
    kinds = {p.kind for p in inspect.signature(DataLoader.__init__).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'dataset'"):
        DataLoader()  # type: ignore[call-arg]

    class Mine(DataLoader):
        def __init__(self, extra: int, **options: Any) -> None:
            super().__init__([1, 2], **options)
            self.extra = extra

    assert Mine(3, batch_size=2).extra == 3
    with pytest.raises(TypeError, match="did you mean 'batch_size'"):
        Mine(3, batchsize=2)


# --- provenance -----------------------------------------------------------------------------------


def rows_in(folder: Path) -> Dataset:
    np.save(folder / "rows.npy", np.arange(12).reshape(6, 2))
    return Dataset.from_path("rows", folder / "rows.npy")


def test_rows_have_no_place_for_provenance(tmp_path: Path) -> None:
    rows = rows_in(tmp_path)
    told = r"samples of dataset 'rows' are rows, of format 'tokens': make dicts of them in transf"
    with pytest.raises(ConfigurationError, match=told):
        DataLoader(rows, provenance=True)
    with pytest.raises(ConfigurationError, match=told):
        DataLoader(
            {"rows": rows, "more": Dataset.from_samples("more", [{"x": 1}])},
            mixture={"rows": 1, "more": 1},
            transform={"rows": None, "more": dict},
            provenance=True,
        )
    loader = DataLoader(rows, batch_size=3, transform=lambda row: {"x": row}, provenance=True)
    assert next(iter(loader))["provenance"].tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 2]]
    by_hand = DataLoader(rows, collate_fn=lambda rows: {"x": rows}, provenance=True)
    assert next(iter(by_hand))["provenance"].tolist() == [[0, 0, 0]]


@on_each_engine
def test_samples_that_are_no_dicts_are_told_at_the_first_batch(engine: dict[str, Any]) -> None:
    with DataLoader([1, 2, 3], batch_size=2, provenance=True, **engine) as loader:
        told = r"provenance=True .*the batch is a Tensor, .*dataset 'dataset' are int: make dicts"
        with pytest.raises(ConfigurationError, match=told):
            next(iter(loader))


# --- transforms that return None ------------------------------------------------------------------


class Filter:
    """As people write it: None for what they do not want."""

    def __call__(self, sample: Any) -> Any:
        return None if sample in (5, "5", {"x": 5}) else sample


@on_each_engine
@pytest.mark.parametrize("on_error", ["raise", "skip", "substitute"])
@pytest.mark.parametrize("kind", ["int", "text", "dict"])
def test_a_transform_that_returns_none_is_told_how_to_filter(
    tmp_path: Path, engine: dict[str, Any], on_error: Any, kind: str
) -> None:
    line = {"int": "{}", "text": '"{}"', "dict": '{{"x": {}}}'}[kind]
    (tmp_path / "a.jsonl").write_text("".join(line.format(i) + "\n" for i in range(8)))
    dataset = Dataset.from_path("web", tmp_path / "a.jsonl")
    options = {"transform": Filter(), "on_error": on_error} | engine
    with DataLoader(dataset, batch_size=4, **options) as loader:
        batches = iter(loader)
        next(batches)
        told = rf"transform returned None for dataset 'web', shard {tmp_path}/a.jsonl, record 5: "
        told += r'.*on_error="skip"'
        with pytest.raises(WorkerError, match=told):
            next(batches)


def test_a_dataset_that_returns_none_is_torchs_error_with_the_record() -> None:
    with pytest.raises(RuntimeError, match="NoneType") as caught:
        list(DataLoader([1, None, 3], batch_size=3))
    assert any("is None, dataset 'dataset', shard dataset[0], record 1: " in note
               for note in caught.value.__notes__)  # fmt: skip
    assert list(DataLoader(["a", None], batch_size=2)) == [["a", None]]  # as from torch


def test_none_first_or_alone_is_told_too() -> None:
    def as_it_is(sample: Any) -> Any:
        return sample

    for samples in ([None, 1], [None], [None, None], ["a", None], [None, "a"], [None, {"x": 1}]):
        with pytest.raises(WorkerError, match="transform returned None"):
            list(DataLoader(samples, batch_size=2, transform=as_it_is))


def test_a_collate_fn_may_get_none() -> None:
    def kept(samples: list[Any]) -> list[Any]:
        return [sample for sample in samples if sample is not None]

    loader = DataLoader(list(range(8)), batch_size=4, transform=Filter(), collate_fn=kept)
    assert list(loader) == [[0, 1, 2, 3], [4, 6, 7]]


def test_a_value_of_none_is_not_a_sample_of_none() -> None:
    with pytest.raises(TypeError, match="NoneType"):
        list(DataLoader([{"x": None}] * 2, batch_size=2))


def test_what_the_message_says_works() -> None:
    def refuse(sample: int) -> int:
        if sample == 5:
            raise ValueError("not wanted")
        return sample

    loader = DataLoader(list(range(8)), batch_size=4, transform=refuse, on_error="skip")
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 6, 7]]
    assert loader.stats.num_bad == 1


# --- Lightning's overfit_batches ------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [True, False, None])
def test_overfitting_is_told_of_shuffle_only_where_there_is_one(shuffle: bool | None) -> None:
    """As Lightning puts it: a SequentialSampler over loader.dataset, for the class of its own."""
    loader = DataLoader(list(range(20)), batch_size=4, shuffle=shuffle)
    sampler = SequentialSampler(loader.dataset)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"overfit_batches=: use limit_train_") as caught:
        type(loader.batch_sampler)(sampler, batch_size=4, drop_last=False)
    assert ("shuffle" in str(caught.value)) == bool(shuffle)
    assert "predict" not in str(caught.value)


def test_what_it_says_to_do_gives_the_same_batches_in_each_epoch() -> None:
    loader = DataLoader(list(range(20)), batch_size=4)
    seen = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        seen.append([batch.tolist() for batch, _ in zip(loader, range(2), strict=False)])
    assert seen == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 3


def test_lanes_that_share_nothing_with_the_batch_size_work() -> None:
    for size, lanes in ((6, 4), (4, 6), (7, 3), (5, 9)):
        loader = DataLoader(list(range(500)), global_batch_size=size, lanes=lanes)
        assert sorted(int(i) for batch in loader for i in batch) == list(range(500))


# --- after a bad record has raised ----------------------------------------------------------------


def numbers_with_bad(folder: Path, bad: int) -> Dataset:
    lines = ("{bad" if i == bad else str(i) for i in range(24))
    (folder / "a.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return Dataset.from_path("web", folder / "a.jsonl")


class Fails:
    """A transform that fails on one sample."""

    def __init__(self, bad: int) -> None:
        self.bad = bad

    def __call__(self, sample: int) -> int:
        if sample == self.bad:
            raise RecordError("made to fail")
        return sample


@on_each_engine
@pytest.mark.parametrize("where", ["record", "transform"])
@pytest.mark.parametrize("bad", [9, 22], ids=["in the middle", "at the end"])
def test_after_a_bad_record_next_goes_on_and_a_save_holds_what_was_handed_over(
    tmp_path: Path, engine: dict[str, Any], where: str, bad: int
) -> None:
    dataset = numbers_with_bad(tmp_path, bad if where == "record" else -1)
    options = {"batch_size": 4} | engine
    if where == "transform":
        options["transform"] = Fails(bad)
    batches = [[*range(start, start + 4)] for start in range(0, 24, 4)]
    number = bad // 4
    with DataLoader(dataset, **options) as loader, DataLoader(dataset, **options) as other:
        steps = iter(loader)
        assert [next(steps).tolist() for _ in range(number)] == batches[:number]
        with pytest.raises(RecordError):
            next(steps)
        saved = loader.state_dict()
        assert (saved["epoch"], saved["delivered"]) == (0, 4 * number)
        assert [batch.tolist() for batch in steps] == batches[number + 1 :]  # all but the bad one
        assert (loader.epoch, loader.delivered) == (1, 0)
        other.load_state_dict(saved)
        with pytest.raises(RecordError):  # it comes again
            next(iter(other))
    with DataLoader(dataset, on_error="skip", **options) as skipping:
        skipping.load_state_dict(saved)
        rest = [sample for batch in skipping for sample in batch.tolist()]
    assert rest == [i for i in range(4 * number, 24) if i != bad]
    if number < 5:
        passed_over = batches[number + 1]
        with DataLoader(dataset, **options) as loader:
            loader.load_state_dict(saved)
            steps = iter(loader)
            with pytest.raises(RecordError):
                next(steps)
            assert next(steps).tolist() == passed_over
            assert loader.delivered == 4 * (number + 2)  # the batch before counts as handed over
