"""Arrow: batches, dictionaries, compression, and folders of HF datasets."""

from __future__ import annotations

import json
import pickle
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from zephon_torch import DataLoader
from zephon_torch.errors import DatasetError, RecordError
from zephon_torch.io import Dataset
from zephon_torch.io.index.index import StaleIndexWarning
from zephon_torch.io.remote.storage import RemoteStorage

pa = pytest.importorskip("pyarrow")
ipc = pytest.importorskip("pyarrow.ipc")

from zephon_torch.io.formats.tables import table_cache  # noqa: E402

HF_FOLDER = Path(__file__).parent / "data" / "hf_folder"


def batch_of(**columns: Any) -> Any:
    return pa.record_batch(columns)


def write(path: Path, *batches: Any, new: Any = ipc.new_stream, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with new(str(path), batches[0].schema, options=ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return path


def numbered(start: int, stop: int) -> Any:
    return batch_of(id=range(start, stop), text=[f"t{i} " * 50 for i in range(start, stop)])


UNEVEN = [numbered(0, 3), numbered(3, 4).slice(0, 0), numbered(3, 4), numbered(4, 20)]
NEW = pytest.mark.parametrize("new", [ipc.new_stream, ipc.new_file])


@NEW
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_batches_of_any_size_are_read_in_any_order(
    tmp_path: Path, new: Any, compression: str | None
) -> None:
    path = write(tmp_path / "x.arrow", *UNEVEN, new=new, compression=compression)
    dataset = Dataset.from_path("a", path)
    assert [row["id"] for row in dataset] == [*range(20)]
    numbers = np.random.Generator(np.random.Philox(0)).permutation(20)
    with closing(dataset.open(0)) as reader:
        read = reader.read(numbers)
    assert read == [{"id": i, "text": f"t{i} " * 50} for i in numbers.tolist()]


def test_rows_of_a_local_file_are_read_without_copying_their_batch(tmp_path: Path) -> None:
    big = batch_of(id=range(1000), text=["x" * 10_000] * 1000)
    dataset = Dataset.from_path("a", write(tmp_path / "x.arrow", big, big))
    before = pa.total_allocated_bytes()
    with closing(dataset.open(0)) as reader:
        assert [row["id"] for row in reader.read(np.array([1500, 7]))] == [500, 7]
        assert pa.total_allocated_bytes() - before < 100_000
        assert table_cache.kept.num_bytes < 100_000  # of 64 MiB: thousands of batches stay at hand


def test_opening_a_remote_file_again_takes_a_few_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first time each header tells where the next one is."""
    monkeypatch.setenv("ZEPHON_CACHE_DIR", str(tmp_path / "cache"))
    batches = [batch_of(id=[i], noise=[bytes(100_000)]) for i in range(30)]
    fs = fsspec.filesystem("memory")
    fs.pipe("/arrow/x.arrow", write(tmp_path / "x.arrow", *batches).read_bytes())
    requests: list[int] = []
    read_ranges = RemoteStorage.read_ranges

    def record(self: Any, path: str, starts: Any, stops: Any) -> Any:
        requests.append(int((stops - starts).sum()))
        return read_ranges(self, path, starts, stops)

    monkeypatch.setattr(RemoteStorage, "read_ranges", record)
    dataset = Dataset.from_path("a", "memory://arrow")
    assert len(requests) > 30 and sum(requests) < 1_000_000
    requests.clear()
    with closing(dataset.open(0)) as reader:
        assert len(requests) < 6
        requests.clear()
        assert [row["id"] for row in reader.read(np.array([17, 3]))] == [17, 3]
        assert len(requests) == 2 and sum(requests) < 210_000
    # another file under the same name
    fs.pipe("/arrow/x.arrow", write(tmp_path / "x.arrow", *batches[::-1][:20]).read_bytes())
    with pytest.warns(StaleIndexWarning, match=r"x\.arrow"):
        dataset = Dataset.from_path("a", "memory://arrow")
    assert [row["id"] for row in dataset] == [*range(29, 9, -1)]
    fs.store.clear()


def dictionary(*values: str, indices: Any) -> Any:
    column = pa.DictionaryArray.from_arrays(pa.array(indices, pa.int8()), pa.array(values))
    return batch_of(id=range(len(indices)), word=column)


def test_dictionaries_that_change_between_batches(tmp_path: Path) -> None:
    batches = [
        dictionary("a", "b", indices=[0, 1, 0]),
        dictionary("c", "d", "e", indices=[2, 0, 1]),
        dictionary("c", "d", "e", "f", indices=[3, 0]),
        dictionary("a", indices=[0]),
    ]
    words = [*"aba", *"ecd", *"fc", "a"]
    for deltas in (False, True):
        path = write(tmp_path / f"{deltas}.arrow", *batches, emit_dictionary_deltas=deltas)
        dataset = Dataset.from_path("a", path)
        assert [row["word"] for row in dataset] == words
        with closing(dataset.open(0)) as reader:
            assert [row["word"] for row in reader.read(np.array([8, 5, 0, 6]))] == [*"adaf"]


def test_offsets_that_lead_out_of_the_file_are_bad_records(tmp_path: Path) -> None:
    texts = batch_of(text=["aaaa", "bbbb", "cccc", "dddd"])
    lists = batch_of(text=[["aaaa"], ["bbbb"], ["cccc"], ["dddd"]])
    for number, batch in enumerate((texts, lists)):
        path = write(tmp_path / f"{number}.arrow", batch)
        content = path.read_bytes()
        offsets = np.array([0, 4, 8, 12, 16], np.int32)
        assert content.count(offsets.tobytes()) == 1
        offsets[2] = 1 << 30
        at = content.index(np.array([0, 4, 8, 12, 16], np.int32).tobytes())
        path.write_bytes(content[:at] + offsets.tobytes() + content[at + offsets.nbytes :])
        with closing(Dataset.from_path("a", path).open(0)) as reader:
            with pytest.raises(RecordError, match=f"file '{path}', record 1.* cannot be decoded"):
                reader.read(np.array([1]))
            if batch is texts:  # of nested columns the whole batch is bad
                assert reader.read(np.array([3, 0])) == [{"text": "dddd"}, {"text": "aaaa"}]


def test_stream_without_end_mark_is_refused(tmp_path: Path) -> None:
    """Its writer may have been killed between two batches."""
    path = write(tmp_path / "x.arrow", *UNEVEN)
    content = path.read_bytes()
    path.write_bytes(content[:-8])
    with pytest.raises(DatasetError, match=f"'{path}' is cut short or corrupt: no end mark"):
        Dataset.from_path("a", path)


def test_types_that_cannot_be_read_are_refused_unless_left_out(tmp_path: Path) -> None:
    ends = pa.RunEndEncodedArray.from_arrays(pa.array([1, 2], pa.int32()), pa.array(["a", "b"]))
    path = write(tmp_path / "x.arrow", batch_of(id=[1, 2], runs=ends))
    with pytest.raises(DatasetError, match=f"'runs' of '{path}' holds run_end_encoded"):
        Dataset.from_path("a", path)
    assert list(Dataset.from_path("a", path, columns=["id"])) == [{"id": 1}, {"id": 2}]


def test_extension_types_are_read_as_what_they_are_stored_as(tmp_path: Path) -> None:
    stored = pa.array([b"0123456789abcdef"], pa.binary(16))
    path = write(
        tmp_path / "x.arrow", batch_of(key=pa.ExtensionArray.from_storage(pa.uuid(), stored))
    )
    assert list(Dataset.from_path("a", path)) == [{"key": b"0123456789abcdef"}]


# --- folders of HF datasets ----------------------------------------------------------------------


def test_folder_that_datasets_wrote() -> None:
    """Made by ``tests/data/make_hf_folder.py``: two files; labels are their numbers."""
    dataset = Dataset.from_path("a", HF_FOLDER)
    assert (dataset.format, dataset.shard_num_samples.tolist()) == ("arrow", [3, 2])
    assert [(row["id"], row["text"], row["label"]) for row in dataset] == [
        (0, "a", 0), (1, "ö", 1), (2, None, 0), (3, "", 1), (4, "e", 0)
    ]  # fmt: skip


def hf_folder(folder: Path, **state: Any) -> Path:
    write(folder / "data-00000-of-00001.arrow", numbered(0, 4))
    files = [{"filename": "data-00000-of-00001.arrow"}]
    (folder / "state.json").write_text(json.dumps({"_data_files": files} | state))
    return folder


def test_only_files_that_the_state_names_are_data(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "d")
    write(folder / "cache-0123.arrow", batch_of(other=[1]))
    write(folder / "tmp" / "x.arrow", batch_of(other=[1]))
    assert [shard.path for shard in Dataset.from_path("a", folder).shards] == [
        "data-00000-of-00001.arrow"
    ]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"_data_files": [{"filename": "gone.arrow"}]},
            r"/gone.arrow' is not there, but state.json",
        ),
        ({"_data_files": None}, r"state.json' is not one of HF datasets.*give a pattern"),
        ({"_data_files": [1]}, r"state.json' is not one of HF datasets.*give a pattern"),
        ({"_indices_data_files": [{"filename": "i.arrow"}]}, r"call flatten_indices\(\)"),
    ],
)
def test_state_that_does_not_fit_is_refused(
    tmp_path: Path, state: dict[str, Any], message: str
) -> None:
    with pytest.raises(DatasetError, match=message):
        Dataset.from_path("a", hf_folder(tmp_path / "d", **state))


def test_state_that_is_no_json_is_refused(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "d")
    (folder / "state.json").write_text("{")
    with pytest.raises(DatasetError, match=r"state.json' is not valid JSON"):
        Dataset.from_path("a", folder)
    assert len(Dataset.from_path("a", folder / "*.arrow")) == 4


def test_folder_of_several_splits_names_them(tmp_path: Path) -> None:
    for split in ("train", "test"):
        hf_folder(tmp_path / split)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DatasetError, match=r"splits \['train', 'test'\].* give the folder of one"):
        Dataset.from_path("a", tmp_path)
    assert len(Dataset.from_path("a", tmp_path / "train")) == 4


@pytest.fixture
def hf_dataset(monkeypatch: pytest.MonkeyPatch) -> Any:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    labels = datasets.ClassLabel(names=["no", "yes"])
    features = datasets.Features({"id": datasets.Value("int64"), "label": labels})
    columns = {"id": [*range(20)], "label": [i % 2 for i in range(20)]}
    return datasets.Dataset.from_dict(columns, features=features)


WORKERS = {"num_workers": 2, "multiprocessing_context": "spawn"}


@pytest.mark.parametrize(
    ("kind", "workers"),
    [("plain", {}), ("torch", {}), ("selected", {}), ("transformed", {}), ("torch", WORKERS)],
)
def test_datasets_of_hf_work_as_torch_datasets(
    hf_dataset: Any, kind: str, workers: dict[str, Any]
) -> None:
    expected, given = [*range(20)], hf_dataset
    if kind == "torch":
        given = hf_dataset.with_format("torch")
    elif kind == "selected":
        given, expected = hf_dataset.select(range(19, -1, -2)), [*range(19, -1, -2)]
    elif kind == "transformed":
        given = hf_dataset.with_transform(plus_one)
        expected = [*range(1, 21)]
    dataset = pickle.loads(pickle.dumps(Dataset.from_torch("hf", given)))
    with DataLoader(dataset, batch_size=4, **workers) as loader:
        batches = list(loader)
    assert [int(i) for batch in batches for i in batch["id"]] == expected
    assert batches[0]["id"].tolist() == expected[:4]


def plus_one(columns: dict[str, list[int]]) -> dict[str, list[int]]:
    return columns | {"id": [i + 1 for i in columns["id"]]}
