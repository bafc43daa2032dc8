"""Datasets: three ways to make one, what it says of itself, and what it refuses."""

from __future__ import annotations

import multiprocessing
import pickle
import subprocess
import sys
import tracemalloc
from collections import deque
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import running

from zephon_torch.errors import ConfigurationError, DatasetError, RecordError
from zephon_torch.io import Dataset, Shard

MILLION = 1_000_000


class Squares:
    """Map-style, never to be iterated."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        assert type(index) is int
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index**2

    def __iter__(self) -> Any:
        raise AssertionError("iterated")


class Batched(Squares):
    calls: list[list[int]]

    def __getitems__(self, indices: list[int]) -> list[int]:
        self.calls = [*getattr(self, "calls", []), indices]
        return [self[index] for index in indices]


def read(dataset: Dataset, shard: int, *samples: int) -> list[Any]:
    with closing(dataset.open(shard)) as reader:
        return reader.read(np.array(samples, dtype=np.int64))


def test_files_are_described(folder: Path) -> None:
    dataset = Dataset.from_path("web", folder)
    assert (dataset.name, dataset.format) == ("web", "jsonl")
    assert (dataset.num_shards, dataset.num_samples, len(dataset)) == (4, 38, 38)
    assert dataset.shard_num_samples.tolist() == [7, 30, 0, 1]
    assert dataset.shard_num_bytes.tolist() == [70, 327, 0, 11]
    assert dataset.shards[-1] == Shard("c.jsonl", 1, 11)
    assert dataset.shards[1:3] == [Shard("a/1.jsonl", 30, 327), Shard("b.jsonl", 0, 0)]
    assert [shard.path for shard in dataset.shards][:2] == ["a/0.jsonl", "a/1.jsonl"]
    assert dataset.shard_path(1) == str(folder / "a" / "1.jsonl")
    assert repr(dataset) == "Dataset('web', jsonl, 4 shards, 38 samples, 408 bytes)"


def test_samples_stand_in_shard_then_record_order(folder: Path) -> None:
    dataset = Dataset.from_path("web", folder)
    records = [{"id": i} for i in range(38)]
    assert list(dataset) == records
    assert [dataset[i] for i in range(-38, 38)] == records * 2
    assert dataset[np.int64(37)] == {"id": 37}


@pytest.mark.parametrize("index", [38, -39, 10**12])
def test_sample_outside_raises_index_error(folder: Path, index: int) -> None:
    with pytest.raises(IndexError, match=rf"sample {index} of dataset 'web': it has 38"):
        Dataset.from_path("web", folder)[index]


def test_sample_number_must_be_an_integer() -> None:
    for index in (1.0, slice(2), "1"):
        with pytest.raises(TypeError):
            Dataset.from_samples("a", [1, 2])[index]  # type: ignore[index]


@pytest.mark.parametrize("shard", [-1, 4])
def test_shard_outside_raises_index_error(folder: Path, shard: int) -> None:
    dataset = Dataset.from_path("web", folder)
    for use in (dataset.open, dataset.shard_path):
        with pytest.raises(IndexError, match=rf"shard {shard} of dataset 'web': it has 4"):
            use(shard)
    with pytest.raises(IndexError, match=r"shard 4 of 4 shards"):
        dataset.shards[4]


@given(sizes=st.lists(st.integers(0, 5), max_size=8), seed=st.integers(0, 9))
def test_random_reads_equal_sequential_ones(sizes: list[int], seed: int) -> None:
    dataset = Dataset.from_samples("a", list("abcdefghijklmnopqrstuvwxyz" * 2)[: sum(sizes)],
                                   shard_sizes=sizes)  # fmt: skip
    order = np.random.default_rng(seed).permutation(len(dataset))
    values = list(dataset)
    assert [dataset[i] for i in order] == [values[i] for i in order]
    by_shard = [read(dataset, at, *range(size)) for at, size in enumerate(sizes)]
    assert [value for shard in by_shard for value in shard] == values


def test_random_reads_of_files_equal_sequential_ones(folder: Path) -> None:
    dataset = Dataset.from_path("web", folder)
    order = np.random.default_rng(0).integers(0, 30, 100)
    assert read(dataset, 1, *order) == [{"id": 7 + i} for i in order]


def test_samples_in_memory_are_described() -> None:
    dataset = Dataset.from_samples("toy", "a b c d e".split(), shard_sizes=[3, 0, 2])
    assert (dataset.format, dataset.num_shards, len(dataset)) == ("memory", 3, 5)
    assert dataset.shards[2] == Shard("shard-000002", 2, 0)
    assert dataset.shard_path(2) == "toy[2]"
    assert read(dataset, 2, 1, 0, 1) == ["e", "d", "e"]
    assert repr(dataset) == "Dataset('toy', memory, 3 shards, 5 samples)"
    assert repr(Dataset.from_samples("x", [0])) == "Dataset('x', memory, 1 shard, 1 sample)"
    with pytest.raises(RecordError, match=r"dataset 'toy', shard 2 has no record 2: it holds 2"):
        read(dataset, 2, 2)


@pytest.mark.parametrize(
    "samples", [range(5), np.arange(5), torch.arange(5), deque(range(5)), (0,) * 5]
)
def test_any_sequence_will_do(samples: Any) -> None:
    assert [int(value) for value in Dataset.from_samples("a", samples)] == list(map(int, samples))


@pytest.mark.parametrize("sizes", [[], [0], np.zeros(3, dtype=np.int64)])
def test_dataset_may_be_empty(sizes: Any) -> None:
    dataset = Dataset.from_samples("none", [], shard_sizes=sizes)
    assert (len(dataset), dataset.num_shards, list(dataset)) == (0, len(sizes), [])
    assert not dataset
    with pytest.raises(IndexError):
        dataset[0]


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ([2, 2], "sum to 4, but there are 5 samples"),
        ([6, -1], "has -1, less than 0"),
        ([2.0, 3.0], "must be one integer a shard, got float64 of shape"),
        ([True] * 5, "must be one integer a shard, got bool"),
        ([[5]], "must be one integer a shard, got int64 of shape"),
        (5, "must be one integer a shard"),
        ([2**70], "must be one integer a shard, got object"),
    ],
)
def test_shard_sizes_must_fit(sizes: Any, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"shard_sizes of dataset 'a' {reason}"):
        Dataset.from_samples("a", range(5), shard_sizes=sizes)


def test_shard_sizes_are_copied_and_columns_are_read_only() -> None:
    sizes = np.array([2, 3])
    dataset = Dataset.from_samples("a", range(5), shard_sizes=sizes)
    sizes[0] = 7
    assert dataset.shard_num_samples.tolist() == [2, 3]
    for copy in (dataset, pickle.loads(pickle.dumps(dataset))):
        for column in (copy.shard_num_samples, copy.shard_num_bytes):
            assert column.dtype == np.int64
            with pytest.raises(ValueError, match="read-only"):
                column[0] = 1


@pytest.mark.parametrize("samples", ["/data/web", b"x", {"train": [1]}])
def test_what_is_no_sequence_of_samples_is_refused(samples: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"got \w+; files are read with Dataset.from_path"):
        Dataset.from_samples("a", samples)


class LengthlessIterable(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([1])


class IterableWithLength(LengthlessIterable):
    def __len__(self) -> int:
        return 1


class Lengthless(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (LengthlessIterable(), "got LengthlessIterable: it can only be iterated"),
        (IterableWithLength(), "got IterableWithLength: it can only be iterated"),
        ((i for i in range(3)), "got generator: it can only be iterated"),
        ({1, 2}, "got set: it can only be iterated"),
        (Lengthless(), "got Lengthless: its length is not known"),
    ],
)
def test_what_can_only_be_iterated_is_refused_with_the_way_out(dataset: Any, reason: str) -> None:
    for make in (Dataset.from_torch, Dataset.from_samples):
        with pytest.raises(ConfigurationError, match=rf"{reason}.*put the samples into a list"):
            make("a", dataset)


def test_map_style_dataset_is_never_iterated_and_costs_nothing() -> None:
    tracemalloc.start()
    dataset = Dataset.from_torch("big", Squares(10**12))
    assert (len(dataset), dataset.num_shards, dataset.format) == (10**12, 1, "torch")
    assert dataset.shards[0] == Shard("shard-000000", 10**12, 0)
    assert read(dataset, 0, 3, 10**12 - 1) == [9, (10**12 - 1) ** 2]
    assert dataset[-1] == (10**12 - 1) ** 2
    assert len(dataset.fingerprint) == 64
    assert repr(dataset) == "Dataset('big', torch, 1 shard, 1,000,000,000,000 samples)"
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_getitems_is_asked_once_with_plain_integers() -> None:
    batched = Batched(100)
    assert read(Dataset.from_torch("a", batched), 0, 3, 1, 3) == [9, 1, 9]
    assert batched.calls == [[3, 1, 3]]
    subset: Any = torch.utils.data.Subset(Batched(100), [5, 6])  # type: ignore[arg-type]
    assert read(Dataset.from_torch("a", subset), 0, 1, 0) == [36, 25]


def test_getitems_of_another_length_is_an_error() -> None:
    class Short(Squares):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return indices[1:]

    with pytest.raises(DatasetError, match=r"'a'.*__getitems__ of Short returned 1 samples for 2"):
        read(Dataset.from_torch("a", Short(5)), 0, 1, 2)


@pytest.mark.parametrize("error", [StopIteration("x"), IndexError("x"), KeyError("a\nb")])
def test_errors_of_the_users_dataset_pass_unchanged(error: Exception) -> None:
    class Raising(Squares):
        def __getitem__(self, index: int) -> int:
            raise error

    with pytest.raises(type(error)) as caught:
        read(Dataset.from_torch("a", Raising(5)), 0, 1)
    assert caught.value is error


@pytest.mark.parametrize("name", ["", None, 3, b"a"])
def test_name_must_be_text(name: Any, folder: Path) -> None:
    makers: list[Callable[[], Dataset]] = [
        lambda: Dataset.from_samples(name, [1]),
        lambda: Dataset.from_torch(name, [1]),
        lambda: Dataset.from_path(name, folder),
    ]
    for make in makers:
        with pytest.raises(
            ConfigurationError, match=f"name must be a str, not empty, got {name!r}"
        ):
            make()
    assert not list(folder.rglob("*.zidx"))  # refused before anything is read


def test_version_must_be_text() -> None:
    with pytest.raises(ConfigurationError, match="version of dataset 'a' must be a str, got 3"):
        Dataset.from_torch("a", [1], version=3)  # type: ignore[arg-type]


def test_million_shards_cost_four_arrays() -> None:
    sizes = np.ones(MILLION, dtype=np.int64)
    tracemalloc.start()
    dataset = Dataset.from_samples("a", range(MILLION), shard_sizes=sizes)
    assert dataset[999_999] == 999_999
    assert dataset.shards[-1] == Shard("shard-999999", 1, 0)
    assert tracemalloc.get_traced_memory()[0] < 30 * MILLION
    tracemalloc.stop()
    assert len(dataset.fingerprint) == 64


def test_equality_is_identity() -> None:
    one, other = Dataset.from_samples("a", [1]), Dataset.from_samples("a", [1])
    assert one == one and one != other and len({one, other}) == 2
    with pytest.raises(AttributeError):
        one.name = "b"  # type: ignore[misc]


def _read_ids(dataset: Dataset, results: Any) -> None:
    results.put([record["id"] for record in dataset])


@pytest.mark.parametrize(("method", "number"), [("fork", 2), ("spawn", 1)])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_dataset_is_read_on_both_sides_of_a_process_start(
    folder: Path, method: str, number: int
) -> None:
    dataset = Dataset.from_path("web", folder)
    ids = list(range(38))
    with closing(dataset.open(1)) as reader:  # one open while the others start
        context: Any = multiprocessing.get_context(method)
        results = context.Queue()
        processes = [
            context.Process(target=_read_ids, args=(dataset, results)) for _ in range(number)
        ]
        with running(processes):
            assert [record["id"] for record in dataset] == ids
            assert reader.read(np.array([29])) == [{"id": 36}]
            assert [results.get(timeout=200) for _ in processes] == [ids] * number
            for process in processes:
                process.join(200)
                assert process.exitcode == 0


def test_pickles_are_small_and_complete(folder: Path) -> None:
    dataset = Dataset.from_path("web", folder)
    assert list(dataset) and dataset.fingerprint
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        content = pickle.dumps(dataset, protocol)
        assert len(content) < 2000
        copy = pickle.loads(content)
        assert list(copy) == list(dataset)
        assert (repr(copy), copy.fingerprint) == (repr(dataset), dataset.fingerprint)


def test_import_takes_no_format_and_no_storage_library() -> None:
    code = """
import sys, zephon_torch.io
print({"fsspec", "zephon_torch.io.formats.json.jsonl"} & set(sys.modules))
"""
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "set()", output.stdout
