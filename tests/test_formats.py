"""What every format must do alike: counts, random access, any engine, resume."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from conformance import Subject, check_resume
from format_files import ALL, FILES, Files
from toys import ENGINES

from zephon_torch import DataLoader
from zephon_torch.errors import DatasetError, RecordError
from zephon_torch.io import Dataset
from zephon_torch.io.storage import ranges

SHARDS = [list(range(13)), [13], list(range(14, 31)), list(range(31, 40))]
IDS = list(range(40))


def dataset_of(files: Files, folder: Path, name: str = "a", shards: Any = SHARDS) -> Dataset:
    files.write(folder, shards)
    return Dataset.from_path(name, files.path(folder), **files.options)


def loader_of(dataset: Dataset, files: Files, **options: Any) -> DataLoader[Any]:
    given = {"batch_size": 4, "shuffle": True, "collate_fn": files.to_batch, "seed": 5}
    return DataLoader(dataset, **(given | options))


@ALL
def test_counts_and_sequential_reading(files: Files, tmp_path: Path) -> None:
    dataset = dataset_of(files, tmp_path / "a")
    assert dataset.format == files.format
    assert dataset.shard_num_samples.tolist() == [13, 1, 17, 9]
    assert [files.id_of(sample) for sample in dataset] == IDS
    again = Dataset.from_path("a", files.path(tmp_path / "a"), **files.options)
    assert again.fingerprint == dataset.fingerprint


@ALL
def test_random_access_equals_sequential(files: Files, tmp_path: Path) -> None:
    dataset = dataset_of(files, tmp_path / "a")
    order = np.random.Generator(np.random.Philox(3)).permutation(40)
    assert [files.id_of(dataset[i]) for i in order] == order.tolist()
    sequential = list(dataset)
    reader = dataset.open(2)
    for numbers in ([5, 0, 16, 5], [16], [0, 1, 2, 3], [7, 7, 7], []):
        read = reader.read(np.array(numbers, np.int64))
        assert [files.id_of(sample) for sample in read] == [14 + n for n in numbers]
        for sample, number in zip(read, numbers, strict=True):
            assert same(sample, sequential[14 + number])
    reader.close()
    reader.close()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)


@ALL
def test_numbers_outside_of_a_shard_are_refused(files: Files, tmp_path: Path) -> None:
    reader = dataset_of(files, tmp_path / "a").open(0)
    for number in (13, -1, 1 << 40):
        with pytest.raises(RecordError, match=f"has no record {number}"):
            reader.read(np.array([0, number], np.int64))
    reader.close()


@ALL
def test_a_dataset_can_be_pickled(files: Files, tmp_path: Path) -> None:
    dataset = pickle.loads(pickle.dumps(dataset_of(files, tmp_path / "a")))
    assert [files.id_of(sample) for sample in dataset] == IDS


@ALL
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_every_engine_gives_every_sample_once(
    files: Files, tmp_path: Path, engine: dict[str, Any]
) -> None:
    dataset = dataset_of(files, tmp_path / "a")
    with loader_of(dataset, files, num_threads=0) as loader:
        expected = [files.ids_of(batch) for batch in loader]
    assert sorted(i for batch in expected for i in batch) == IDS
    with loader_of(dataset, files, **engine) as loader:
        assert [files.ids_of(batch) for batch in loader] == expected


@ALL
def test_readers_that_are_open_do_not_cross_into_workers(files: Files, tmp_path: Path) -> None:
    dataset = dataset_of(files, tmp_path / "a")
    with (
        loader_of(dataset, files, num_threads=0) as inline,
        loader_of(dataset, files, num_workers=2, multiprocessing_context="fork") as loader,
    ):
        expected = [files.ids_of(batch) for batch in inline]  # opens all shards in this process
        assert [files.ids_of(batch) for batch in loader] == expected


@ALL
def test_resume(files: Files, tmp_path: Path) -> None:
    dataset = dataset_of(files, tmp_path / "a")
    check_resume(Subject(make=lambda: loader_of(dataset, files), look=files.ids_of))


MANY = {
    "thread": {},
    "workers": {"num_workers": 2},
    "spawned workers": {"num_workers": 2, "multiprocessing_context": "spawn"},
}


@ALL
def test_a_manifest_stands_for_the_files(files: Files, tmp_path: Path) -> None:
    dataset = dataset_of(files, tmp_path / "a")
    folder = files.path(tmp_path / "a")
    dataset.save_manifest(tmp_path / "manifest")
    again = Dataset.from_manifest("a", tmp_path / "manifest", root=folder)
    assert again.fingerprint == dataset.fingerprint
    assert [files.id_of(sample) for sample in again] == IDS
    for path in folder.rglob("*"):  # also the files that say what is in others
        os.utime(path, ns=(1, 1))
    with pytest.raises(DatasetError, match="changed since the dataset was made"):
        again.open(0)


@pytest.mark.parametrize("cached", [False, True], ids=["where it is", "through the cache"])
@ALL
def test_files_of_another_machine(files: Files, cached: bool, tmp_path: Path, memory: str) -> None:
    """Parts of the dataset; by workers that are forked with the store in memory, or by a thread."""
    files.write(tmp_path / "a", SHARDS)
    store = fsspec.filesystem("memory")
    store.put(f"{files.path(tmp_path / 'a')}/", f"{memory}/", recursive=True)
    dataset = Dataset.from_path("a", memory, **files.options)
    assert dataset.shard_num_samples.tolist() == [13, 1, 17, 9]
    cache = {"cache_dir": tmp_path / "cache", "cache_limit": "1GB", "num_workers": 2}
    parts = dataset.split({"train": 30, "val": 10})
    seen = []
    for part in parts.values():
        with loader_of(part, files, **(cache if cached else {})) as loader:
            seen.append([i for batch in loader for i in files.ids_of(batch)])
    assert sorted(seen[0] + seen[1]) == IDS and len(seen[0]) == 30
    if cached:
        assert len(list((tmp_path / "cache").glob("*.shard"))) == len(SHARDS)


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A URL below which nothing is yet, and a folder of its own for indexes."""
    monkeypatch.setenv("ZEPHON_CACHE_DIR", str(tmp_path / "indexes"))
    url = f"memory://{tmp_path.name}"
    yield url
    fsspec.filesystem("memory").rm(url, recursive=True)


@pytest.mark.parametrize("engine", MANY.values(), ids=MANY)
def test_a_mixture_of_all_formats(tmp_path: Path, engine: dict[str, Any]) -> None:
    """Each dataset has ids of its own; they meet in one batch as (format, id)."""
    datasets, readers = [], {}
    for number, (name, files) in enumerate(FILES.items()):
        try:
            datasets.append(dataset_of(files, tmp_path / str(number), name))
        except pytest.skip.Exception:
            continue
        readers[name] = files
    loader = DataLoader(
        {dataset.name: dataset for dataset in datasets},
        batch_size=8,
        mixture={dataset.name: 1 for dataset in datasets},
        shuffle=True,
        collate_fn=list,
        **engine,
    )
    seen: dict[str, list[int]] = {name: [] for name in readers}
    names = list(loader.source.names)
    with loader:
        for batch in loader:
            assert loader.pointers is not None
            for number, sample in zip(loader.pointers.dataset.tolist(), batch, strict=True):
                seen[names[number]].append(readers[names[number]].id_of(sample))
    assert {name: sorted(ids) for name, ids in seen.items()} == dict.fromkeys(readers, IDS)


@pytest.mark.parametrize("name", "jsonl webdataset npy megatron mds parquet arrow".split())
def test_a_file_that_is_written_over_while_it_is_open_is_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other content of the same size, which no reader could tell from the right one."""
    monkeypatch.setattr(ranges, "_MAP_TRUSTED_SECONDS", -1)
    dataset = dataset_of(FILES[name], tmp_path / "a")
    path = Path(dataset.shard_path(0))
    reader, other = dataset.open(0), dataset.open(2)
    reader.read(np.arange(3))
    os.utime(path, ns=(7, 7))
    with pytest.raises(DatasetError, match="was written to while it was open"):
        reader.read(np.arange(10, 13))
    # an open map holds what was deleted or replaced
    Path(dataset.shard_path(2)).unlink()
    assert [FILES[name].id_of(sample) for sample in other.read(np.arange(15, 17))] == [29, 30]
    Path(dataset.shard_path(2)).write_bytes(b"another")
    assert [FILES[name].id_of(sample) for sample in other.read(np.arange(2))] == [14, 15]
    reader.close()
    other.close()
