"""Datasets: three ways to make one, what it says of itself, and what it refuses."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import pickle
import subprocess
import sys
import time
import tracemalloc
from collections import deque
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zephon_torch.errors import ConfigurationError, DatasetError, RecordError
from zephon_torch.io import Dataset, Shard, formats

MILLION = 1_000_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards of 7, 30 and 1 records and an empty one."""
    root = tmp_path / "data"
    start = 0
    for name, size in [("a/0", 7), ("a/1", 30), ("b", 0), ("c", 1)]:
        path = root / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"id": start + i}) + "\n" for i in range(size)))
        start += size
    return root


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
    start = time.perf_counter()
    dataset = Dataset.from_torch("big", Squares(10**12))
    assert (len(dataset), dataset.num_shards, dataset.format) == (10**12, 1, "torch")
    assert dataset.shards[0] == Shard("shard-000000", 10**12, 0)
    assert read(dataset, 0, 3, 10**12 - 1) == [9, (10**12 - 1) ** 2]
    assert dataset[-1] == (10**12 - 1) ** 2
    assert len(dataset.fingerprint) == 64
    assert repr(dataset) == "Dataset('big', torch, 1 shard, 1,000,000,000,000 samples)"
    assert time.perf_counter() - start < 0.1
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_getitems_is_asked_once_with_plain_integers() -> None:
    batched = Batched(100)
    assert read(Dataset.from_torch("a", batched), 0, 3, 1, 3) == [9, 1, 9]
    assert batched.calls == [[3, 1, 3]]
    subset = torch.utils.data.Subset(Batched(100), [5, 6])  # type: ignore[arg-type]
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
    for make in (
        lambda: Dataset.from_samples(name, [1]),
        lambda: Dataset.from_torch(name, [1]),
        lambda: Dataset.from_path(name, folder),
    ):
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
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        dataset = Dataset.from_samples("a", range(MILLION), shard_sizes=sizes)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.05
    tracemalloc.start()
    dataset = Dataset.from_samples("a", range(MILLION), shard_sizes=sizes)
    assert dataset[999_999] == 999_999
    assert dataset.shards[-1] == Shard("shard-999999", 1, 0)
    assert tracemalloc.get_traced_memory()[0] < 30 * MILLION
    tracemalloc.stop()
    start = time.perf_counter()
    assert len(dataset.fingerprint) == 64
    assert time.perf_counter() - start < 1


def test_equality_is_identity() -> None:
    one, other = Dataset.from_samples("a", [1]), Dataset.from_samples("a", [1])
    assert one == one and one != other and len({one, other}) == 2
    with pytest.raises(AttributeError):
        one.name = "b"  # type: ignore[misc]


def test_fingerprint_is_the_documented_encoding(folder: Path) -> None:
    def text(value: str) -> bytes:
        return b"s" + len(value).to_bytes(8, "little") + value.encode()

    def number(value: int) -> bytes:
        return b"i" + (8).to_bytes(8, "little") + value.to_bytes(8, "little")

    def column(values: list[int]) -> bytes:
        content = b"".join(value.to_bytes(8, "little") for value in values)
        return b"a" + len(content).to_bytes(8, "little") + content

    paths = ["a/0.jsonl", "a/1.jsonl", "b.jsonl", "c.jsonl"]
    joined = "".join(paths)
    encoded = text("zephon_torch.dataset") + number(1) + text("web") + text("jsonl") + number(4)
    encoded += column([len(path) for path in paths])
    encoded += b"b" + len(joined).to_bytes(8, "little") + joined.encode()
    encoded += column([7, 30, 0, 1]) + column([70, 327, 0, 11])
    assert Dataset.from_path("web", folder).fingerprint == hashlib.sha256(encoded).hexdigest()


def test_fingerprints_are_pinned(folder: Path) -> None:
    assert [
        Dataset.from_path("web", folder).fingerprint,
        Dataset.from_samples("web", range(5), shard_sizes=[2, 3]).fingerprint,
        Dataset.from_torch("web", range(5), version="v1").fingerprint,
    ] == [
        "7c13c00d6bdce71668eafcd91f68e8b6d45376047152902740c2a92059028370",
        "fbd48a884cb933c9e6d2eb5bbb893493342fa78213ae5a4fdbfea714c5a4b82c",
        "47e347c6bc6fa868efb7c77dac8f72ae5c9e2ef95ea52e0cc017a63303dee18b",
    ]


def test_fingerprint_tells_what_matters_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    def make(name: str = "web") -> str:
        return Dataset.from_path(name, folder).fingerprint

    first = make()
    moved = folder.rename(tmp_path / "elsewhere")
    assert Dataset.from_path("web", moved).fingerprint == first
    assert Dataset.from_path("web", moved.as_uri()).fingerprint == first
    assert Dataset.from_path("web", moved / "**" / "*.jsonl").fingerprint == first
    moved.rename(folder)
    assert make("other") != first
    (folder / "c.jsonl").rename(folder / "d.jsonl")  # a renamed shard
    assert (renamed := make()) != first
    with (folder / "d.jsonl").open("a") as file:
        file.write("\n")  # another size, the same records
    with pytest.warns(UserWarning, match="anew"):
        assert make() not in (first, renamed)


@given(
    sizes=st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=2, max_size=2, unique_by=tuple)
)
def test_fingerprint_in_memory_tells_shard_sizes_apart(sizes: list[list[int]]) -> None:
    one, other = (Dataset.from_samples("a", range(sum(s)), shard_sizes=s) for s in sizes)
    assert one.fingerprint != other.fingerprint


def test_fingerprint_in_memory_knows_kind_and_version() -> None:
    made = [
        Dataset.from_samples("a", [1, 2]),
        Dataset.from_torch("a", [1, 2]),
        Dataset.from_torch("a", [1, 2], version="1"),
        Dataset.from_torch("a", [1, 2], version=""),
    ]
    assert len({dataset.fingerprint for dataset in made}) == 4
    assert made[0].fingerprint == Dataset.from_samples("a", [8, 9]).fingerprint


def test_dataset_is_found_missing_empty_or_mixed_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, message: str, format: str | None = None) -> None:
        with pytest.raises(DatasetError, match=message):
            Dataset.from_path("a", path, format=format)

    refuse(tmp_path / "none", f"no file or folder '{tmp_path}/none'")
    refuse(tmp_path / "*.jsonl", rf"no file matches '{tmp_path}/\*.jsonl'")
    refuse(tmp_path, r"holds no data files: found nothing, expected 'jsonl' \(.jsonl .ndjson\)")
    for i in range(7):
        (tmp_path / f"{i}.txt").write_text("1\n")
    refuse(tmp_path, "found '0.txt', .*'4.txt' and 2 more, expected 'jsonl'")
    refuse(tmp_path, "found '0.txt'.* expected 'jsonl'", "jsonl")
    refuse(tmp_path / "0.txt", "cannot tell the format of '.*0.txt'.*'jsonl'.*with format=")
    refuse(tmp_path / "*.txt", "cannot tell the format of '.*0.txt'.*'jsonl'.*with format=")
    assert list(Dataset.from_path("a", tmp_path / "0.txt", format="jsonl")) == [1]
    assert list(Dataset.from_path("a", tmp_path / "*.txt", format="jsonl")) == [1] * 7

    monkeypatch.setitem(formats.FORMATS, "text", formats.FormatEntry((".txt",), "nowhere"))
    (tmp_path / "z.jsonl").write_text("5\n")
    for path in (tmp_path, tmp_path / "*"):
        refuse(path, "more than one format: .*'0.txt' is text.* pick one with format=")
    assert list(Dataset.from_path("a", tmp_path, format="jsonl")) == [5]


def test_compressed_shards_are_not_left_out_silently(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("1\n")
    (tmp_path / "b.jsonl.gz").write_bytes(b"")
    for path in (tmp_path, tmp_path / "*", tmp_path / "b.jsonl.gz"):
        with pytest.raises(
            DatasetError, match=r"b.jsonl.gz' is compressed, which is not supported"
        ):
            Dataset.from_path("a", path)


@pytest.mark.parametrize("path", ["", None, 3, ["a"], b"a"])
def test_path_must_be_a_path(path: Any) -> None:
    with pytest.raises(ConfigurationError, match="path must be a folder, a file or a pattern"):
        Dataset.from_path("a", path)


def test_unknown_format_is_named(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="unknown format 'csv'; known are 'jsonl'"):
        Dataset.from_path("a", folder, format="csv")


def _read_ids(dataset: Dataset, results: Any) -> None:
    results.put([record["id"] for record in dataset])


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_dataset_is_read_on_both_sides_of_a_process_start(folder: Path, method: str) -> None:
    dataset = Dataset.from_path("web", folder)
    ids = list(range(38))
    with closing(dataset.open(1)) as reader:  # one open while the others start
        context = multiprocessing.get_context(method)
        results = context.Queue()
        processes = [context.Process(target=_read_ids, args=(dataset, results)) for _ in range(2)]
        for process in processes:
            process.start()
        assert [record["id"] for record in dataset] == ids
        assert reader.read(np.array([29])) == [{"id": 36}]
        assert [results.get(timeout=60) for _ in processes] == [ids, ids]
        for process in processes:
            process.join(60)
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


def test_import_is_cheap() -> None:
    code = """
import sys, zephon_torch.io
print({"torch", "fsspec", "tqdm", "zephon_torch.io.formats.jsonl"} & set(sys.modules))
"""
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "set()", output.stdout
