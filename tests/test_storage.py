"""Local paths and URLs: what is listed, what is read, what is shown."""

from __future__ import annotations

import json
import os
import pickle
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from zephon_torch.errors import ConfigurationError, DatasetError, RecordError
from zephon_torch.io import Dataset
from zephon_torch.io.formats.json import jsonl
from zephon_torch.io.remote.merging import merge_ranges
from zephon_torch.io.remote.storage import connect
from zephon_torch.io.storage.files import StoredFile, describe_change


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ZEPHON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def paths_of(path: str | Path) -> list[str]:
    return [shard.path for shard in Dataset.from_path("a", path).shards]


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(name) + "\n")
    return folder


def test_folder_is_read_to_any_depth_in_order_of_paths(tmp_path: Path) -> None:
    folder = fill(tmp_path / "d", "b.jsonl", "a/z.ndjson", "a-1.jsonl", "a/b/c.jsonl", "A.JSONL")
    expected = ["A.JSONL", "a-1.jsonl", "a/b/c.jsonl", "a/z.ndjson", "b.jsonl"]
    assert paths_of(folder) == expected
    assert list(Dataset.from_path("a", folder)) == expected


def test_order_does_not_depend_on_the_order_of_the_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fill(tmp_path / "d", *(f"{i}.jsonl" for i in range(30)))
    first = paths_of(folder)
    scandir = os.scandir

    class Shuffled:
        def __init__(self, path: str) -> None:
            with scandir(path) as entries:
                self.entries = list(entries)
            random.Random(0).shuffle(self.entries)

        def __enter__(self) -> Iterator[os.DirEntry[str]]:
            return iter(self.entries)

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(os, "scandir", Shuffled)
    assert paths_of(folder) == first


def test_hidden_unfinished_and_other_files_are_left_out(tmp_path: Path) -> None:
    folder = fill(
        tmp_path / "d", "a.jsonl", "README.md", ".hidden.jsonl", "_SUCCESS", "_x.jsonl",
        "b.jsonl.tmp", ".git/c.jsonl", "_temporary/d.jsonl",
    )  # fmt: skip
    assert paths_of(folder) == ["a.jsonl"]


def test_patterns_leave_out_unfinished_folders_unless_they_name_them(
    tmp_path: Path, memory: MemoryFileSystem
) -> None:
    names = ["a.jsonl", "b/a.jsonl", "_temporary/0/a.jsonl", "b/_logs/a.jsonl", "b.tmp/a.jsonl"]
    folder = fill(tmp_path / "_d", *names)
    memory.pipe({f"/_d/{name}": b"1" for name in names})
    for root in (folder, "memory://_d"):
        assert paths_of(f"{root}/**/*.jsonl") == ["a.jsonl", "b/a.jsonl"]
        assert paths_of(f"{root}/*/*.jsonl") == ["b/a.jsonl"]
        assert paths_of(f"{root}/b/_l*/*.jsonl") == ["_logs/a.jsonl"]
        assert paths_of(f"{root}/_t*/*/*.jsonl") == ["_temporary/0/a.jsonl"]
        assert paths_of(f"{root}/_temporary/*/*.jsonl") == ["0/a.jsonl"]


def test_one_file_and_patterns(tmp_path: Path) -> None:
    folder = fill(tmp_path / "d", "a1.jsonl", "a2.jsonl", "b/a3.jsonl", "_a.jsonl", ".a.jsonl")
    (folder / "a_folder.jsonl").mkdir()
    assert paths_of(folder / "a1.jsonl") == ["a1.jsonl"]
    assert paths_of(folder / "_a.jsonl") == ["_a.jsonl"]
    assert paths_of(folder / "*.jsonl") == ["a1.jsonl", "a2.jsonl"]
    assert paths_of(folder / "a[2-9].jsonl") == ["a2.jsonl"]
    assert paths_of(folder / "**" / "a?.jsonl") == ["a1.jsonl", "a2.jsonl", "b/a3.jsonl"]
    assert paths_of(folder / "_*.jsonl") == ["_a.jsonl"]


def test_what_exists_is_never_a_pattern(tmp_path: Path) -> None:
    folder = fill(tmp_path / "d[1]", "a[0].jsonl", "a0.jsonl")
    fill(tmp_path / "d1", "other.jsonl")
    assert paths_of(folder) == ["a0.jsonl", "a[0].jsonl"]
    assert paths_of(folder / "a[0].jsonl") == ["a[0].jsonl"]
    assert paths_of(folder / "*") == ["a0.jsonl", "a[0].jsonl"]


@pytest.mark.parametrize("name", ["with space", "ünï-文", "per%20cent", "ha#sh", "que?ry", "nl\nx"])
def test_unusual_names_work_as_path_and_as_file_url(tmp_path: Path, name: str) -> None:
    folder = fill(tmp_path / name, f"{name}.jsonl")
    file = folder / f"{name}.jsonl"
    for path in (folder, file, str(folder), folder.as_uri(), f"file://{file}"):
        dataset = Dataset.from_path("a", path)
        assert dataset.shards[0].path == f"{name}.jsonl"
        assert dataset.shard_path(0) == str(file)
        assert list(dataset) == [f"{name}.jsonl"]


def test_names_that_are_not_utf8_work(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path / "d")
    os.mkdir(folder)
    with open(os.path.join(folder, b"\xff.jsonl"), "wb") as file:
        file.write(b"1\n")
    dataset = Dataset.from_path("a", tmp_path / "d")
    assert list(dataset) == list(Dataset.from_path("a", tmp_path / "d")) == [1]
    assert len(dataset.fingerprint) == 64


def test_relative_and_home_paths_are_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "d", "a.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    datasets = [Dataset.from_path("a", path) for path in ("d", "d/", "~/d", Path("d"))]
    monkeypatch.chdir("/")
    assert [list(dataset) for dataset in datasets] == [["a.jsonl"]] * 4


def test_links_are_followed_and_may_form_a_ring(tmp_path: Path) -> None:
    folder = fill(tmp_path / "d", "a.jsonl")
    fill(tmp_path / "elsewhere", "b.jsonl", "c.jsonl")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (folder / "file.jsonl").symlink_to(tmp_path / "elsewhere" / "c.jsonl")
    (folder / "ring").symlink_to(folder)
    paths = ["a.jsonl", "file.jsonl", "linked/b.jsonl", "linked/c.jsonl"]
    assert paths_of(folder) == paths
    assert list(Dataset.from_path("a", folder)) == ["a.jsonl", "c.jsonl", "b.jsonl", "c.jsonl"]


def test_patterns_of_any_depth_give_each_file_once_where_links_form_rings(tmp_path: Path) -> None:
    folder = fill(tmp_path / "d", "a.jsonl", "b/c/d.jsonl", ".hidden/e.jsonl")
    for name in ("ring", "other_ring", "b/ring"):
        (folder / name).symlink_to(folder)
    every = ["a.jsonl", "b/c/d.jsonl"]
    for pattern in ("**/*.jsonl", "**", "**/**/*.jsonl"):
        assert paths_of(folder / pattern) == every
    assert paths_of(folder / "**" / "c" / "**" / "*.jsonl") == ["b/c/d.jsonl"]
    assert paths_of(folder / "*" / "**" / "*.jsonl") == ["b/c/d.jsonl"]
    assert paths_of(folder / "b" / "**" / "c" / "*") == ["c/d.jsonl"]
    fill(folder / "[x]", "e.jsonl")
    assert paths_of(folder / "**" / "e.jsonl") == ["[x]/e.jsonl"]


def put_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def put_socket(path: Path) -> None:
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as made:
        folder = os.open(path.parent, os.O_RDONLY)  # the path of a socket must be short
        made.bind(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)


def put_device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("put", [put_pipe, put_socket, put_device])
@pytest.mark.timeout(60)
def test_what_is_no_file_is_named_and_never_waited_for(
    tmp_path: Path, put: Callable[[Path], None]
) -> None:
    told = "is a (named pipe|socket or a device), not a file: move it away"
    values, lines = tmp_path / "values.bin", tmp_path / "l" / "x.jsonl"
    values.write_bytes(bytes(8))
    put(tmp_path / "values.idx")
    tokens = {"dtype": "uint16", "row_length": 2}
    with pytest.raises(DatasetError, match=rf"values.idx' {told}"):  # beside it
        Dataset.from_path("a", values, **tokens)
    (tmp_path / "values.idx").unlink()
    dataset = Dataset.from_path("a", values, **tokens)
    put(values)
    for ask in (
        lambda: dataset.open(0),
        lambda: dataset[0],
        lambda: Dataset.from_path("a", tmp_path, **tokens),
        lambda: Dataset.from_path("a", values, **tokens),
        lambda: Dataset.from_path("a", tmp_path / "*.bin", **tokens),
        lambda: Dataset.from_manifest("a", values),
        lambda: connect(str(tmp_path)).read("values.bin", 0, 1),
    ):
        with pytest.raises(DatasetError, match=rf"values.bin' {told}"):
            ask()
    lines.parent.mkdir()
    lines.write_text("1\n")
    put(lines.with_name(".x.jsonl.zidx"))
    with pytest.raises(DatasetError, match=rf".x.jsonl.zidx' {told}"):
        Dataset.from_path("a", lines)


def test_link_to_nothing_is_named_if_it_is_data(tmp_path: Path) -> None:
    folder = fill(tmp_path / "d", "a.jsonl")
    (folder / "README").symlink_to("nowhere")
    assert paths_of(folder) == ["a.jsonl"]
    (folder / "b.jsonl").symlink_to("nowhere")
    with pytest.raises(DatasetError, match=rf"{folder}/b.jsonl' is a symbolic link to nothing"):
        Dataset.from_path("a", folder)


def test_remote_folder_file_and_pattern(memory: MemoryFileSystem, cache: Path) -> None:
    memory.pipe({f"/d/s{i}/a b#{i}.jsonl": f"{i}\n1{i}\n".encode() for i in (2, 0, 1)})
    memory.pipe({"/d/_x.jsonl": b"1", "/d/.h/x.jsonl": b"1", "/top.jsonl": b"7"})
    dataset = Dataset.from_path("m", "memory://d")
    paths = ["s0/a b#0.jsonl", "s1/a b#1.jsonl", "s2/a b#2.jsonl"]
    assert [shard.path for shard in dataset.shards] == paths
    assert list(dataset) == [0, 10, 1, 11, 2, 12]
    assert dataset.shard_path(1) == "memory://d/s1/a b#1.jsonl"
    assert list(Dataset.from_path("m", "memory://d/s1/a b#1.jsonl")) == [1, 11]
    assert list(Dataset.from_path("m", "memory://top.jsonl")) == [7]
    assert [shard.path for shard in Dataset.from_path("m", "memory://d/s*/*").shards] == paths
    assert len(list(cache.iterdir())) == 4
    with pytest.raises(DatasetError, match="no file or folder 'memory://nowhere'"):
        Dataset.from_path("m", "memory://nowhere")


def test_remote_reads_equal_local_ones(memory: MemoryFileSystem, tmp_path: Path) -> None:
    content = b"\xef\xbb\xbf" + b"".join(b'{"id": %d}\r\n \n' % i for i in range(500))
    memory.pipe("/x.jsonl", content)
    (tmp_path / "x.jsonl").write_bytes(content)
    remote, local = (Dataset.from_path("x", f"{root}/x.jsonl") for root in ("memory:/", tmp_path))
    assert remote.fingerprint == local.fingerprint
    order = np.random.default_rng(0).integers(0, 500, 100)
    with closing(remote.open(0)) as one, closing(local.open(0)) as other:
        assert one.read(order) == other.read(order)
        assert one.read(order[:0]) == []
    with pytest.raises(DatasetError, match="is closed"):
        one.read(order)


def test_remote_index_is_kept_and_a_replaced_file_is_noticed(memory: MemoryFileSystem) -> None:
    memory.pipe("/x.jsonl", b"1\n2\n")
    dataset = Dataset.from_path("x", "memory://x.jsonl")
    with closing(dataset.open(0)) as reader:
        memory.pipe("/x.jsonl", b"1\n")
        with pytest.raises(DatasetError, match=r"'memory://x.jsonl' was cut short: 4 bytes"):
            reader.read(np.array([1]))
    memory.pipe("/x.jsonl", b"3\n4\n")
    with pytest.raises(DatasetError, match=r"x.jsonl. changed .* modified at \d+ ns then"):
        dataset.open(0)
    with pytest.warns(UserWarning, match="anew"):
        assert list(Dataset.from_path("x", "memory://x.jsonl")) == [3, 4]


def test_remote_bad_record_is_named_by_url(
    memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe("/x.jsonl", b"1\n\n{\n")
    dataset = Dataset.from_path("x", "memory://x.jsonl")
    with pytest.raises(RecordError, match=r"file 'memory://x.jsonl', line 3 \(record 1\)"):
        dataset[1]
    monkeypatch.setattr(jsonl, "_MAX_REMOTE_BYTES_FOR_LINE", 1)
    with pytest.raises(RecordError, match=r"file 'memory://x.jsonl', byte 3 \(record 1\)"):
        dataset[1]


def test_chained_urls_reach_their_files(memory: MemoryFileSystem, tmp_path: Path) -> None:
    memory.pipe("/d/x.jsonl", b"1\n2\n")
    url = "simplecache::memory://d/x.jsonl"
    options = {"simplecache": {"cache_storage": str(tmp_path / "simple")}}
    assert list(Dataset.from_path("x", url, storage_options=options)) == [1, 2]


class KeyedFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A memory file system that asks for a key and shows ETags, like an object store."""

    protocol = "keyed"
    store: dict[str, Any] = {}  # noqa: RUF012 - as the base class has it
    pseudo_dirs = [""]  # noqa: RUF012
    etag = "one"

    def __init__(self, *, key: str, **options: Any) -> None:
        assert key == "s3cr3t"
        super().__init__(**options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("keyed://")))

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        return {**super().info(path, **options), "ETag": self.etag}


@pytest.fixture
def keyed(monkeypatch: pytest.MonkeyPatch) -> KeyedFileSystem:
    fsspec.register_implementation("keyed", KeyedFileSystem, clobber=True)
    monkeypatch.setattr(KeyedFileSystem, "etag", "one")
    fs = KeyedFileSystem(key="s3cr3t")
    fs.store.clear()
    fs.pipe("/d/x.jsonl", b"1\n{\n")
    return fs


def test_storage_options_travel_but_are_never_shown(keyed: KeyedFileSystem) -> None:
    options = {"key": "s3cr3t"}
    dataset = Dataset.from_path("x", "keyed://d/x.jsonl", storage_options=options)
    dataset = pickle.loads(pickle.dumps(dataset))
    assert dataset[0] == 1
    with pytest.raises(RecordError) as caught:
        dataset[1]
    shown = [repr(dataset), dataset.shard_path(0), str(caught.value), repr(dataset.__dict__)]
    assert not any("s3cr3t" in text for text in shown)


def test_changed_etag_is_noticed(keyed: KeyedFileSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = Dataset.from_path("x", "keyed://d/x.jsonl", storage_options={"key": "s3cr3t"})
    monkeypatch.setattr(KeyedFileSystem, "etag", "two")
    with pytest.raises(DatasetError, match=r"changed since .* another ETag"):
        dataset.open(0)


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("sftp://me:s3cr3t@host/d/x.jsonl", "sftp://host/d/x.jsonl"),
        ("https://host/d/x.jsonl?signature=s3cr3t", "https://host/d/x.jsonl"),
        ("zip://d/x.jsonl::sftp://me:s3cr3t@host/x.zip", "zip://d/x.jsonl::sftp://host/x.zip"),
        (
            "simplecache::https://me:s3cr3t@host/x.jsonl?k=s3cr3t",
            "simplecache::https://host/x.jsonl",
        ),
        ("zip://x.jsonl::https://host/x.zip?k=s3cr3t", "zip://x.jsonl::https://host/x.zip"),
        (
            "zip://x::https://host/x?k=s3cr3t::http://h/?s3cr3t",
            "zip://x::https://host/x::http://h/",
        ),
        ("s3://bucket", "s3://bucket"),
    ],
)
def test_urls_for_people_hold_no_credentials(path: str, shown: str) -> None:
    storage = connect(path, {"password": "s3cr3t"})
    assert storage.url() == shown
    assert "s3cr3t" not in repr(storage)
    folder, name = storage.split()
    assert folder.url(name) == shown or "/" not in shown.partition("://")[2]


def test_unknown_protocol_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"cannot open 'nosuch://x': .*nosuch"):
        Dataset.from_path("a", "nosuch://x")


ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), min_size=1, max_size=12)


@given(ranges=ranges, gap=st.integers(0, 10))
def test_merged_ranges_cover_and_stay_apart(ranges: list[tuple[int, int]], gap: int) -> None:
    starts = np.array([start for start, _ in ranges], dtype=np.int64)
    stops = starts + np.array([size for _, size in ranges], dtype=np.int64)
    firsts, lasts, owner = merge_ranges(starts, stops, gap)
    assert (firsts[owner] <= starts).all() and (stops <= lasts[owner]).all()
    assert (firsts[1:] > lasts[:-1] + gap).all()
    assert set(firsts) <= set(starts) and set(lasts) <= set(stops)


def test_local_ranges_read_like_remote_ones(tmp_path: Path, memory: MemoryFileSystem) -> None:
    memory.pipe("/x", b"abcdef")
    (tmp_path / "x").write_bytes(b"abcdef")
    starts, stops = np.array([4, 0, 1]), np.array([6, 1, 1])
    for storage in (connect(str(tmp_path)), connect("memory://")):
        assert storage.read_ranges("x", starts, stops) == [b"ef", b"a", b""]
        assert storage.read("x", 1, 3) == b"bc"
        file = StoredFile(storage, *storage.info("x"))
        assert b"".join(file.blocks(4)) == b"abcdef"


@pytest.mark.parametrize(
    ("then", "now", "is_changed"),
    [
        (5_000_000_123, 5_000_000_123, False),
        (5_000_000_123, 5_000_000_124, True),
        (5_000_000_123, 5_000_000_000, False),  # a server that tells seconds
        (5_000_000_000, 5_999_999_999, False),
        (5_000_000_123, 6_000_000_000, True),
        (5_999_999_999, 6_000_000_000, True),
        (-7, -7, False),
        (-7, -8, True),
        (-7, 5_000_000_000, False),  # an ETag and a time do not compare
        (0, 5_000_000_000, False),
    ],
)
def test_stamps_are_compared_as_far_as_a_store_tells_them(
    then: int, now: int, is_changed: bool
) -> None:
    assert bool(describe_change(10, then, 10, now)) == is_changed
    assert describe_change(10, then, 11, now) == "10 bytes then, 11 now"
