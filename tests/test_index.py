"""Index sidecars: found again, never trusted when they do not fit, written by many at once."""

from __future__ import annotations

import errno
import fcntl
import json
import multiprocessing
import os
import pickle
import struct
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import running

from zephon_torch.errors import DatasetError
from zephon_torch.io import Dataset
from zephon_torch.io.formats.json import jsonl
from zephon_torch.io.index import index, sidecar, turns
from zephon_torch.io.index.index import StaleIndexWarning, UnsavedIndexWarning
from zephon_torch.io.remote.storage import connect
from zephon_torch.io.storage.files import StoredFile
from zephon_torch.support.progress_bar import byte_bar

CONTENT = b'{"id": 0}\n{"id": 1}\n\n{"id": 2}\n'
RECORDS = [{"id": 0}, {"id": 1}, {"id": 2}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("ZEPHON_CACHE_DIR", str(folder))
    monkeypatch.setattr(index, "_unsaved", {})
    return folder


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    path = folder / "a.jsonl"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read as a whole to be indexed."""
    seen: list[str] = []
    indexer = jsonl.INDEXER

    def build(file: StoredFile, advance: index.Advance) -> index.Offsets | index.Index:
        seen.append(file.name)
        return indexer.build(file, advance)

    monkeypatch.setattr(jsonl, "INDEXER", index.Indexer(indexer.format, indexer.version, build))
    return seen


def beside(shard: Path) -> Path:
    return shard.with_name(f".{shard.name}.zidx")


def stored(shard: Path) -> StoredFile:
    storage, name = connect(str(shard)).split()
    return StoredFile(storage, *storage.info(name))


def forge(shard: Path, offsets: list[int], **changes: Any) -> None:
    """Write a sidecar that is sound in itself."""
    array = np.array(offsets, dtype=np.int64)
    origin = jsonl.INDEXER.origin(stored(shard))
    fields = {name: getattr(origin, name) for name in origin.__slots__} | changes
    beside(shard).write_bytes(
        sidecar.encode_header(sidecar.Origin(**fields), sidecar.Index(array)) + array.tobytes()
    )


def test_index_is_built_once_and_used_by_counting_and_reading(
    shard: Path, scans: list[str]
) -> None:
    for _ in range(3):
        dataset = Dataset.from_path("a", shard.parent)
        assert list(dataset) == RECORDS
    assert scans == ["a.jsonl"]
    assert sorted(os.listdir(shard.parent)) == [".a.jsonl.zidx", "a.jsonl"]


def test_layout_is_the_documented_one(shard: Path) -> None:
    Dataset.from_path("a", shard)
    raw = beside(shard).read_bytes()
    magic, version, length = struct.unpack_from("<8sII", raw)
    assert (magic, version, (16 + length) % 64) == (b"ZEPHIDX\n", 2, 0)
    header = json.loads(raw[16 : 16 + length])
    assert np.frombuffer(raw[16 + length :], "<i8").tolist() == [0, 10, 21, 31]
    assert header.pop("crc32") > 0
    assert header == {
        "format": "jsonl",
        "format_version": 1,
        "file": "a.jsonl",
        "num_bytes": 31,
        "stamp": shard.stat().st_mtime_ns,
        "num_samples": 3,
        "num_blocks": None,
    }


def test_offsets_are_a_read_only_map_of_the_sidecar(shard: Path) -> None:
    Dataset.from_path("a", shard)
    offsets = index.load(stored(shard), jsonl.INDEXER, 3)
    assert offsets.dtype == np.int64 and not offsets.flags.writeable
    assert str(beside(shard)) in Path("/proc/self/maps").read_text()


def test_sidecar_may_be_read_by_whoever_may_read_the_shard(shard: Path) -> None:
    shard.chmod(0o644)
    Dataset.from_path("a", shard)
    assert beside(shard).stat().st_mode & 0o777 == 0o644


def test_added_shard_is_found_and_only_it_is_scanned(shard: Path, scans: list[str]) -> None:
    Dataset.from_path("a", shard.parent)
    shard.with_name("b.jsonl").write_bytes(b"7\n")
    assert list(Dataset.from_path("a", shard.parent)) == [*RECORDS, 7]
    assert scans == ["a.jsonl", "b.jsonl"]


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda raw: raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 or len(raw) :]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda raw: b"", "it has only 0 bytes"),
        (lambda raw: raw[:40], "its header cannot be parsed"),
        (lambda raw: raw[:-8], r"it has \d+ bytes, \d+ expected"),
        (lambda raw: raw + b"\0" * 8, r"it has \d+ bytes, \d+ expected"),
        (lambda raw: b"{}" + raw[2:], "it is not an index of this package"),
        (flip(8), "its layout has version 3, 2 expected"),
        (lambda raw: raw[:12] + b"\xff" * 4 + raw[16:], "its header claims 4,294,967,295 bytes"),
        (lambda raw: raw.replace(b'"stamp"', b'"stomp"'), "its header cannot be parsed"),
        (
            lambda raw: raw.replace(b'"num_samples": 3', b'"num_samples":-1'),
            "its num_samples is -1: expected",
        ),
        (lambda raw: raw.replace(b'"num_samples": 3', b'"num_samples": 2'), "bytes, .* expected"),
        (lambda raw: raw.replace(b'"jsonl"', b'"jsonx"'), "from format 'jsonx', now format is 'js"),
        (lambda raw: raw.replace(b"a.jsonl", b"b.jsonl"), "from file 'b.jsonl', now file is 'a.js"),
    ],
)
def test_damaged_sidecar_is_named_and_rebuilt(
    shard: Path, damage: Callable[[bytes], bytes], reason: str
) -> None:
    Dataset.from_path("a", shard)
    sound = beside(shard).read_bytes()
    beside(shard).write_bytes(damage(sound))
    with pytest.warns(StaleIndexWarning, match=rf"{shard}' anew, .*{beside(shard)}': .*{reason}"):
        assert list(Dataset.from_path("a", shard)) == RECORDS
    assert beside(shard).read_bytes() == sound


def test_damaged_offsets_are_noticed_when_a_reader_maps_them(shard: Path) -> None:
    dataset = Dataset.from_path("a", shard)
    sound = beside(shard).read_bytes()
    beside(shard).write_bytes(flip(len(sound) - 10)(sound))
    with pytest.warns(StaleIndexWarning, match="the checksum of its tables does not match"):
        assert list(dataset) == RECORDS
    assert beside(shard).read_bytes() == sound


@pytest.mark.parametrize("offsets", [[0, 21, 10, 31], [0, 10, 21, 30], [-1, 10, 21, 31]])
def test_impossible_offsets_are_rebuilt(shard: Path, offsets: list[int]) -> None:
    dataset = Dataset.from_path("a", shard)
    forge(shard, offsets)
    with pytest.warns(StaleIndexWarning, match="not ascending up to the size of the file"):
        assert list(dataset) == RECORDS


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (CONTENT + b"3\n", "made from num_bytes 31, now num_bytes is 33"),
        (CONTENT.replace(b"0", b"7"), "made from stamp 5, now stamp is 6"),
    ],
)
def test_changed_shard_is_scanned_again(shard: Path, content: bytes, reason: str) -> None:
    os.utime(shard, ns=(5, 5))
    Dataset.from_path("a", shard)
    shard.write_bytes(content)
    os.utime(shard, ns=(6, 6))
    with pytest.warns(StaleIndexWarning, match=reason):
        dataset = Dataset.from_path("a", shard)
    assert list(dataset) == [json.loads(line) for line in content.split(b"\n") if line]


@pytest.mark.parametrize(
    ("offsets", "sample", "reason"),
    [
        ([0, 10, 31], 1, "record 1 spans several lines"),  # a record fewer
        ([0, 10, 15, 21, 31], 2, "record 2 does not begin at the start of a line"),  # one more
        ([0, 12, 21, 31], 1, "record 1 does not begin at the start of a line"),
        ([10, 21, 31], 0, "there is more than blank lines before its first record"),
        ([1, 10, 21, 31], 0, "there is more than blank lines before its first record"),
        ([31], 0, "there is more than blank lines before its first record"),
    ],
)
def test_sound_but_wrong_index_never_gives_wrong_data(
    shard: Path, offsets: list[int], sample: int, reason: str
) -> None:
    forge(shard, offsets)
    dataset = Dataset.from_path("a", shard)
    with (
        pytest.raises(DatasetError, match=rf"{shard}'.*{reason}; delete '{beside(shard)}' or"),
        closing(dataset.open(0)) as reader,
    ):
        reader.read(np.array([sample], dtype=np.int64))


def test_reader_refuses_another_count_than_the_dataset_was_made_with(shard: Path) -> None:
    forge(shard, [0, 10, 31])
    dataset = Dataset.from_path("a", shard)
    beside(shard).unlink()
    with pytest.raises(DatasetError, match=r"holds 3 records, 2 when the dataset was made"):
        dataset.open(0)


def test_folder_that_cannot_be_written_gets_its_index_in_the_cache(
    shard: Path, cache: Path, scans: list[str]
) -> None:
    beside(shard).mkdir()  # root may write anywhere, but not over a folder
    for _ in range(2):
        assert list(Dataset.from_path("a", shard)) == RECORDS
    assert scans == ["a.jsonl"]
    (entry,) = cache.iterdir()
    assert len(entry.stem) == 64 and entry.suffix == ".zidx"
    assert entry.stat().st_mode & 0o777 == 0o644
    assert sorted(os.listdir(shard.parent)) == [".a.jsonl.zidx", "a.jsonl"]  # no temporary file


def test_sound_cache_entry_is_used_although_a_stale_one_lies_beside(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forge(shard, [31], stamp=1)
    write: Any = index.write_atomically
    monkeypatch.setattr(
        index, "write_atomically", lambda path, *rest: write(refuse(path, shard.parent), *rest)
    )
    with pytest.warns(StaleIndexWarning):
        Dataset.from_path("a", shard)
    assert list(Dataset.from_path("a", shard)) == RECORDS  # a warning would fail


def refuse(path: str, folder: Path) -> str:
    if os.path.dirname(path) == str(folder):
        raise PermissionError(f"read-only: {folder}")
    return path


@pytest.mark.parametrize("variables", [{"XDG_CACHE_HOME": "x"}, {"HOME": "x"}])
def test_cache_folder_follows_the_environment(
    shard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    for name in ("ZEPHON_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    sub = ".cache/zephon_torch" if "HOME" in variables else "zephon_torch"
    assert list(index.sidecar_paths(stored(shard)))[1].startswith(f"{tmp_path / 'x' / sub}/")


def test_without_any_place_the_index_lives_in_memory_and_one_warning_says_so(
    shard: Path, cache: Path, scans: list[str]
) -> None:
    beside(shard).mkdir()
    other = shard.with_name("b.jsonl")
    other.write_bytes(b"7\n")
    beside(other).mkdir()
    cache.write_text("a file where the cache folder would be")
    with pytest.warns(UnsavedIndexWarning, match=rf"'{shard}' can be .*'{cache}'") as caught:
        dataset = Dataset.from_path("a", shard.parent)
    assert len(caught) == 1
    assert list(dataset) == [*RECORDS, 7]
    assert list(Dataset.from_path("a", shard.parent)) == [*RECORDS, 7]
    assert scans == ["a.jsonl", "b.jsonl"]


def test_failed_write_leaves_no_temporary_file(
    shard: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device", target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(UnsavedIndexWarning):
        Dataset.from_path("a", shard)
    assert os.listdir(shard.parent) == ["a.jsonl"] and os.listdir(cache) == []


def test_shard_that_changes_while_it_is_indexed_is_an_error(
    shard: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(file: StoredFile, advance: index.Advance) -> index.Offsets:
        os.utime(shard, ns=(7, 7))
        return np.array([0, file.num_bytes])

    monkeypatch.setattr(jsonl, "INDEXER", index.Indexer("jsonl", 1, build))
    with pytest.raises(DatasetError, match="changed since the dataset was made"):
        Dataset.from_path("a", shard)
    assert not beside(shard).exists()


def _build_and_read(folder: str, gate: Any, results: Any) -> None:
    gate.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results.put([record["id"] for record in Dataset.from_path("many", folder)])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_many_processes_build_the_same_indexes_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for shard in range(20):
        lines = [json.dumps({"id": shard * 100 + i}) for i in range(100)]
        (folder / f"{shard:02d}.jsonl").write_text("\n".join(lines))
    context = multiprocessing.get_context("fork")
    gate, results = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=_build_and_read, args=(str(folder), gate, results)) for _ in range(4)
    ]
    with running(processes):
        assert [results.get(timeout=200) for _ in processes] == [list(range(2000))] * 4
        for process in processes:
            process.join(200)
            assert process.exitcode == 0
    assert len(os.listdir(folder)) == 40  # a sidecar each, no temporary file


@dataclass
class Slow:
    """Builds the index of a file, when it is let."""

    started: threading.Event = field(default_factory=threading.Event)
    may_end: threading.Event = field(default_factory=threading.Event)
    fails: bool = False
    num_builds: int = 0

    def __call__(self, file: StoredFile, advance: index.Advance) -> index.Offsets:
        self.num_builds += 1
        self.started.set()
        assert self.may_end.wait(30)
        if self.fails and self.num_builds == 1:
            raise DatasetError("the first one fails")
        return jsonl.INDEXER.build(file, advance)


def build_twice(shard: Path, slow: Slow) -> list[Any]:
    """By two threads, the second while the first is about it: locks are those of processes."""
    indexer = index.Indexer("jsonl", 1, slow)
    heard: list[int] = []
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(index.build, stored(shard), indexer, heard.append)
        assert slow.started.wait(30)
        second = pool.submit(index.build, stored(shard), indexer, heard.append)
        with suppress(TimeoutError):
            second.result(0.2)
        slow.may_end.set()
        results = [first.exception(30) or first.result(), second.result(30)]
    assert heard == [len(CONTENT)] * (1 if slow.fails else 2)
    return results


def test_who_comes_while_an_index_is_built_waits_and_takes_it(shard: Path) -> None:
    slow = Slow()
    assert [offsets.tolist() for offsets in build_twice(shard, slow)] == [[0, 10, 21, 31]] * 2
    assert slow.num_builds == 1
    assert sorted(os.listdir(shard.parent)) == [".a.jsonl.zidx", "a.jsonl"]


def test_who_waits_for_one_that_fails_builds_it(shard: Path) -> None:
    slow = Slow(fails=True)
    error, offsets = build_twice(shard, slow)
    assert isinstance(error, DatasetError) and offsets.tolist() == [0, 10, 21, 31]
    assert slow.num_builds == 2


@pytest.mark.parametrize("reason", ["patience", "locks"])
def test_without_locks_or_patience_an_index_is_built_twice(
    shard: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    if reason == "patience":
        monkeypatch.setattr(turns, "_PATIENCE_SECONDS", -1.0)
    else:
        monkeypatch.setattr(fcntl, "flock", refuse)
    slow = Slow()
    assert [offsets.tolist() for offsets in build_twice(shard, slow)] == [[0, 10, 21, 31]] * 2
    assert slow.num_builds == 2


def test_dataset_finds_its_index_again_after_a_pickle(shard: Path, scans: list[str]) -> None:
    dataset = pickle.loads(pickle.dumps(Dataset.from_path("a", shard)))
    assert list(dataset) == RECORDS and scans == ["a.jsonl"]


def test_bar_appears_only_after_a_second(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with byte_bar("indexing 'a'", 100) as advance:
        now = 0.9
        advance(20)
        assert capsys.readouterr().err == ""
        now = 1.1
        advance(20)
        advance(60)
    captured = capsys.readouterr()
    assert "indexing 'a': 100%" in captured.err and captured.out == ""


# --- names that lead elsewhere --------------------------------------------------------------------


@pytest.mark.parametrize("is_beside", [True, False])
def test_a_link_in_the_place_of_a_sidecar_is_replaced_not_followed(
    shard: Path, cache: Path, is_beside: bool
) -> None:
    victim = shard.with_name("victim.txt")
    victim.write_text("precious")
    paths = [Path(path) for path in index.sidecar_paths(stored(shard))]
    if not is_beside:
        paths[0].mkdir()  # the folder takes none
        cache.mkdir()
    place = paths[not is_beside]
    place.symlink_to(victim)
    with pytest.warns(StaleIndexWarning, match="is not an index of this package|has only 8 bytes"):
        assert len(Dataset.from_path("a", shard)) == 3
    assert victim.read_text() == "precious"
    assert not place.is_symlink() and place.stat().st_size > 64


def test_a_cache_folder_that_is_made_is_private(shard: Path, cache: Path) -> None:
    Path(next(index.sidecar_paths(stored(shard)))).mkdir()
    assert len(Dataset.from_path("a", shard)) == 3
    assert cache.stat().st_mode & 0o777 == 0o700
    (sidecar,) = cache.iterdir()
    assert sidecar.stat().st_size > 64
