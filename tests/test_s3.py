"""A real S3 server: what is refused, and a run over it that is killed."""

from __future__ import annotations

import io
import json
import socket
import threading
import time
import traceback
import tracemalloc
import zipfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch import Launch
from processes import exit_code, forked, wait_until
from stores import LIES, SECRET, WebStore, s3_options, s3_server

from zephon_torch import DataLoader
from zephon_torch.errors import DatasetError, StorageError
from zephon_torch.io import Dataset
from zephon_torch.io.remote import retries
from zephon_torch.io.remote.storage import RemoteStorage, connect
from zephon_torch.support import waits

pytest.importorskip("s3fs")
NUM_SHARDS, SIZE = 8, 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("s3")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    bucket = folder / "buckets" / "data"
    bucket.mkdir(parents=True)
    for number in range(NUM_SHARDS):
        ids = range(number * SIZE, (number + 1) * SIZE)
        content = "".join(json.dumps({"id": i, "pad": "." * 200}) + "\n" for i in ids)
        (bucket / f"part {number} ü#%.jsonl").write_text(content)
    with s3_server(folder) as url:
        yield url


@pytest.fixture(autouse=True)
def indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEPHON_CACHE_DIR", str(tmp_path / "indexes"))


def dataset_of(server: str, url: str = "s3://data", **options: Any) -> Dataset:
    return Dataset.from_path("x", url, storage_options=s3_options(server, **options))


def ids_of(samples: Any) -> list[int]:
    return [sample["id"] for sample in samples]


def test_folder_file_and_pattern(server: str) -> None:
    ids = list(range(NUM_SHARDS * SIZE))
    assert ids_of(dataset_of(server)) == ids
    assert ids_of(dataset_of(server, "s3://data/part [01]*.jsonl")) == ids[: 2 * SIZE]
    assert ids_of(dataset_of(server, "s3://data/part 2 ü#%.jsonl")) == ids[2 * SIZE : 3 * SIZE]


def test_what_is_wrong_is_told_at_once_and_without_credentials(server: str) -> None:
    begun = time.monotonic()
    for url, secret, words in (
        ("s3://none", SECRET, "no file or folder 's3://none'"),
        ("s3://none/x.jsonl", SECRET, "no file or folder 's3://none/x.jsonl'"),
        ("s3://data/none.jsonl", SECRET, "no file or folder 's3://data/none.jsonl'"),
        ("s3://data", "wr0ng-s3cr3t", r"cannot read 's3://data' \(PermissionError.*credentials"),
        ("s3://data/*.jsonl", "wr0ng-s3cr3t", r"cannot read 's3://data.*credentials"),
    ):
        with pytest.raises(DatasetError, match=words) as caught:
            dataset_of(server, url, secret=secret)
        assert "s3cr3t" not in "".join(traceback.format_exception(caught.value))
    assert time.monotonic() - begun < 20  # not tried again and again
    dataset = dataset_of(server)
    assert "s3cr3t" not in repr(dataset) + json.dumps(DataLoader(dataset).state_dict())


def test_a_replaced_object_is_noticed(server: str, folder: Path) -> None:
    path = folder / "buckets" / "data" / "part 7 ü#%.jsonl"
    content = path.read_bytes()
    dataset = dataset_of(server)
    try:
        path.write_bytes(content.replace(b"210", b"999"))
        with pytest.raises(DatasetError, match=r"part 7 .*' changed since .* another ETag"):
            dataset.open(7)
        path.write_bytes(content[:-100])
        with pytest.raises(DatasetError, match=r"part 7 .*' changed since .* bytes then"):
            dataset.open(7)
    finally:
        path.write_bytes(content)


def test_clients_work_in_forked_children_and_in_threads(server: str) -> None:
    dataset = dataset_of(server)
    expected = ids_of(dataset)
    results: list[list[int]] = []

    def reads_the_same() -> None:
        assert ids_of(dataset) == expected

    threads = [threading.Thread(target=lambda: results.append(ids_of(dataset))) for _ in range(3)]
    for thread in threads:
        thread.start()
    with forked(reads_the_same) as first, forked(reads_the_same) as second:
        for thread in threads:
            thread.join()
        assert results == [expected] * 3
        assert [exit_code(first), exit_code(second)] == [0, 0]


def test_tries_do_not_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is not there: the package's own tries, and none of ours."""
    assert retries.retries_itself("zip://x::s3://b/x.zip")
    assert not retries.retries_itself("https://s3/x")
    asked: list[float] = []
    monkeypatch.setattr(waits, "pause", asked.append)
    options = s3_options("http://127.0.0.1:9") | {"config_kwargs": {"retries": {"max_attempts": 1}}}
    with pytest.raises(DatasetError, match=r"cannot read 's3://data' \(Endpoint.*0.1:9.*network"):
        Dataset.from_path("x", "s3://data", storage_options=options)
    assert not asked


def test_names_with_two_colons_are_names(server: str, folder: Path) -> None:
    bucket = folder / "buckets" / "colons"
    (bucket / "a::b").mkdir(parents=True)
    for name in ("a::b/c::d.jsonl", "a::b/e.jsonl"):
        (bucket / name).write_text(json.dumps({"id": 7, "of": name}) + "\n")
    whole = dataset_of(server, "s3://colons")
    assert [sample["of"] for sample in whole] == ["a::b/c::d.jsonl", "a::b/e.jsonl"]
    assert whole.shard_path(0) == "s3://colons/a::b/c::d.jsonl"
    for url in ("s3://colons/a::b", "s3://colons/a::b/*.jsonl", "s3://colons/a::b/c::d.jsonl"):
        assert dataset_of(server, url)[0]["of"] == "a::b/c::d.jsonl"
    url = "simplecache::s3://colons/a::b/c::d.jsonl"
    options = {"s3": s3_options(server), "simplecache": {"cache_storage": str(folder / "simple")}}
    assert Dataset.from_path("x", url, storage_options=options)[0]["id"] == 7


def test_a_store_that_stalls_is_told_in_the_stated_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The package itself would wait for minutes, and try again."""
    monkeypatch.setenv("ZEPHON_READ_SECONDS", "1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        begun = time.monotonic()
        with pytest.raises(StorageError, match=r"cannot read 's3://data/x' \(Timeout.*network"):
            dataset_of(url, "s3://data/x")
        assert time.monotonic() - begun < 8  # of which most is for making the client


TOLD = {
    "same size": "does not serve ranges", "whole": "does not serve ranges",
    "shifted": "another range .Content-Range: bytes 1-", "unsaid": "another range .*none",
    "longer": "sent 650 bytes as a range of 642", "endless": "sent more than 642 bytes",
    "gzip": "sent [0-9,]+ bytes as a range of 642",
}  # fmt: skip


def tokens_of(store: WebStore) -> tuple[Dataset, np.ndarray[Any, Any]]:
    """Rows of 321 tokens, each of 642 bytes, from a server that is told how to answer."""
    rows = np.arange(20 * 321, dtype="<u2").reshape(20, 321)
    store.files["/data/t.bin"] = rows.tobytes()
    options = s3_options(store.url)
    dataset = Dataset.from_path(
        "t", "s3://data/t.bin", dtype="uint16", row_length=321, storage_options=options
    )
    return dataset, rows


@pytest.mark.parametrize("lie", ["whole", *LIES])
def test_only_the_bytes_that_were_asked_for_are_used(lie: str) -> None:
    with WebStore() as store:
        dataset, rows = tokens_of(store)
        with closing(dataset.open(0)) as reader:
            store.fault = lambda method, path, count: lie if method == "GET" else None
            tracemalloc.start()
            try:
                with pytest.raises(StorageError, match=f"the store of 's3://data/.*{TOLD[lie]}"):
                    reader.read(np.array([7]))
                assert tracemalloc.get_traced_memory()[1] < 8 << 20
            finally:
                tracemalloc.stop()
            assert store.num_asked("GET", "/data/t.bin") == 1  # it would be the same again
            assert store.num_sent < 16 << 20
            store.fault = lambda method, path, count: None
            assert np.array_equal(reader.read(np.array([7])), rows[7:8])


@pytest.mark.parametrize("lie", ["same size", "shifted", "endless"])
def test_answers_are_checked_behind_other_file_systems(lie: str) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("other", bytes(9_000_000))
        archive.writestr("x.jsonl", "".join(f'{{"id": {i}}}\n' for i in range(40)))
    with WebStore() as store:
        store.files["/data/a.zip"] = buffer.getvalue()
        url, options = "zip://x.jsonl::s3://data/a.zip", {"s3": s3_options(store.url)}
        store.fault = lambda method, path, count: lie if method == "GET" else None
        with pytest.raises(StorageError, match=r"the store of 'zip://x.jsonl::.*' sent"):
            Dataset.from_path("x", url, storage_options=options)
        store.fault = lambda method, path, count: None
        assert ids_of(Dataset.from_path("x", url, storage_options=options)) == [*range(40)]


def test_ranges_of_a_real_server_that_sends_them_as_200_are_read(server: str) -> None:
    with closing(dataset_of(server).open(1)) as reader:
        assert ids_of(reader.read(np.array([7, 3]))) == [SIZE + 7, SIZE + 3]


def test_what_is_stored_with_an_encoding_is_read_as_it_is() -> None:
    """S3 keeps `Content-Encoding` with an object, and tells it of the bytes as they are."""
    with WebStore() as store:
        store.headers["/data/t.bin"] = {"Content-Encoding": "gzip", "ETag": '"1"'}
        dataset, rows = tokens_of(store)
        assert np.array_equal(dataset[7], rows[7])


def test_a_session_and_hooks_of_the_user_are_checked_too() -> None:
    from aiobotocore.hooks import AioHierarchicalEmitter
    from aiobotocore.session import AioSession

    with WebStore() as store:
        tokens_of(store)
        store.fault = lambda method, path, count: "same size" if method == "GET" else None
        for own in ({"session": AioSession()}, {"event_hooks": AioHierarchicalEmitter()}):
            dataset = Dataset.from_path(
                *("t", "s3://data/t.bin"), dtype="uint16", row_length=321,
                storage_options=s3_options(store.url) | own,
            )  # fmt: skip
            for _ in range(2):
                with pytest.raises(StorageError, match="does not serve ranges"):
                    dataset[7]


def test_one_client_serves_all_files_of_a_store() -> None:
    """fsspec knows it again by its options, checks included."""
    with WebStore() as store:
        tokens_of(store)
        storage = connect("s3://data", s3_options(store.url))
        assert isinstance(storage, RemoteStorage)
        assert storage._resolve("a")[0] is storage._resolve("b")[0]


def steps(folder: Path, rank: int) -> list[tuple[int, list[int]]]:
    path = folder / f"notes.{rank}"
    text = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [tuple(json.loads(line)) for line in text.splitlines()]


def test_two_ranks_with_two_workers_are_killed_and_go_on(server: str, tmp_path: Path) -> None:
    dataset = dataset_of(server)
    arguments = (tmp_path, "s3://data", json.dumps(s3_options(server)))
    with Launch("stored.py", *arguments, world=2, output=tmp_path / "output.1"):
        wait_until(lambda: len(steps(tmp_path, 0)) >= 7)
    saved = json.loads((tmp_path / "state.json").read_text())["delivered"]
    before = [[step for step in steps(tmp_path, rank) if 0 < step[0] <= saved] for rank in range(2)]
    noted = [len(steps(tmp_path, rank)) for rank in range(2)]
    with Launch("stored.py", *arguments, world=2, output=tmp_path / "output.2") as second:
        second.wait()
    ranks = [before[rank] + steps(tmp_path, rank)[noted[rank] :] for rank in range(2)]
    together = [a[1] + b[1] for a, b in zip(*ranks, strict=True)]
    plain = DataLoader(dataset, batch_size=12, shuffle=True, seed=4, num_threads=0)
    assert together == [batch["id"].tolist() for batch in plain]
    kept = sorted(path.suffix for path in (tmp_path / "cache").iterdir())
    assert kept == [".lock", *[".shard"] * NUM_SHARDS, *[".sum"] * NUM_SHARDS]
