"""Manifests: the same dataset without a look at its files, and nothing from one that is unsound."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zephon_torch.errors import ConfigurationError, DatasetError, ZephonError
from zephon_torch.io import Dataset
from zephon_torch.io.datasets.paths import Paths
from zephon_torch.io.formats.json import jsonl
from zephon_torch.io.storage.local import LocalStorage

Change = Callable[[bytes], bytes]


@pytest.fixture
def file(folder: Path) -> Path:
    """The manifest of a folder of four shards."""
    path = folder / "web.zman"
    Dataset.from_path("web", folder).save_manifest(path)
    return path


def load(file: Path, **options: Any) -> Dataset:
    return Dataset.from_manifest("web", file, **options)


def test_dataset_is_the_same_and_no_file_is_looked_at(
    folder: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Dataset.from_path("web", folder)
    looked: list[str] = []
    info = LocalStorage.info
    monkeypatch.setattr(LocalStorage, "list_files", None)
    monkeypatch.setattr(
        LocalStorage, "info", lambda self, path: looked.append(path) or info(self, path)
    )
    dataset = load(file)
    assert looked == ["web.zman"]
    assert dataset.fingerprint == expected.fingerprint
    assert list(dataset.shards) == list(expected.shards)
    assert list(dataset) == list(expected)
    assert repr(dataset) == repr(expected)


def test_a_manifest_is_not_taken_for_data(folder: Path, file: Path) -> None:
    assert Dataset.from_path("web", folder).fingerprint == load(file).fingerprint
    assert sorted(path.name for path in folder.iterdir() if not path.is_dir()) == [
        ".b.jsonl.zidx", ".c.jsonl.zidx", "b.jsonl", "c.jsonl", "web.zman",
    ]  # fmt: skip


def test_layout_is_the_documented_one(folder: Path, file: Path) -> None:
    raw = file.read_bytes()
    magic, version, length, crc32 = struct.unpack_from("<8sIII", raw)
    assert (magic, version, crc32) == (b"ZEPHMAN\n", 1, zlib.crc32(raw[20:]))
    header = json.loads(raw[20 : 20 + length])
    assert header == {"format": "jsonl", "options": {}, "num_shards": 4, "beside": ""}
    columns = np.frombuffer(raw[20 + length : 20 + length + 96], "<i8").reshape(3, 4).tolist()
    names = ["a/0.jsonl", "a/1.jsonl", "b.jsonl", "c.jsonl"]
    stamps = [(folder / name).stat().st_mtime_ns for name in names]
    assert columns == [[7, 30, 0, 1], [70, 327, 0, 11], stamps]
    assert raw[20 + length + 96 :] == b"".join(name.encode() + b"\0" for name in names)


def test_root_is_the_folder_of_the_manifest_unless_given(
    folder: Path, file: Path, tmp_path: Path
) -> None:
    ids = [{"id": i} for i in range(38)]
    other = tmp_path / "a b#ü%20.zman"
    file.rename(other)
    assert list(load(other, root=folder)) == ids
    assert list(load(other, root=folder.as_uri())) == ids
    with pytest.raises(DatasetError, match=rf"'{tmp_path}/a/0.jsonl' is gone since"):
        load(other)[0]
    moved = folder.rename(tmp_path / "moved")
    Dataset.from_path("web", moved).save_manifest(str(moved / "web.zman"))
    assert list(load(moved / "web.zman")) == ids


def test_a_changed_file_is_noticed_when_it_is_opened(folder: Path, file: Path) -> None:
    os.utime(folder / "c.jsonl", ns=(5, 5))
    dataset = load(file)
    assert dataset[0] == {"id": 0}
    with pytest.raises(DatasetError, match=r"c.jsonl' changed since the dataset was made: modif"):
        dataset[37]
    (folder / "a/1.jsonl").unlink()
    with pytest.raises(DatasetError, match=r"a/1.jsonl' is gone since the dataset was made"):
        dataset[7]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEPHON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def memory() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def test_over_urls(memory: Any, tmp_path: Path) -> None:
    for name, value in (("a b#ü%20.jsonl", 1), ("z/c.jsonl", 2)):
        memory.pipe_file(f"/d/{name}", f"{value}\n".encode())
    dataset = Dataset.from_path("web", "memory://d")
    dataset.save_manifest("memory://d/web.zman")
    again = Dataset.from_manifest("web", "memory://d/web.zman")
    assert list(again) == [1, 2] and again.fingerprint == dataset.fingerprint
    dataset.save_manifest(tmp_path / "web.zman")
    assert list(load(tmp_path / "web.zman", root="memory://d")) == [1, 2]
    with pytest.raises(DatasetError, match=r"no manifest 'memory://d/other\.zman'"):
        Dataset.from_manifest("web", "memory://d/other.zman")


def test_credentials_stay_out_of_it(memory: Any) -> None:
    memory.pipe_file("/d/a.jsonl", b"1\n")
    dataset = Dataset.from_path("web", "memory://d", storage_options={"token": "SECRET"})
    dataset.save_manifest("memory://d/web.zman", storage_options={"token": "SECRET"})
    raw = memory.cat_file("/d/web.zman")
    assert b"SECRET" not in raw and b"memory" not in raw


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    odd = os.fsdecode(b"\xff\xfe.jsonl")
    (tmp_path / odd).write_text("1\n")
    dataset = Dataset.from_path("web", tmp_path)
    dataset.save_manifest(tmp_path / "web.zman")
    assert [shard.path for shard in load(tmp_path / "web.zman").shards] == [odd]
    assert list(load(tmp_path / "web.zman")) == [1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: b"", "it has only 0 bytes"),
        (lambda raw: b"{}" + raw[2:], "it is not a manifest of this package"),
        (lambda raw: raw[:8] + b"\2" + raw[9:], "its layout has version 2, 1 expected"),
        (lambda raw: raw[:-1], "its checksum does not match, it was cut"),
        (lambda raw: raw[:15] + b"\xff" + raw[16:], r"its header claims [\d,]+ bytes"),
        (lambda raw: raw.replace(b"jsonl", b"jsonx", 1), "its checksum does not match"),
    ],
)
def test_a_damaged_or_foreign_manifest_is_refused(file: Path, damage: Change, message: str) -> None:
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DatasetError, match=rf"manifest '{file}' cannot be used: {message}.*anew"):
        load(file)


def forge(file: Path, paths: bytes, sizes: list[int], **header: Any) -> None:
    """Write a manifest that is sound as a file."""
    plain = {"format": "jsonl", "options": {}, "num_shards": len(sizes), "beside": ""}
    text = json.dumps(plain | header)
    columns = np.array([sizes, [9] * len(sizes), [1] * len(sizes)], "<i8")
    content = text.encode() + columns.tobytes() + paths
    file.write_bytes(
        struct.pack("<8sIII", b"ZEPHMAN\n", 1, len(text), zlib.crc32(content)) + content
    )


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "..", ".", "a/../b", "a/..", "./a", "a//b", "a/", "", "a/./b"]
)
def test_paths_out_of_the_root_are_refused(tmp_path: Path, path: str) -> None:
    for paths in ([path], ["!", path], [path, "~"], ["!", path, "~"]):
        content = "".join(f"{path}\0" for path in paths).encode()
        forge(tmp_path / "x", content, [1] * len(paths))
        with pytest.raises(DatasetError, match=r"its path '[^']*' leads out of the root") as caught:
            load(tmp_path / "x")
        assert f"path {path!r} leads" in str(caught.value)


@pytest.mark.parametrize(
    ("paths", "sizes", "header", "message"),
    [
        (b"a\0b", [1, 1], {}, "it does not hold 2 paths"),
        (b"a\0", [1, 1], {}, "it does not hold 2 paths"),
        (b"b\0a\0", [1, 1], {}, "its paths are not in ascending order"),
        (b"a\0a\0", [1, 1], {}, "its paths are not in ascending order"),
        (b"a\0", [-1], {}, "less than 0"),
        (b"a\0", [1], {"num_shards": 2}, "it does not hold 2 paths|no room"),
        (b"a\0", [1], {"num_shards": 10**12}, "it claims 1,000,000,000,000 shards"),
        (b"a\0", [1], {"num_shards": -1}, "its num_shards is -1: expected an integer >= 0"),
        (b"a\0", [1], {"num_shards": True}, "its num_shards is True: expected an integer"),
        (b"a\0", [1], {"options": None}, "its header cannot be parsed"),
        (b"a\0", [1], {"beside": None}, "its header cannot be parsed"),
        (b"a\0", [1], {"beside": "x"}, "'x' is no file of format|no room"),
        (b"a\0", [1], {"format": "csv"}, "unknown format 'csv'"),
        (b"a\0", [1], {"options": {"depth": 3}}, "format 'jsonl' has no option 'depth'"),
    ],
)
def test_contents_that_cannot_be_are_refused(
    tmp_path: Path, paths: bytes, sizes: list[int], header: dict[str, Any], message: str
) -> None:
    forge(tmp_path / "x", paths, sizes, **header)
    with pytest.raises(ZephonError, match=message):
        load(tmp_path / "x")


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_manifests_never_give_another_dataset(folder: Path, data: st.DataObject) -> None:
    file = folder / "web.zman"
    if not file.exists():
        Dataset.from_path("web", folder).save_manifest(file)
    raw = bytearray(file.read_bytes())
    expected = Dataset.from_path("web", folder).fingerprint
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    mutated = folder / "_mutated"
    for is_forged in (False, True):  # under a checksum that fits, it is at least no other error
        if is_forged and len(raw) >= 20:
            raw[16:20] = struct.pack("<I", zlib.crc32(raw[20:]))
        mutated.write_bytes(raw)
        try:
            found = load(mutated).fingerprint
        except (DatasetError, ConfigurationError):
            continue
        assert is_forged or found == expected


def test_what_has_no_files_of_its_own_has_no_manifest(folder: Path, file: Path) -> None:
    part = load(file).split({"a": 0.5, "b": 0.5})["a"]
    for dataset in (part, Dataset.from_samples("x", [1])):
        with pytest.raises(ConfigurationError, match=rf"{dataset.name}' has no files of its own"):
            dataset.save_manifest(folder / "part.zman")
    assert not (folder / "part.zman").exists()


def test_names_and_paths_are_checked(file: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="name must be a str"):
        Dataset.from_manifest("", file)
    for options in ({"path": 3}, {"path": file, "root": 3}):
        with pytest.raises(ConfigurationError, match="path must be a folder, a file or a pattern"):
            Dataset.from_manifest("web", **options)  # type: ignore[arg-type]
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(DatasetError, match=f"no manifest '{path}'"):
            Dataset.from_manifest("web", path)


def test_a_name_of_data_is_refused_and_a_missing_folder_named(folder: Path, file: Path) -> None:
    dataset = Dataset.from_manifest("web", file)
    for path in (folder / dataset.shards[0].path, folder / "web.tar", "memory://x/web.jsonl.gz"):
        with pytest.raises(ConfigurationError, match="would be taken for data of format"):
            dataset.save_manifest(path)
    assert len(Dataset.from_path("web", folder)) == len(dataset)
    with pytest.raises(FileNotFoundError) as caught:
        dataset.save_manifest(folder / "none" / "web.zman")
    assert caught.value.filename == str(folder / "none" / "web.zman")


def test_options_are_kept(file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Options:
        columns: Any = None
        identity: str | None = None

    monkeypatch.setattr(jsonl, "Options", Options)
    dataset = Dataset.from_path("web", folder, columns=["x", 1], identity="i")
    dataset.save_manifest(file)
    again = load(file)
    assert again.content.options == Options(["x", 1], "i")  # type: ignore[attr-defined]
    assert again.fingerprint == dataset.fingerprint
    for value in ((1, 2), b"x", {1}):
        bad = Dataset.from_path("web", folder, columns=value)
        with pytest.raises(ConfigurationError, match="cannot be kept in a manifest"):
            bad.save_manifest(file)
    assert load(file).fingerprint == dataset.fingerprint


def test_a_failed_write_leaves_the_old_one(
    file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device", target)

    before, names = file.read_bytes(), sorted(os.listdir(folder))
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        load(file).save_manifest(file)
    assert file.read_bytes() == before and sorted(os.listdir(folder)) == names


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))))
def test_paths_are_a_sequence_of_texts(texts: list[str]) -> None:
    paths = Paths.of(texts)
    assert list(paths) == texts == paths[:] and len(paths) == len(texts)
    assert [paths[i] for i in range(-len(texts), len(texts))] == texts * 2
    assert paths.num_bytes.tolist() == [len(text.encode()) for text in texts]
    assert paths == Paths.of(texts) and paths != Paths.of([*texts, ""])
    with pytest.raises(IndexError):
        paths[len(texts)]
    with pytest.raises(ValueError, match="holds a NUL"):
        Paths.of([*texts, "a\0b"])
