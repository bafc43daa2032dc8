"""User code on samples: randomness that belongs to the sample, and errors that name it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toys import as_list, batches, flat, memory, mixture_of, one, three_in_files, write_shards

from zephon_torch import DataLoader
from zephon_torch.errors import ConfigurationError, RecordError, WorkerError
from zephon_torch.io import Dataset

ENGINES: list[dict[str, Any]] = [
    {"num_threads": 0},
    {"num_threads": 2},
    {"num_workers": 2},
]


def draw(sample: Any, rng: np.random.Generator) -> tuple[int, int]:
    number = sample["id"] if isinstance(sample, dict) else sample
    return number, int(rng.integers(1 << 60))


def drawn(loader: DataLoader) -> list[tuple[int, int]]:
    with loader:
        return flat(loader)  # type: ignore[arg-type,return-value]


def make(source: Any, batch_size: int = 4, **options: Any) -> DataLoader:
    return DataLoader(
        source, batch_size, transform=draw, takes_rng=True, collate_fn=as_list, **options
    )


# --- randomness ----------------------------------------------------------------------------------


def test_draws_are_the_same_on_any_engine_batch_size_and_world(tmp_path: Path) -> None:
    source = mixture_of(three_in_files(tmp_path), shuffle_block_size="global", max_samples=72)
    reference = drawn(make(source))
    for engine in ENGINES:
        assert drawn(make(source, 6, **engine)) == reference
    ranks = [list(make(source, 4, rank=r, num_replicas=2)) for r in range(2)]
    assert flat(flat(step) for step in zip(*ranks, strict=True)) == reference


def test_draws_are_the_same_after_a_resume() -> None:
    source = one(memory("a", 40), shuffle_block_size="global")
    reference = drawn(make(source))
    loader = make(source)
    loop = iter(loader)
    for _ in range(3):
        next(loop)
    restored = make(source)
    restored.load_state_dict(loader.state_dict())
    assert drawn(restored) == reference[12:]


def test_draws_are_new_in_every_epoch_and_pass_and_for_every_sample() -> None:
    source = one(memory("a", 20), stop_after_passes=3, reshuffle_on_repeat=False)
    loader = make(source)
    draws = [value for _ in range(2) for _, value in drawn(loader)]
    assert len(draws) == len(set(draws)) == 2 * 3 * 20


def test_draws_differ_between_seeds_datasets_and_shards() -> None:
    def draws(seed: int, name: str, **options: Any) -> dict[int, int]:
        return dict(drawn(make(one(memory(name, 20, **options), seed=seed))))

    first = draws(0, "a")
    assert draws(0, "a") == first
    for other in (draws(1, "a"), draws(0, "b")):
        assert not set(first.values()) & set(other.values())
    # record 0 of the second shard is not record 0 of the first
    assert len(set(draws(0, "a", shard_sizes=[10, 10]).values())) == 20


def test_draws_do_not_depend_on_other_datasets_or_the_order() -> None:
    def of_a(source: Any) -> dict[int, int]:
        return {i: value for i, value in drawn(make(source)) if i < 40}

    alone = of_a(one(memory("a", 40)))
    shuffled = of_a(one(memory("a", 40), shuffle_block_size="global", chunk_size=8))
    assert alone == shuffled
    from zephon_torch import StaticMixtureWorkSource

    pair = StaticMixtureWorkSource(
        [memory("a", 40), memory("b", 40, 100)], {"a": 1, "b": 1}, seed=0
    )
    assert of_a(pair) == alone


def test_a_generator_is_a_full_numpy_generator_of_its_own() -> None:
    def shuffle(sample: int, rng: np.random.Generator) -> list[int]:
        assert isinstance(rng, np.random.Generator)
        return rng.permutation(4).tolist() + rng.integers(9, size=sample).tolist()

    def run() -> list[Any]:
        loader = DataLoader(
            memory("a", 9), 3, transform=shuffle, takes_rng=True, collate_fn=as_list
        )
        return flat(loader)

    assert run() == run(), "how much one sample draws does not move the others"


def test_without_takes_rng_a_transform_gets_the_sample_alone() -> None:
    loader = DataLoader(memory("a", 4), batch_size=2, transform=lambda sample: sample * 10)
    assert [batch.tolist() for batch in loader] == [[0, 10], [20, 30]]


# --- errors --------------------------------------------------------------------------------------


class TwoArguments(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def fail_at_41(sample: Any) -> Any:
    number = sample["id"] if isinstance(sample, dict) else sample
    if number == 41:
        raise TwoArguments(1, 2)
    return number


def stop_at_41(sample: Any) -> Any:
    number = sample["id"] if isinstance(sample, dict) else sample
    if number == 41:
        return next(iter(()))
    return number


def said(error: BaseException) -> str:
    """All that a traceback would show of an error."""
    return "\n".join([type(error).__name__, str(error), *getattr(error, "__notes__", ())])


@pytest.mark.parametrize("engine", ENGINES)
def test_an_error_in_a_transform_names_dataset_file_and_record(
    tmp_path: Path, engine: dict[str, Any]
) -> None:
    root = write_shards(tmp_path / "web", [20, 30])
    dataset = Dataset.from_path("web", root)
    with DataLoader(dataset, batch_size=8, transform=fail_at_41, **engine) as loader:
        loop = iter(loader)
        for _ in range(5):
            next(loop)
        with pytest.raises(Exception, match="1 and 2") as caught:
            next(loop)
    text = said(caught.value)
    for part in ("TwoArguments", "in transform", "'web'", "01.jsonl", "record 21", "fail_at_41"):
        assert part in text or (part == "fail_at_41" and "num_workers" not in engine), part


@pytest.mark.parametrize("engine", ENGINES)
def test_stop_iteration_in_a_transform_is_an_error(engine: dict[str, Any]) -> None:
    loader = DataLoader(memory("web", 50), batch_size=8, transform=stop_at_41, **engine)
    with loader, pytest.raises(WorkerError, match=r"StopIteration on dataset 'web'.*record 41"):
        list(loader)


class Stops:
    """A map-style dataset in which a plain next() runs dry."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> int:
        return stop_at_41(index)


@pytest.mark.parametrize("engine", ENGINES)
def test_stop_iteration_in_a_dataset_is_an_error(engine: dict[str, Any]) -> None:
    with DataLoader(Stops(), batch_size=8, **engine) as loader:
        loop, seen = iter(loader), 0
        with pytest.raises(WorkerError, match="StopIteration"):
            for _ in loop:
                seen += 1
    assert seen == 5


class Fails:
    """A map-style dataset with a broken item."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if index == 41:
            raise KeyError("line one\nline two")
        return index


@pytest.mark.parametrize("batch_size", [1, 8, 50])
@pytest.mark.parametrize("engine", ENGINES)
def test_an_error_in_a_dataset_names_the_record_however_large_the_batch(
    engine: dict[str, Any], batch_size: int
) -> None:
    dataset = Dataset.from_torch("web", Fails())
    loader = DataLoader(dataset, batch_size=batch_size, **engine)
    with loader, pytest.raises(KeyError, match="line two") as caught:
        list(loader)
    text = said(caught.value)
    assert "'web'" in text
    assert "41" in text, "the record that failed"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_broken_line_names_file_and_line(tmp_path: Path, engine: dict[str, Any]) -> None:
    root = write_shards(tmp_path / "web", [20, 30])
    lines = (root / "01.jsonl").read_text().splitlines()
    lines[21] = '{"id": }'
    (root / "01.jsonl").write_text("\n".join(lines) + "\n")
    dataset = Dataset.from_path("web", root)
    with DataLoader(dataset, batch_size=8, **engine) as loader:
        loop = iter(loader)
        for _ in range(5):
            next(loop)
        with pytest.raises(RecordError, match=r"'web'.*01\.jsonl.*line 22 \(record 21\).*JSON"):
            next(loop)


def test_each_dataset_may_have_a_transform_of_its_own() -> None:
    a, b = memory("a", 4), memory("b", 4, 100)
    options: dict[str, Any] = {"batch_size": 2, "mixture": {"a": 1, "b": 1}}
    functions = {"a": lambda i: i + 1000, "b": None}
    for engine in ({}, {"num_workers": 1}, {"num_threads": 2}):
        with DataLoader([a, b], transform=functions, **options, **engine) as loader:
            assert sorted(flat(batches(loader))) == [*range(100, 104), *range(1000, 1004)]
    drawn = {"a": lambda i, rng: i + int(rng.integers(1, 2)), "b": None}
    with DataLoader([a, b], transform=drawn, takes_rng=True, **options) as loader:
        assert sorted(flat(batches(loader))) == [1, 2, 3, 4, *range(100, 104)]


def test_transforms_by_name_must_be_those_of_the_datasets() -> None:
    a, b = memory("a", 4), memory("b", 4, 100)
    options: dict[str, Any] = {"mixture": {"a": 1, "b": 1}}
    for names in (["a"], ["a", "b", "c"], ["a", "x"]):
        with pytest.raises(ConfigurationError, match=r"the datasets are \['a', 'b'\]"):
            DataLoader([a, b], transform=dict.fromkeys(names, abs), **options)
    with pytest.raises(ConfigurationError, match="transform of 'b' is 3: expected a function"):
        DataLoader([a, b], transform={"a": abs, "b": 3}, **options)


def test_an_error_in_the_transform_of_one_dataset_names_its_sample() -> None:
    a, b = memory("a", 4), memory("b", 4, 100)
    functions = {"a": None, "b": lambda i: 1 // (i - 102)}
    loader = DataLoader([a, b], 2, mixture={"a": 1, "b": 1}, transform=functions)
    with pytest.raises(ZeroDivisionError) as raised:
        list(loader)
    assert "dataset 'b'" in raised.value.__notes__[0] and "record 2" in raised.value.__notes__[0]
