"""WebDataset tar shards: the samples that webdataset gives, by number, or an error in words."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
import webdataset
from fsspec.implementations.memory import MemoryFileSystem
from tars import FORMATS, header, special, tar

from zephon_torch import DataLoader
from zephon_torch.errors import ConfigurationError, DatasetError, RecordError
from zephon_torch.io import Dataset
from zephon_torch.io.formats.tar.webdataset import INDEXER
from zephon_torch.io.index import sidecar
from zephon_torch.io.index.index import StaleIndexWarning
from zephon_torch.io.remote.storage import connect
from zephon_torch.io.storage.files import StoredFile

REDS = [10, 200]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEPHON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def memory() -> Iterator[MemoryFileSystem]:
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def write(folder: Path, content: bytes, name: str = "a.tar") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder / name


def stored(path: Path) -> StoredFile:
    storage, name = connect(str(path)).split()
    return StoredFile(storage, *storage.info(name))


def png(red: int) -> bytes:
    image = pytest.importorskip("PIL.Image").new("RGB", (3, 2), (red, 0, 255))
    buffer = io.BytesIO()
    image.save(buffer, "png")
    return buffer.getvalue()


def by_webdataset(path: Path, *decode: Any) -> list[dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "unclosed file", ResourceWarning)  # webdataset's own
        dataset = webdataset.WebDataset(str(path), shardshuffle=False, empty_check=False)
        samples = list(dataset if decode == (False,) else dataset.decode(*decode))
    for sample in samples:
        sample.pop("__local_path__", None)  # the same again, and only of local files
    return samples


def alike(ours: list[Any], theirs: list[Any]) -> bool:
    """Whether samples are the same: keys in order, types and values."""
    return [list(sample) for sample in ours] == [list(sample) for sample in theirs] and all(
        type(sample[key]) is type(other[key]) and is_same(sample[key], other[key])
        for sample, other in zip(ours, theirs, strict=True)
        for key in sample
    )


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray | torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    return bool(a == b)


# --- the same as webdataset ----------------------------------------------------------------------


def test_shards_of_its_writer_are_read_as_by_webdataset(tmp_path: Path) -> None:
    pattern = str(tmp_path / "s-%03d.tar")
    with webdataset.ShardWriter(pattern, maxcount=3, verbose=0) as shards:
        for i in range(8):
            shards.write(
                {
                    "__key__": f"v1.0/part {i}/ö",
                    "cls": i,
                    "json": {"id": [i]},
                    "0.npy": np.full((2, i), i, np.int16),
                    "Txt": "ä",
                    "text.gz": "packed",
                    "pth": torch.arange(i),
                    "pickle": {i},
                    "raw": bytes(i),
                }
            )
    dataset = Dataset.from_path("a", tmp_path, allow_pickle=True)
    assert dataset.shard_num_samples.tolist() == [3, 3, 2]
    theirs = [sample for i in range(3) for sample in by_webdataset(tmp_path / f"s-{i:03d}.tar")]
    assert alike(list(dataset), theirs)
    assert theirs[5]["cls"] == 5 and theirs[5]["text.gz"] == "packed"
    bare = [
        sample for i in range(3) for sample in by_webdataset(tmp_path / f"s-{i:03d}.tar", False)
    ]
    assert alike(list(Dataset.from_path("a", tmp_path, decode=False)), bare)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_tars_of_python_are_read_as_by_webdataset(tmp_path: Path, format: int) -> None:
    long = ("p" * 40 + "/") * (3 if format == tarfile.USTAR_FORMAT else 9) + "x"
    content = tar(
        [
            special("d.e", tarfile.DIRTYPE),
            ("__meta__", b"?"),
            ("__index__/a.json", b"?"),
            ("d.e/a.txt", b"1"),
            ("d.e/a.Seg.PNG.txt", b"2"),
            ("d.e/README", b"?"),
            ("._b.txt", b"?"),
            ("./b.txt", b"3" * 70_000),
            ("./b.cls", b"4"),
            (f"{long}.txt", "ö".encode()),
            (f"{long}.json", b"[]"),
            ("../../x.txt", b""),
            ("é.txt", b"5"),
            ("é.", b"6"),
        ],
        format,
        {"comment": "of all"} if format == tarfile.PAX_FORMAT else None,
    )
    path = write(tmp_path / "data", content)
    for decode in (True, False):
        ours = list(Dataset.from_path("a", path, decode=decode))
        assert alike(ours, by_webdataset(path, *([] if decode else [False])))
    keys = ["d.e/a", "./b", long, "../../x", "é"]
    assert [sample["__key__"] for sample in ours] == keys
    assert sorted(os.listdir(tmp_path)) == ["data"], "a name is only a name"
    assert sorted(os.listdir(tmp_path / "data")) == [".a.tar.zidx", "a.tar"]


def is_gnu_tar_there() -> bool:
    if shutil.which("tar") is None:
        return False
    return "GNU tar" in subprocess.run(["tar", "--version"], capture_output=True, text=True).stdout


@pytest.mark.skipif(not is_gnu_tar_there(), reason="needs GNU tar")
@pytest.mark.parametrize(
    "options",
    [
        ["--format=v7"],
        ["--format=oldgnu"],
        ["--format=gnu"],
        ["--format=ustar"],
        ["--format=posix"],
        ["--format=posix", "--pax-option=globexthdr.name=g,comment=all"],
        ["--format=gnu", "--label=volume", "--blocking-factor=2048"],
    ],
    ids=" ".join,
)
def test_tars_of_the_system_are_read_as_by_webdataset(tmp_path: Path, options: list[str]) -> None:
    folder = tmp_path / "in" / "d.e"
    folder.mkdir(parents=True)
    long = "n" * (60 if {"--format=v7", "--format=ustar"} & set(options) else 240)
    for i in range(5):
        (folder / f"{long}{i}.txt").write_text(f"{i}" * 300 * i)
        (folder / f"{long}{i}.x.cls").write_text(f"{i}")
    path = tmp_path / "a.tar"
    command = ["tar", "-cf", path, *options, "--sort=name", "-C", tmp_path / "in", "."]
    subprocess.run(command, check=True)
    ours = list(Dataset.from_path("a", path))
    assert alike(ours, by_webdataset(path))
    assert [sample["x.cls"] for sample in ours] == list(range(5))
    assert ours[0]["__key__"] == f"./d.e/{long}0"


# --- decoding ------------------------------------------------------------------------------------


def backwards(extension: str, content: bytes) -> bytes | None:
    return content[::-1] if extension == ".b" else None


@pytest.mark.parametrize(
    ("decode", "theirs"),
    [
        (True, []),
        ([], []),
        ("rgb8", ["rgb8"]),
        ("torchrgb", ["torchrgb"]),
        ("l", ["l"]),
        (backwards, [backwards]),
        ((webdataset.handle_extension("cls", bytes.hex), "pill"), None),
    ],
)
def test_decode_takes_what_webdataset_takes(tmp_path: Path, decode: Any, theirs: Any) -> None:
    members = [
        (f"{i}.{extension}", content)
        for i, red in enumerate(REDS)
        for extension, content in [
            ("b", b"xyz"),
            ("cls", b"7"),
            ("png", png(red)),
            ("mask.PNG", png(red)),
            ("__note__", "ö".encode()),
            ("__raw__", b"\xff"),
        ]
    ]
    path = write(tmp_path, tar(members))
    ours = list(Dataset.from_path("a", path, decode=decode))
    expected = by_webdataset(path, *(decode if theirs is None else theirs))
    assert alike(ours, expected)
    assert ours[0]["__note__"] == "ö" and ours[0]["__raw__"] == b"\xff"


def test_images_as_tensors_make_batches(tmp_path: Path) -> None:
    members = [(f"{i}.png", png(red)) for i, red in enumerate(REDS)]
    dataset = Dataset.from_path("a", write(tmp_path, tar(members)), decode="torchrgb8")
    with DataLoader(dataset, batch_size=2) as loader:
        (batch,) = loader
    assert batch["png"].shape == (2, 3, 2, 3)
    assert batch["png"][:, 0, 0, 0].tolist() == REDS
    assert batch["__key__"] == ["0", "1"]


@pytest.mark.parametrize("decode", [None, 3, "nothing", b"rgb8", [True], ["rgb8", 5], {}])
def test_decode_of_another_kind_is_refused(tmp_path: Path, decode: Any) -> None:
    path = write(tmp_path, tar([("a.x", b"")]))
    with pytest.raises(ConfigurationError, match=r"decode|no image decoder 'nothing'"):
        Dataset.from_path("a", path, decode=decode)


def test_without_pillow_images_are_refused_when_the_dataset_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, tar([("a.x", b"")]))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ConfigurationError, match=r"needs PIL.*'zephon-torch\[images\]'"):
        Dataset.from_path("a", path, decode="pil")


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_decoder_without_its_package_is_no_bad_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_error: Any
) -> None:
    path = write(tmp_path, tar([("a.id", b"0"), ("b.mp", b""), ("c.id", b"2")]))
    dataset = Dataset.from_path("a", path)
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with (
        DataLoader(dataset, batch_size=3, on_error=on_error, num_threads=0) as loader,
        pytest.raises(ConfigurationError, match=r"decoding 'mp' in dataset 'a'.* needs a package"),
    ):
        next(iter(loader))


def out(extension: str, content: bytes) -> bytes | None:
    if extension == ".out":
        raise StopIteration
    return None


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        (("b.x.json", b"{"), "'x.json' cannot be decoded: JSONDecodeError: Expecting"),
        (("b.json", b"[" * 100_000), "'json' cannot be decoded: RecursionError"),
        (("b.txt", b"\xff"), "'txt' cannot be decoded: UnicodeDecodeError"),
        (("b.cls", b"one"), "'cls' cannot be decoded: ValueError: invalid literal"),
        (("b.npy", b"NUMPY"), "'npy' cannot be decoded: ValueError"),
        (("b.txt.gz", b"packed"), "'txt.gz' cannot be decoded: BadGzipFile"),
        (("b.png", b"\x89PNG"), "'png' cannot be decoded: UnidentifiedImageError"),
        (("b.out", b""), "'out' cannot be decoded: StopIteration"),
    ],
)
def test_a_bad_content_is_named_and_can_be_passed_over(
    tmp_path: Path, member: tuple[str, bytes], reason: str
) -> None:
    pytest.importorskip("PIL")
    members = [(f"{key}.id", b"%d" % i) for i, key in enumerate("abcd")]
    members.insert(2, member)
    path = write(tmp_path, tar(members))
    dataset = Dataset.from_path("web", path, decode=[out, "rgb"])
    place = f"dataset 'web', file '{path}', record 1 \\(key 'b'\\): {reason}"
    with pytest.raises(RecordError, match=place):
        dataset[1]
    with DataLoader(dataset, batch_size=2, on_error="skip") as loader:
        assert [i for batch in loader for i in batch["id"].tolist()] == [0, 2, 3]


# --- tars that cannot be -------------------------------------------------------------------------


def test_equal_keys_in_different_tars_are_different_samples(tmp_path: Path) -> None:
    write(tmp_path, tar([("a.txt", b"1"), ("b.txt", b"2")]), "0.tar")
    write(tmp_path, tar([("b.cls", b"3"), ("b.txt", b"4")]), "1.tar")
    samples = [dict(sample) for sample in Dataset.from_path("a", tmp_path)]
    for sample in samples:
        sample["__url__"] = Path(sample["__url__"]).name
    assert samples == [
        {"__key__": "a", "__url__": "0.tar", "txt": "1"},
        {"__key__": "b", "__url__": "0.tar", "txt": "2"},
        {"__key__": "b", "__url__": "1.tar", "cls": 3, "txt": "4"},
    ]


GOOD = tar([("a.txt", b"1" * 2000), ("b.txt", b"2")])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (GOOD[:2000], "was truncated"),
        (tar([("a.x", b"1"), ("a.x", b"2")]), "member 'a.x' is the second of its sample"),
        (tar([("a.x", b"1"), ("b.x", b"2"), ("a.y", b"3")]), "member 'a.y' has a key that came"),
        (GOOD[:2560] + b"?" + GOOD[2561:], "2,560: no sound header"),
        (GOOD + GOOD, "the archive ends, but data follows"),
    ],
)
def test_a_broken_tar_is_named_and_leaves_no_index(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    write(tmp_path / "data", GOOD, "0.tar")
    path = write(tmp_path / "data", content, "1.tar")
    with pytest.raises(DatasetError, match=f"'{path}', at byte .*{reason}"):
        Dataset.from_path("a", tmp_path / "data")
    assert sorted(os.listdir(tmp_path / "data")) == [".0.tar.zidx", "0.tar", "1.tar"]


@pytest.mark.parametrize("name", ["a.tar.gz", "a.tgz", "a.TGZ", "a.tar.zst", "a.tar.bz2", "a.txz"])
def test_compressed_tars_are_refused(tmp_path: Path, name: str) -> None:
    write(tmp_path, GOOD)
    path = write(tmp_path, b"", name)
    for given in (tmp_path, path, tmp_path / "a*"):
        with pytest.raises(DatasetError, match=f"{name}' is compressed in a way that is not"):
            Dataset.from_path("a", given)


def test_a_file_that_changes_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    dataset = Dataset.from_path("a", path)
    with closing(dataset.open(0)) as reader:
        before = path.stat().st_mtime_ns
        changed = tar([("a.txt", b"1" * 1000), ("c.txt", b"3" * 1000)])
        with path.open("r+b") as file:
            file.write(changed[:4096])
        with pytest.raises(DatasetError, match="index does not fit the file, record 1, at byte"):
            reader.read(np.array([1]))
        os.truncate(path, 2048)
        with pytest.raises(DatasetError, match="was cut short"):
            reader.read(np.array([0]))
    with pytest.raises(DatasetError, match="changed since the dataset was made"):
        dataset.open(0)
    path.write_bytes(GOOD)
    os.utime(path, ns=(before + 5, before + 5))
    with pytest.raises(DatasetError, match="modified at"):
        dataset.open(0)


@pytest.mark.parametrize(
    "offsets", [[0, 2560, 3584], [0, 512, 10240], [512, 2560, 10240], [0, 3584, 10240], [0, 10240]]
)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, offsets: list[int]) -> None:
    path = write(tmp_path, GOOD)
    beside = path.with_name(".a.tar.zidx")
    dataset = Dataset.from_path("a", path)
    header = sidecar.read_header(str(beside), origin := INDEXER.origin(stored(path)))
    assert header.num_samples == 2
    array = np.array(offsets, np.int64)
    beside.write_bytes(sidecar.encode_header(origin, sidecar.Index(array)) + array.tobytes())
    if offsets[-1] != len(GOOD):
        with pytest.warns(StaleIndexWarning):
            assert len(list(dataset)) == 2
        return
    with pytest.raises(DatasetError, match=r"does not fit the file|holds 1 records, 2 when"):
        list(dataset)


def test_a_member_of_many_gigabytes_is_skipped_not_read(tmp_path: Path) -> None:
    size = 9 << 30
    path = tmp_path / "a.tar"
    with path.open("wb") as file:
        file.write(header(b"a.bin", size=b"\x80" + size.to_bytes(11), magic=b"ustar  \0"))
        file.seek(size, os.SEEK_CUR)
        file.write(tar([("b.txt", b"here")]))
    dataset = Dataset.from_path("a", path)
    assert [len(dataset), dataset[1]["txt"]] == [2, "here"]


# --- far away ------------------------------------------------------------------------------------


def test_remote_samples_equal_local_ones(memory: MemoryFileSystem, tmp_path: Path) -> None:
    name = "a b#1 ü%41.tar"
    members = [(f"{i}.{x}", x.encode() * i * 99) for i in range(30) for x in ("txt", "bin")]
    content = tar(members)
    local = write(tmp_path / "d%20 #ü", content, name)
    memory.pipe(f"/d/{name}", content)
    order = np.random.default_rng(0).integers(0, 30, 50)
    both = []
    for root in ("memory://d", local.parent):
        with closing(Dataset.from_path("a", root).open(0)) as reader:
            both.append(reader.read(order))
    assert [sample.pop("__url__") for sample in both[0]] == [f"memory://d/{name}"] * 50
    assert [sample.pop("__url__") for sample in both[1]] == [str(local)] * 50
    assert both[0] == both[1]
    assert [int(sample["__key__"]) for sample in both[0]] == order.tolist()


def test_credentials_are_in_no_sample_and_no_message(memory: MemoryFileSystem) -> None:
    memory.pipe("/user:secret@host/a.tar", tar([("a.txt", b"1"), ("b.txt", b"\xff")]))
    dataset = Dataset.from_path("a", "memory://user:secret@host/a.tar")
    assert dataset[0]["__url__"] == "memory://host/a.tar"
    with pytest.raises(RecordError) as raised:
        dataset[1]
    assert "secret" not in "".join(traceback.format_exception(raised.value))


def test_a_remote_tar_is_indexed_in_few_requests(
    memory: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = tar([(f"{i}.bin", bytes(100_000)) for i in range(200)])
    memory.pipe("/a.tar", content)
    asked: list[tuple[int, int]] = []
    cat_file = MemoryFileSystem.cat_file

    def counting(self: Any, path: str, start: int, end: int, **options: Any) -> bytes:
        asked.append((start, end))
        return cat_file(self, path, start, end, **options)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counting)
    assert len(Dataset.from_path("a", "memory://a.tar")) == 200
    assert len(asked) == 3
    assert sum(end - start for start, end in asked) <= len(content) + 512
