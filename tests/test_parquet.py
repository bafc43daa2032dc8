"""Parquet: row groups, slices of large ones, partitions, and what reading costs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from processes import exit_code, forked

from zephon_torch.errors import DatasetError, RecordError
from zephon_torch.io import Dataset
from zephon_torch.io.remote.storage import RemoteStorage

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from zephon_torch.io.formats.tables import parquet, table_cache  # noqa: E402


def write(path: Path, num_rows: int = 40, rows_in_group: int = 10, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = pa.table({"id": range(num_rows), "text": [f"t{i} " * (i % 9) for i in range(num_rows)]})
    pq.write_table(rows, path, row_group_size=rows_in_group, **options)
    return path


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Row groups by number, as often as their decoding began."""
    begun: list[int] = []
    begin = parquet._Slices._begin

    def count(self: Any, number: int) -> Any:
        begun.append(number)
        return begin(self, number)

    monkeypatch.setattr(parquet._Slices, "_begin", count)
    return begun


def test_each_row_group_is_decoded_once_for_one_read(tmp_path: Path, decoded: list[int]) -> None:
    dataset = Dataset.from_path("a", write(tmp_path / "x.parquet"))
    numbers = np.random.Generator(np.random.Philox(0)).permutation(40)
    with closing(dataset.open(0)) as reader:
        for _ in range(2):
            assert [row["id"] for row in reader.read(numbers)] == numbers.tolist()
    assert decoded == [0, 1, 2, 3]


def test_memory_for_decoded_row_groups_is_limited(
    tmp_path: Path, decoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of four fit; the limit is one for all readers of a thread."""
    monkeypatch.setattr(parquet, "_FOOTER_FACTOR", 0)
    dataset = Dataset.from_path("a", write(tmp_path / "x.parquet"))
    with closing(dataset.open(0)) as reader:
        reader.read(np.array([0]))
        monkeypatch.setattr(table_cache, "KEPT_BYTES", table_cache.kept.num_bytes * 5 // 2)
        with closing(dataset.open(0)) as other:
            for number in (10, 11, 20, 12, 0, 12):
                assert other.read(np.array([number]))[0]["id"] == number
                assert table_cache.kept.num_bytes <= table_cache.KEPT_BYTES
        assert decoded == [0, 1, 2, 0]
    assert table_cache.kept.num_bytes == 0
    monkeypatch.setattr(table_cache, "KEPT_BYTES", 1)
    assert len(list(dataset)) == 40


def test_memory_for_footers_of_open_files_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_cache, "KEPT_BYTES", 50_000)
    dataset = Dataset.from_path("a", write(tmp_path / "x.parquet"))
    readers = [dataset.open(0) for _ in range(20)]
    for number in (0, 39):
        for reader in readers:
            assert reader.read(np.array([number]))[0]["id"] == number
            assert 0 < table_cache.kept.num_bytes <= 50_000
    for reader in readers:
        reader.close()
    assert table_cache.kept.num_bytes == 0


@pytest.mark.parametrize("limit", ["bytes", "rows"])
def test_large_row_groups_are_decoded_in_slices_forward(
    tmp_path: Path, decoded: list[int], monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    monkeypatch.setattr(parquet, "_SLICE_BYTES", 300 if limit == "bytes" else 1 << 30)
    monkeypatch.setattr(parquet, "_SLICE_ROWS", 1 << 30 if limit == "bytes" else 25)
    monkeypatch.setattr(table_cache, "KEPT_BYTES", 1)
    dataset = Dataset.from_path("a", write(tmp_path / "x.parquet", 200, 100))
    assert [row["id"] for row in dataset] == [*range(200)]
    assert decoded == [0, 1]
    decoded.clear()
    with closing(dataset.open(0)) as reader:
        assert reader.groups.edges[-1] == 200 and len(reader.groups.edges) > 8
        for number in (5, 40, 20, 99, 150, 199, 150, 60):
            assert reader.read(np.array([number]))[0]["id"] == number
        assert decoded == [0, 0, 1, 1, 0]
        numbers = np.random.Generator(np.random.Philox(0)).permutation(200)
        assert [row["id"] for row in reader.read(numbers)] == numbers.tolist()


def test_folders_of_partitions_give_columns_of_text(tmp_path: Path) -> None:
    for number, folder in enumerate(
        ("day=1/lang=de", "day=2/lang=a%20b", "day=2/lang=__HIVE_DEFAULT_PARTITION__")
    ):
        write(tmp_path / folder / "x.parquet", number + 1)
    dataset = Dataset.from_path("a", tmp_path)
    assert [(row["day"], row["lang"]) for row in dataset] == [
        ("1", "de"), ("2", None), ("2", None), ("2", None), ("2", "a b"), ("2", "a b")
    ]  # fmt: skip
    assert list(dataset[0]) == ["id", "text", "day", "lang"]
    assert Dataset.from_path("a", tmp_path, columns=["lang"])[0] == {"lang": "de"}
    assert "lang" not in Dataset.from_path("a", tmp_path / "day=1" / "lang=de")[0]
    write(tmp_path / "day=3" / "x.parquet")
    with pytest.raises(
        DatasetError, match=r"lang=de/x.parquet' has 'lang', '.*day=3/x.parquet' has"
    ):
        Dataset.from_path("a", tmp_path)
    write(tmp_path / "other" / "id=3" / "x.parquet")
    with pytest.raises(DatasetError, match="more than one column 'id'"):
        Dataset.from_path("a", tmp_path / "other")


def test_views_of_text_and_bytes_are_read(tmp_path: Path) -> None:
    values = {"t": ["a" * 40, None, "b"], "b": [b"\xff" * 40, None, b""]}
    columns = [pa.array(values["t"], pa.string_view()), pa.array(values["b"], pa.binary_view())]
    table = pa.table(columns, names=["t", "b"])
    pq.write_table(table, tmp_path / "x.parquet")
    dataset = Dataset.from_path("a", tmp_path)
    assert [dataset[2], dataset[0]] == [{"t": "b", "b": b""}, {"t": "a" * 40, "b": b"\xff" * 40}]
    assert list(dataset) == table.to_pylist()


def test_names_with_dots_are_names(tmp_path: Path) -> None:
    rows = pa.table({"a": [{"b": 1}], "a.b": [2], "c": [3]})
    pq.write_table(rows, tmp_path / "x.parquet")
    assert list(Dataset.from_path("a", tmp_path)) == [{"a": {"b": 1}, "a.b": 2, "c": 3}]
    assert list(Dataset.from_path("a", tmp_path, columns=["a"])) == [{"a": {"b": 1}}]
    assert list(Dataset.from_path("a", tmp_path, columns=["a.b"])) == [{"a.b": 2}]


def test_damage_is_noticed_where_pages_have_checksums(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", write_page_checksum=True, compression="none")
    content = bytearray(path.read_bytes())
    content[content.index(b"t13 t13")] ^= 1
    path.write_bytes(content)
    dataset = Dataset.from_path("web", path)
    with closing(dataset.open(0)) as reader:
        message = f"dataset 'web', file '{path}', record 12: row group 1 cannot be decoded: .*CRC"
        with pytest.raises(RecordError, match=message):
            reader.read(np.array([3, 12]))
        assert [row["id"] for row in reader.read(np.array([25, 3]))] == [25, 3]


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each request to a remote storage."""
    sizes: list[int] = []
    read_ranges = RemoteStorage.read_ranges

    def record(self: Any, path: str, starts: Any, stops: Any) -> Any:
        sizes.append(int((stops - starts).sum()))
        return read_ranges(self, path, starts, stops)

    monkeypatch.setattr(RemoteStorage, "read_ranges", record)
    return sizes


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """URL and size of a file with row groups of 200 kB that do not compress."""
    noise = np.random.Generator(np.random.Philox(0)).bytes(1_600_000)
    rows = pa.table({"id": range(80), "noise": [noise[i * 20_000 :][:20_000] for i in range(80)]})
    pq.write_table(rows, tmp_path / "x.parquet", row_group_size=10)
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pipe("/d/x.parquet", (tmp_path / "x.parquet").read_bytes())
    yield "memory://d", (tmp_path / "x.parquet").stat().st_size
    fs.store.clear()


def test_remote_reading_requests_footer_and_row_groups_only(
    remote: tuple[str, int], requests: list[int]
) -> None:
    url, size = remote
    dataset = Dataset.from_path("a", url)
    assert len(dataset) == 80 and len(requests) == 1 and sum(requests) <= 1 << 16
    with closing(dataset.open(0)) as reader:
        requests.clear()
        assert [row["id"] for row in reader.read(np.array([15, 12]))] == [15, 12]
        assert len(requests) == 1 and sum(requests) < size // 7
    with closing(Dataset.from_path("a", url, columns=["id"]).open(0)) as reader:
        requests.clear()
        assert reader.read(np.array([15, 12, 70])) == [{"id": 15}, {"id": 12}, {"id": 70}]
        assert sum(requests) < 2_000


def test_local_reading_starts_no_thread(tmp_path: Path) -> None:
    """Seen in a child, which begins with one, whatever other tests have started here."""
    dataset = Dataset.from_path("a", write(tmp_path / "x.parquet"))

    def read_alone() -> None:
        assert len(list(dataset)) == 40 and len(os.listdir("/proc/self/task")) == 1

    with forked(read_alone) as child:
        assert exit_code(child) == 0
