"""What Parquet and Arrow do alike: columns, values, and what is refused."""

from __future__ import annotations

import datetime
import decimal
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon_torch import DataLoader
from zephon_torch.errors import ConfigurationError, DatasetError, RecordError, ZephonError
from zephon_torch.io import Dataset, formats
from zephon_torch.io.remote.storage import RemoteStorage

pa = pytest.importorskip("pyarrow")
ipc = pytest.importorskip("pyarrow.ipc")
parquet = pytest.importorskip("pyarrow.parquet")


Write = Callable[[Any, Path], None]


def write_parquet(table: Any, path: Path) -> None:
    parquet.write_table(table, path, row_group_size=5)


def write_stream(table: Any, path: Path) -> None:
    with ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


def write_file(table: Any, path: Path) -> None:
    with ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=5)


KINDS: dict[str, Write] = {
    ".parquet": write_parquet,
    ".arrow": write_stream,
    ".feather": write_file,
}
EVERY = pytest.mark.parametrize(("extension", "write"), KINDS.items(), ids=KINDS)


def small(start: int = 0, stop: int = 12) -> Any:
    ids = range(start, stop)
    return pa.table({"id": ids, "text": [f"t{i} ö" for i in ids], "half": [i / 2 for i in ids]})


@EVERY
def test_columns_are_chosen_and_ordered(extension: str, write: Write, tmp_path: Path) -> None:
    path = tmp_path / f"x{extension}"
    write(small(), path)
    dataset = Dataset.from_path("a", path, columns=["half", "id"])
    assert [list(sample.items()) for sample in dataset] == [
        [("half", i / 2), ("id", i)] for i in range(12)
    ]
    assert dataset.fingerprint == Dataset.from_path("a", path).fingerprint


@EVERY
def test_column_that_is_not_there_is_refused(extension: str, write: Write, tmp_path: Path) -> None:
    path = tmp_path / f"x{extension}"
    write(small(), path)
    message = f"'{path}' has no column 'body'; it has 'id', 'text', 'half'"
    with pytest.raises(ConfigurationError, match=message):
        Dataset.from_path("a", path, columns=["id", "body"])


@pytest.mark.parametrize("columns", ["text", [], [1], ["a", "a"], 3, {"a"}, b"a"])
def test_bad_columns_are_refused(tmp_path: Path, columns: Any) -> None:
    write_parquet(small(), tmp_path / "x.parquet")
    with pytest.raises(ConfigurationError, match="columns "):
        Dataset.from_path("a", tmp_path, columns=columns)


@EVERY
def test_files_with_different_columns_are_refused(
    extension: str, write: Write, tmp_path: Path
) -> None:
    first, other = tmp_path / f"a{extension}", tmp_path / f"b{extension}"
    write(small(), first)
    write(small().set_column(2, "half", pa.array(range(12))), other)
    message = f"'half' is double in '{first}' and int64 in '{other}'; choose common ones"
    with pytest.raises(DatasetError, match=message):
        Dataset.from_path("a", tmp_path)
    assert len(Dataset.from_path("a", tmp_path, columns=["id", "text"])) == 24
    write(small().drop(["half"]), other)
    with pytest.raises(DatasetError, match=f"'{first}' has 'half', '{other}' has not"):
        Dataset.from_path("a", tmp_path)
    write(small().select(["half", "text", "id"]), other)
    assert len(Dataset.from_path("a", tmp_path)) == 24


@EVERY
def test_column_without_values_is_like_any_other(
    extension: str, write: Write, tmp_path: Path
) -> None:
    for number, texts in enumerate([[None, None], ["a", "b"], [None, None], ["c", "d"]]):
        write(pa.table({"text": texts}), tmp_path / f"{number}{extension}")
    texts = [sample["text"] for sample in Dataset.from_path("a", tmp_path)]
    assert texts == [None, None, "a", "b", None, None, "c", "d"]
    write(pa.table({"text": [1, 2]}), tmp_path / f"4{extension}")
    message = f"'text' is string in '{tmp_path}/1{extension}' and int64 in"
    with pytest.raises(DatasetError, match=message):
        Dataset.from_path("a", tmp_path)


@EVERY
def test_two_columns_of_one_name_are_refused(extension: str, write: Write, tmp_path: Path) -> None:
    path = tmp_path / f"x{extension}"
    write(pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], list("aba")), path)
    with pytest.raises(DatasetError, match="more than one column 'a'"):
        Dataset.from_path("a", path)
    assert list(Dataset.from_path("a", path, columns=["b"])) == [{"b": 2}]


UTC = datetime.UTC
VALUES: dict[str, tuple[Any, list[Any]]] = {
    "int8": (pa.int8(), [1, -128, None]),
    "uint64": (pa.uint64(), [0, 2**64 - 1, None]),
    "float": (pa.float32(), [0.5, None, float("inf")]),
    "bool": (pa.bool_(), [True, None, False]),
    "string": (pa.string(), ["", None, "ö\0"]),
    "large_string": (pa.large_string(), ["a", None, "b"]),
    "binary": (pa.binary(), [b"", b"\xff", None]),
    "timestamp": (
        pa.timestamp("us", "UTC"),
        [
            datetime.datetime(2026, 1, 2, 3, 4, 5, 6, UTC),
            None,
            datetime.datetime(1, 1, 1, tzinfo=UTC),
        ],
    ),
    "date": (pa.date32(), [datetime.date(2026, 1, 2), None, datetime.date(1, 1, 1)]),
    "decimal": (pa.decimal128(20, 2), [decimal.Decimal("1.25"), None, decimal.Decimal("-0.01")]),
    "list": (pa.list_(pa.int32()), [[], None, [1, None]]),
    "lists": (pa.list_(pa.list_(pa.string())), [[["a"], []], None, [None]]),
    "fixed": (pa.list_(pa.int8(), 2), [[1, 2], [5, 6], [3, None]]),
    "struct": (
        pa.struct({"a": pa.string(), "b": pa.list_(pa.int64())}),
        [{"a": "x", "b": [1]}, None, {"a": None, "b": None}],
    ),
    "chat": (
        pa.list_(pa.struct({"role": pa.string(), "text": pa.string()})),
        [[{"role": "user", "text": "hi"}], [], None],
    ),
    "map": (pa.map_(pa.string(), pa.int32()), [[("k", 1)], None, []]),
    "dictionary": (pa.dictionary(pa.int8(), pa.string()), ["x", None, "y"]),
    "null": (pa.null(), [None, None, None]),
}  # fmt: skip


@EVERY
def test_values_are_plain_python(extension: str, write: Write, tmp_path: Path) -> None:
    columns = {name: pa.array(values * 4, kind) for name, (kind, values) in VALUES.items()}
    write(pa.table(columns), tmp_path / f"all{extension}")
    expected = [{name: VALUES[name][1][i % 3] for name in VALUES} for i in range(12)]
    dataset = Dataset.from_path("a", tmp_path)
    assert list(dataset) == expected
    with closing(dataset.open(0)) as reader:
        numbers = [11, 0, 6, 6, 4, 5, 0, 10]
        read = reader.read(np.array(numbers))
        assert read == [expected[i] for i in numbers]
        assert read[2] is not read[3] and read[2]["chat"] is not read[3]["chat"]
    for name in VALUES:  # each alone: nested columns are read in another way
        alone = Dataset.from_path("a", tmp_path, columns=[name])
        assert [alone[i][name] for i in (7, 2, 3)] == [VALUES[name][1][i] for i in (1, 2, 0)]


@EVERY
def test_file_that_is_not_whole_is_refused(extension: str, write: Write, tmp_path: Path) -> None:
    path = tmp_path / f"x{extension}"
    write(small(), path)
    content = path.read_bytes()
    for length in (*range(0, len(content), 37), len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(DatasetError, match=f"'{path}'"):
            Dataset.from_path("a", path)
    joined = [] if extension == ".parquet" else [content + content]
    for foreign in (b'{"id": 1}\n' * 100, b"\0" * 200, content[::-1], *joined):
        path.write_bytes(foreign)
        with pytest.raises(DatasetError, match=f"'{path}'"):
            Dataset.from_path("a", path)


@EVERY
def test_no_rows_are_fine(extension: str, write: Write, tmp_path: Path) -> None:
    write(small().slice(0, 0), tmp_path / f"x{extension}")
    write(small(0, 3), tmp_path / f"y{extension}")
    dataset = Dataset.from_path("a", tmp_path)
    assert dataset.shard_num_samples.tolist() == [0, 3]
    assert list(dataset) == small(0, 3).to_pylist()


@EVERY
def test_file_that_changed_is_refused(extension: str, write: Write, tmp_path: Path) -> None:
    path = tmp_path / f"x{extension}"
    write(small(), path)
    dataset = Dataset.from_path("a", path)
    reader = dataset.open(0)
    reader.read(np.arange(12))
    content = path.read_bytes()
    os.truncate(path, len(content) // 2)
    with pytest.raises(DatasetError, match="was cut short"):
        reader.read(np.array([3]))
    reader.close()
    with pytest.raises(DatasetError, match="changed since the dataset was made"):
        dataset.open(0)
    path.unlink()
    with pytest.raises(DatasetError, match="is gone since the dataset was made"):
        dataset.open(0)


@EVERY
def test_closed_reader_says_so_and_leaves_nothing_open(
    extension: str, write: Write, tmp_path: Path
) -> None:
    write(small(), tmp_path / f"x{extension}")
    dataset = Dataset.from_path("a", tmp_path)

    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count(str(tmp_path))

    before = held()
    for _ in range(3):
        reader = dataset.open(0)
        assert reader.read(np.array([7]))[0]["id"] == 7
        reader.close()
        reader.close()
        with pytest.raises(DatasetError, match="is closed"):
            reader.read(np.array([0]))
    del reader
    assert held() == before


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("ZEPHON_CACHE_DIR", str(tmp_path / "cache"))
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


@EVERY
@pytest.mark.parametrize("folder", ["plain", "a b/100% ö #1"])
def test_urls_read_as_local_files(
    extension: str, write: Write, folder: str, tmp_path: Path, memory: Any
) -> None:
    local = tmp_path / folder
    local.mkdir(parents=True)
    for number in range(2):
        write(small(12 * number, 12 * number + 12), local / f"x{number}{extension}")
        memory.pipe(
            f"/{folder}/x{number}{extension}", (local / f"x{number}{extension}").read_bytes()
        )
    assert [sample["id"] for sample in Dataset.from_path("a", local)] == [*range(24)]
    dataset = Dataset.from_path("a", f"memory://{folder}")
    assert [sample["id"] for sample in dataset] == [*range(24)]
    assert [dataset[i]["text"] for i in (23, 4, 12)] == ["t23 ö", "t4 ö", "t12 ö"]


def test_files_read_by_url_before_a_fork_are_read_after_it(tmp_path: Path, memory: Any) -> None:
    """Requests of pyarrow are made by threads of its own, which no fork copies."""
    for number, (extension, write) in enumerate(KINDS.items()):
        path = tmp_path / f"{number}{extension}"
        write(small(), path)
        memory.pipe(f"/{number}/x{extension}", path.read_bytes())
    datasets = {str(i): Dataset.from_path(str(i), f"memory://{i}") for i in range(len(KINDS))}
    workers = {"num_workers": 2, "multiprocessing_context": "fork"}
    mixture = dict.fromkeys(datasets, 1)
    expected = [row for dataset in datasets.values() for row in dataset]
    with DataLoader(datasets, 4, mixture=mixture, collate_fn=list, **workers) as loader:
        rows = [row for batch in loader for row in batch]
    assert sorted(row["id"] for row in rows) == sorted(row["id"] for row in expected)


@EVERY
def test_failing_storage_is_no_bad_record(
    extension: str, write: Write, tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(small(), tmp_path / "x")
    memory.pipe(f"/d/x{extension}", (tmp_path / "x").read_bytes())
    dataset = Dataset.from_path("a", "memory://d")
    reader = dataset.open(0)

    def fail(*_: object) -> None:
        raise OSError("no route to host")

    with monkeypatch.context() as patch:
        patch.setattr(RemoteStorage, "read_ranges", fail)
        for attempt in (lambda: reader.read(np.array([3])), lambda: dataset.open(0)):
            with pytest.raises(OSError, match="no route to host"):
                attempt()
    assert reader.read(np.array([3]))[0]["id"] == 3


@EVERY
def test_text_that_is_no_utf8_is_a_bad_record(extension: str, write: Write, tmp_path: Path) -> None:
    texts = [f"text {i:02d}" for i in range(12)]
    path = tmp_path / f"x{extension}"
    bad = pa.array([text.encode() if i != 7 else b"text \xff\xff" for i, text in enumerate(texts)])
    bad = pa.StringArray.from_buffers(len(bad), bad.buffers()[1], bad.buffers()[2])
    write(pa.table({"id": range(12), "text": bad}), path)
    dataset = Dataset.from_path("web", path)
    with closing(dataset.open(0)) as reader:
        with pytest.raises(RecordError, match=f"dataset 'web', file '{path}', record 7.* decode"):
            reader.read(np.array([3, 7, 1]))
        assert [row["text"] for row in reader.read(np.array([8, 6]))] == ["text 08", "text 06"]
    with DataLoader(dataset, batch_size=4, on_error="skip") as loader:
        ids = [int(i) for batch in loader for i in batch["id"]]
    assert ids == [0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11]


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("zephon_torch.io.formats.")]:
        if name.rpartition(".")[2] in (
            "parquet",
            "libarrow",
            "table",
            "table_rows",
            "arrow",
            "arrow_batches",
            "arrow_input",
            "arrow_places",
            "arrow_types",
        ):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("parquet", "arrow"):
        with pytest.raises(ConfigurationError, match=r"pip install 'zephon-torch\[parquet\]'"):
            formats.load_format(name)


FUZZED = {
    "parquet": write_parquet,
    "stream": write_stream,
    "file": write_file,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, bytes, Any]]:
    """A good file of each kind: where it is, its bytes and its rows."""
    columns = {name: pa.array(values * 4, kind) for name, (kind, values) in VALUES.items()}
    made = {}
    for name, write in FUZZED.items():
        path = tmp_path_factory.mktemp("fuzz") / ("x.parquet" if name == "parquet" else "x.arrow")
        table = pa.table(columns) if name != "file" else pa.table(columns).drop(["dictionary"])
        write(table, path)
        made[name] = (path, path.read_bytes(), table.to_pylist())
    return made


edits = st.lists(
    st.tuples(
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 9),
        st.sampled_from([b"", b"\xff", b"\0", b"\x80", b"\xff\xff\xff\x7f", b"\0" * 8, b"\1"]),
    ),
    min_size=1,
    max_size=3,
)


@pytest.mark.parametrize("kind", FUZZED)
@settings(max_examples=60)
@given(edits=edits)
def test_damaged_files_give_rows_or_errors_of_ours(
    kind: str, whole: dict[str, tuple[Path, bytes, Any]], edits: Any
) -> None:
    """Neither format can tell damaged values from others, unless pages have checksums."""
    path, content, rows = whole[kind]
    for place, num_cut, new in edits:
        at = int(place * len(content))
        content = content[:at] + new + content[at + num_cut :]
    path.write_bytes(content)
    try:
        dataset = Dataset.from_path("a", path)
        with closing(dataset.open(0)) as reader:
            read = reader.read(np.arange(min(len(dataset), 100)))
    except ZephonError as error:
        assert str(path) in str(error)
    else:
        assert all(row.keys() <= rows[0].keys() or len(row) == len(rows[0]) for row in read)
        if content == whole[kind][1]:
            assert read == rows
