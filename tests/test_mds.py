"""MDS folders: every encoding, compressed shards, and indexes that do not fit their folder."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import shutil
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from format_files import mds_folder, mds_shard
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon_torch import DataLoader
from zephon_torch.errors import ConfigurationError, DatasetError, RecordError, ZephonError
from zephon_torch.io import Dataset
from zephon_torch.io.codecs import unpacked
from zephon_torch.io.formats.mds.columns import decoder_of
from zephon_torch.support.lru import Recent

GOLDEN = Path(__file__).parent / "data" / "mds"
COLUMNS = {"id": ("int", 8), "text": ("str", None)}


def record(i: int) -> dict[str, bytes]:
    return {"id": struct.pack("<q", i), "text": b"x" * i}


SHARDS = [[record(i) for i in range(4)], [record(i) for i in range(4, 6)]]
SAMPLES = [{"id": i, "text": "x" * i} for i in range(6)]


def folder_of(folder: Path, codecs: Sequence[str | None] = ()) -> Path:
    mds_folder(folder, SHARDS, COLUMNS, codecs)
    return folder


def dataset_of(folder: Path, codecs: Sequence[str | None] = (), **options: Any) -> Dataset:
    return Dataset.from_path("web", folder_of(folder, codecs), **options)


def one_value(folder: Path, encoding: str, value: bytes, size: int | None = None) -> Any:
    """A value through a file of one record."""
    mds_folder(folder, [[{"x": value}]], {"x": (encoding, size)})
    return Dataset.from_path("web", folder)[0]["x"]


def change_index(folder: Path, change: Callable[[Any], object]) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def set_packed_size(folder: Path, num_bytes: int) -> None:
    change_index(folder, lambda i: i["shards"][0]["zip_data"].update(bytes=num_bytes))


# --- what Streaming wrote ------------------------------------------------------------------------


@pytest.fixture
def golden(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN, tmp_path / "ü %20 #1?"))


def test_every_encoding_that_streaming_wrote_is_read(golden: Path) -> None:
    """``data/mds`` was made by ``data/make_mds.py``; its folders come in order of their names."""
    pytest.importorskip("zstandard")
    pytest.importorskip("PIL")
    dataset = Dataset.from_path("a", golden)
    assert dataset.shard_num_samples.tolist() == [2, 4, 3, 3, 3]
    samples = list(dataset)
    assert [sample["int"] for sample in samples] == [13, 14, *range(13)]
    for sample in samples:
        check_golden(sample, sample["int"])


def check_golden(sample: dict[str, Any], i: int) -> None:
    numbers = [name for name in sample if name.startswith(("int", "uint", "float"))]
    assert len(numbers) == 12
    for name in numbers:
        assert sample[name] == i and type(sample[name]) is (float if name[0] == "f" else int)
    assert sample["bytes"] == bytes(range(i)) and sample["str"] == f"sämple {i}" * (i % 2)
    assert sample["json"] == {"id": [i, None, "ö"]}
    assert (sample["str_int"], sample["str_float"]) == (i * 10**30, i / 7)
    assert sample["str_decimal"] == Decimal(i) / 8 and isinstance(sample["str_decimal"], Decimal)
    for name, dtype, expected in (
        ("any", ["int8", "float16", "int64"][i % 3], np.arange(i + 1)),
        ("typed", "uint16", np.full((i % 3 + 1, 300), i)),
        ("shaped", "float32", np.full((2, 3), i / 2)),
    ):
        assert sample[name].dtype == dtype and sample[name].tolist() == expected.tolist()
        sample[name][:] = 0  # in memory of its own
    for name in ("png", "pil"):
        assert (sample[name].size, sample[name].mode) == ((2, 3), "RGB")
        assert sample[name].tobytes() == bytes([i, 10 * i, 100]) * 6
    assert np.abs(np.asarray(sample["jpeg"], int) - [i, 10 * i, 100]).max() < 8


def test_streaming_reads_what_we_read(golden: Path, tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming.base.format.mds.reader")
    ours = Dataset.from_path("a", golden / "plain")
    index = json.loads((golden / "plain" / "index.json").read_text())
    theirs = [
        sample
        for shard in index["shards"]
        for sample in streaming.MDSReader.from_json(str(golden / "plain"), None, shard)
    ]
    assert len(ours) == len(theirs) == 7
    for our, their in zip(ours, theirs, strict=True):
        assert our.keys() == their.keys()
        for name, value in our.items():
            assert np.array_equal(np.asarray(value), np.asarray(their[name])), name


def test_a_subfolder_with_an_index_of_its_own_is_a_dataset(golden: Path) -> None:
    plain = Dataset.from_path("a", golden / "plain")
    assert [sample["int"] for sample in plain] == list(range(7))


# --- values --------------------------------------------------------------------------------------


def array_bytes(dtype: str, *shape: int) -> bytes:
    return np.arange(np.prod(shape)).astype(dtype).tobytes()


@pytest.mark.parametrize(
    ("encoding", "value", "expected"),
    [
        ("ndarray", b"\x10\x05\x02\x00" + array_bytes("<u2", 2), np.arange(2, dtype="u2")),
        ("ndarray", b"\x09\x08\x02\x03" + array_bytes("i1", 6), np.arange(6).reshape(2, 3)),
        ("ndarray:float64", b"\x06\x02\x00\x00\x00" + array_bytes("<f8", 2), np.arange(2.0)),
        ("ndarray:int32", b"\x04\x00", np.empty(0)),
        ("ndarray:int64:3,1", array_bytes("<i8", 3), np.arange(3).reshape(3, 1)),
        ("uint64", b"\xff" * 8, 2**64 - 1),
        ("float16", b"\x00\x3c", 1.0),
        ("str_int", b"-12", -12),
        ("str", b"", ""),
        ("bytes", b"\xff", b"\xff"),
    ],
)
def test_values_are_what_their_encoding_says(
    tmp_path: Path, encoding: str, value: bytes, expected: Any
) -> None:
    found = one_value(tmp_path, encoding, value)
    assert np.array_equal(found, expected) and np.shape(found) == np.shape(expected)


@pytest.mark.parametrize(
    ("encoding", "value", "reason"),
    [
        ("int", b"1234567", "requires a buffer of 8 bytes"),
        ("float16", b"123", "requires a buffer of 2 bytes"),
        ("str", b"\xff", "can't decode byte 0xff"),
        ("json", b"{", "Expecting"),
        ("json", b"[" * 100_000, "recursion"),
        ("str_int", b"one", "invalid literal"),
        ("str_float", b"one", "could not convert"),
        ("str_decimal", b"one", "ConversionSyntax"),
        ("ndarray", b"", "no type of values has the code none"),
        ("ndarray", b"\x07\x04\x01\x00", "no type of values has the code 07"),
        ("ndarray", b"\x08", "ends within its shape"),
        ("ndarray", b"\x08\xff\x01", "ends within its shape"),
        ("ndarray", b"\x08\x04\x02\x00", r"1 bytes of values, 2 for shape \(2,\) of uint8"),
        ("ndarray", b"\x08\x0b" + b"\xff" * 16, "0 bytes of values, [0-9]{3}"),
        ("ndarray:int32:2", b"1234", r"4 bytes of values, 8 for shape \(2,\)"),
        ("jpeg", b"\xff\xd8\xff not one", "cannot identify image"),
        ("png", b"", "cannot identify image"),
        ("pil", b"\xff" * 8 + b"\x01\x00\x00\x00L", "0 bytes for 4294967295 x 4294967295"),
        ("pil", b"1", "requires a buffer of at least 12"),
    ],
)
def test_a_value_that_is_none_is_an_error_that_names_the_record(
    tmp_path: Path, encoding: str, value: bytes, reason: str
) -> None:
    if encoding in ("jpeg", "png", "pil"):
        pytest.importorskip("PIL")
    place = r"'web', file '.*shard.00000.mds', record 0: column 'x' cannot be decoded: .*"
    with pytest.raises(RecordError, match=place + reason):
        one_value(tmp_path, encoding, value)


def test_images_of_unknown_kinds_and_cut_short_are_errors_where_they_are_read(
    tmp_path: Path,
) -> None:
    library = pytest.importorskip("PIL.Image")
    kinds = {}
    for kind in ("PNG", "WEBP", "PPM"):
        stream = io.BytesIO()
        library.new("RGB", (50, 50), (1, 2, 3)).save(stream, kind)
        kinds[kind] = stream.getvalue()
    assert one_value(tmp_path, "jpeg:90", kinds["PNG"]).getpixel((0, 0)) == (1, 2, 3)
    for value in (kinds["PPM"], kinds["PNG"][:-30]):
        with pytest.raises(RecordError, match="record 0: column 'x' cannot be decoded"):
            one_value(tmp_path, "png", value)


class Trap:
    """Raises if it is ever unpickled."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('unpickled')",))


@pytest.mark.parametrize(
    ("encoding", "reason"),
    [
        ("pkl", "encoding 'pkl' holds pickles; loading a pickle runs .*give allow_pickle=True"),
        ("complex64", "encoding 'complex64' is not read"),
        ("int:4", "encoding 'int:4' is not read"),
        ("ndarray:complex64", "none of the arrays that MDS knows"),
        ("ndarray:int8:0", "none of the arrays that MDS knows"),
        ("ndarray:int8:x", "none of the arrays that MDS knows"),
        ("", "encoding '' is not read"),
    ],
)
def test_encodings_that_are_not_read_are_refused_when_the_dataset_is_made(
    tmp_path: Path, encoding: str, reason: str
) -> None:
    with pytest.raises(DatasetError, match=f"shard.00000.mds', column 'x': .*{reason}"):
        one_value(tmp_path, encoding, pickle.dumps(Trap()))


def packed(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)  # the same names of tests in every process


# --- compressed shards ---------------------------------------------------------------------------


def test_compressed_shards_are_unpacked_and_the_last_ones_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = dataset_of(tmp_path, ["gz", "gz"])
    assert list(dataset) == SAMPLES
    monkeypatch.setattr(unpacked, "_kept", Recent())
    opened: list[str] = []
    open_codec = unpacked._open_codec
    monkeypatch.setattr(
        unpacked, "_open_codec", lambda *args: opened.append(args[0]) or open_codec(*args)
    )
    for _ in range(3):
        assert [dataset[i]["id"] for i in (0, 5, 1)] == [0, 5, 1]
    assert opened == ["gz", "gz"]
    monkeypatch.setattr(unpacked, "_kept", Recent())
    small = Dataset.from_path("a", tmp_path, keep_bytes=0)
    assert [small[i]["id"] for i in (0, 1, 5, 4, 0)] == [0, 1, 5, 4, 0]
    assert opened == ["gz"] * (2 + 3)  # the one read last is kept


def test_a_shard_that_is_there_as_it_is_is_preferred(tmp_path: Path) -> None:
    folder_of(tmp_path, ["gz"])
    shard = tmp_path / "shard.00000.mds"
    shard.write_bytes(gzip.decompress((tmp_path / "shard.00000.mds.gz").read_bytes()))
    dataset = Dataset.from_path("a", tmp_path)
    assert [s.path for s in dataset.shards] == ["shard.00000.mds", "shard.00001.mds"]
    assert list(dataset) == SAMPLES


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", r"unpacks to 0 bytes, 126 expected"),
        (b"not gzip", r"cannot be unpacked \(gz\): Not a gzipped file"),
        (packed(b"x" * 126)[:-9], r"cannot be unpacked \(gz\): Compressed file ended"),
        (packed(b"x" * 126)[:-1] + b"9", r"cannot be unpacked \(gz\)"),
        (packed(b"x" * 125), "unpacks to 125 bytes, 126 expected"),
        (packed(b"x" * 10**7), "unpacks to 127 bytes or more, 126 expected"),
        (packed(b"x" * 126), "it holds 2,021,161,080 records, not the 4 that index.json"),
    ],
)
def test_a_compressed_shard_that_is_damaged_is_named(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    folder_of(tmp_path, ["gz"])
    (tmp_path / "shard.00000.mds.gz").write_bytes(content)
    set_packed_size(tmp_path, len(content))
    change_index(tmp_path, lambda i: i["shards"][0]["raw_data"].update(bytes=126))
    dataset = Dataset.from_path("a", tmp_path)
    with pytest.raises(DatasetError, match=f"shard.00000.mds.gz'.* {reason}"):
        dataset.open(0)


def test_zstd_is_read_in_any_number_of_frames_and_refused_if_damaged(tmp_path: Path) -> None:
    library = pytest.importorskip("zstandard")
    folder_of(tmp_path, ["zstd:9"])
    shard, path = mds_shard(SHARDS[0], COLUMNS), tmp_path / "shard.00000.mds.zstd:9"
    whole = library.compress(shard)
    for content, reason in [
        (whole, None),
        (library.compress(shard[:50]) + library.compress(shard[50:]), None),
        (whole[:-5], "unpacks to|cannot be unpacked"),
        (b"not zstd", r"cannot be unpacked \(zstd\)"),
        (library.compress(b"x" * 10**7), "unpacks to .* or more"),
    ]:
        path.write_bytes(content)
        set_packed_size(tmp_path, len(content))
        dataset = Dataset.from_path("a", tmp_path)
        if reason is None:
            assert list(dataset) == SAMPLES
        else:
            with pytest.raises(DatasetError, match=reason):
                dataset.open(0)


@pytest.mark.parametrize("codec", ["bz2", "br:11", "snappy"])
def test_other_codecs_are_refused_in_words(tmp_path: Path, codec: str) -> None:
    name = codec.partition(":")[0]
    with pytest.raises(DatasetError, match=f"is compressed with '{name}', which is not read"):
        dataset_of(tmp_path, [codec])


def test_missing_packages_are_named_with_their_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("zstandard", "PIL", "PIL.Image"):
        monkeypatch.setitem(sys.modules, package, None)
    decoder_of.cache_clear()
    with pytest.raises(ConfigurationError, match=r"needs zstandard.*zephon-torch\[zstd\]"):
        dataset_of(tmp_path, ["zstd"])
    with pytest.raises(ConfigurationError, match=r"'jpeg:90' needs PIL.*zephon-torch\[images\]"):
        one_value(tmp_path / "images", "jpeg:90", b"")


@pytest.mark.parametrize("keep_bytes", [-1, 1.5, True, "1"])
def test_keep_bytes_must_be_a_number_of_bytes(tmp_path: Path, keep_bytes: Any) -> None:
    with pytest.raises(ConfigurationError, match="keep_bytes must be 0 or more"):
        dataset_of(tmp_path, keep_bytes=keep_bytes)


# --- the index and the folder --------------------------------------------------------------------


def of_shard(change: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda index: change(index["shards"][0])


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "missing": (
        of_shard(lambda s: s["raw_data"].update(basename="x.mds")),
        "lists 'x.mds', which is not there",
    ),
    "size": (of_shard(lambda s: s["raw_data"].update(bytes=999)), "has 80 bytes, 999 by '.*index"),
    "fewer shards": (
        lambda i: i["shards"].pop(),
        "shard.00001.mds' is not listed in '.*index.json",
    ),
    "twice": (lambda i: i["shards"].append(i["shards"][0]), "lists 'shard.00000.mds' twice"),
    "up": (of_shard(lambda s: s["raw_data"].update(basename="../x.mds")), r"in '../x.mds', which"),
    "root": (of_shard(lambda s: s["raw_data"].update(basename="/x.mds")), r"in '/x.mds', which is"),
    "odd": (of_shard(lambda s: s["raw_data"].update(basename="a/../x.mds")), "is no plain path"),
    "empty": (
        of_shard(lambda s: s["raw_data"].update(basename="")),
        "in '', which is no plain path",
    ),
    "samples": (
        of_shard(lambda s: s.update(samples=-1)),
        "shard 0: samples is -1: expected an integer >= 0",
    ),
    "true": (
        of_shard(lambda s: s.update(samples=True)),
        "shard 0: samples is True: expected an integer",
    ),
    "many": (of_shard(lambda s: s.update(samples=10**9)), "80 bytes, too few for 1,000,"),
    "large": (
        of_shard(lambda s: s["raw_data"].update(bytes=2**32)),
        "raw_data: bytes is 4294967296: expected .* <= 4294967295",
    ),
    "no bytes": (
        of_shard(lambda s: s["raw_data"].pop("bytes")),
        "raw_data: bytes is None: expected an integer",
    ),
    "no file": (of_shard(lambda s: s.pop("raw_data")), "shard 0 has raw_data None, dict expected"),
    "columns": (of_shard(lambda s: s["column_names"].pop()), r"shard 0 has columns \['id'\], enc"),
    "twins": (of_shard(lambda s: s.update(column_names=["id"] * 2)), r"columns \['id', 'id'\]"),
    "column": (of_shard(lambda s: s.update(column_sizes=[-1, None])), "\\('id', 'int', -1\\)"),
    "csv": (of_shard(lambda s: s.update(format="csv")), "Streaming's format 'csv', only 'mds'"),
    "version": (of_shard(lambda s: s.update(version=3)), "shard 0 has version 3, 2 expected"),
    "layout": (lambda i: i.update(version=1), "has version 1 of the MDS layout"),
    "none": (lambda i: i.update(shards=[]), "lists no shards"),
    "list": (lambda i: i.update(shards=[[]]), "shard 0 is list, not an object"),
    "litdata": (lambda i: i.update(shards=0, chunks=[], config={}), "seems to be litData's"),
    "wids": (lambda i: i.update(shards=0, shardlist=[]), r"webdataset's .*format="),
    "other": (lambda i: i.pop("shards"), r"it has the keys \['version'\]: .*with format="),
}


@pytest.mark.parametrize(("change", "reason"), CHANGES.values(), ids=CHANGES)
def test_an_index_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, change: Callable[[Any], object], reason: str
) -> None:
    folder_of(tmp_path)
    change_index(tmp_path, change)
    with pytest.raises(DatasetError, match=f"{tmp_path}/.*{reason}"):
        Dataset.from_path("a", tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"[1, 2]", b"{", b"[" * 100_000, b"\xff\xfe", b"9" * 9999]
)
def test_an_index_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    folder_of(tmp_path)
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(DatasetError, match=r"index.json' is not (valid JSON|an index of MDS)"):
        Dataset.from_path("a", tmp_path)


def test_a_strange_index_makes_no_folder_one_of_mds(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"a": 1}')
    (tmp_path / "x.jsonl").write_text('{"id": 1}\n')
    assert list(Dataset.from_path("a", tmp_path)) == [{"id": 1}]
    (tmp_path / "x.jsonl").rename(tmp_path / "x.mds")
    with pytest.raises(DatasetError, match=r"it has the keys \['a'\]: .*name their format"):
        Dataset.from_path("a", tmp_path)


@pytest.mark.parametrize("samples", [3, 5])
def test_an_index_of_fewer_or_more_records_is_noticed_when_the_shard_is_opened(
    tmp_path: Path, samples: int
) -> None:
    folder_of(tmp_path)
    change_index(tmp_path, of_shard(lambda s: s.update(samples=samples)))
    dataset = Dataset.from_path("web", tmp_path)
    message = f"'web', file '.*shard.00000.mds': it holds 4 records, not the {samples} that index"
    with pytest.raises(DatasetError, match=message):
        dataset.open(0)


def test_an_index_is_read_anew_for_each_dataset_even_if_it_looks_the_same(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path)
    path = tmp_path / "index.json"
    before = path.stat()
    path.write_text(path.read_text().replace('"samples": 4', '"samples": 3'))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    assert (len(dataset), len(Dataset.from_path("a", tmp_path))) == (6, 5)


def test_a_shard_beside_those_of_the_index_is_named(tmp_path: Path) -> None:
    folder_of(tmp_path / "ok")
    for name in ("shard.00002.mds", "sub/shard.00000.mds.zstd"):
        extra = tmp_path / "ok" / name
        extra.parent.mkdir(exist_ok=True)
        extra.write_bytes(b"")
        with pytest.raises(DatasetError, match=f"{name}' is not listed in"):
            Dataset.from_path("a", tmp_path / "ok")
        extra.unlink()
    assert list(Dataset.from_path("a", tmp_path / "ok")) == SAMPLES


def test_shards_without_their_index_are_refused_with_what_to_do(tmp_path: Path) -> None:
    folder_of(tmp_path / "in")
    for path in (tmp_path, tmp_path / "in" / "shard.00000.mds", tmp_path / "in" / "*.mds"):
        with pytest.raises(DatasetError, match=r"shard.0000\d.mds' is read through the index.json"):
            Dataset.from_path("a", path)


@pytest.mark.parametrize("name", ["index.json", "shard.00000.mds"])
def test_a_change_after_the_dataset_was_made_is_noticed(tmp_path: Path, name: str) -> None:
    dataset = dataset_of(tmp_path)
    os.utime(tmp_path / name, ns=(5, 5))
    with pytest.raises(DatasetError, match=f"{name}' changed since the dataset was made"):
        dataset.open(0)


@pytest.mark.parametrize(
    ("at", "number", "reason"),
    [
        (0, 5, "it holds 5 records"),
        (4, 1, "its records do not end where it ends"),
        (12, 1, "its records do not end where it ends"),
        (20, 1, "its records do not end where it ends"),
        (20, 79, "its records do not end where it ends"),
        (20, 81, "its records do not end where it ends"),
    ],
)
def test_a_shard_with_a_damaged_head_is_refused(
    tmp_path: Path, at: int, number: int, reason: str
) -> None:
    dataset = dataset_of(tmp_path)
    path = tmp_path / "shard.00000.mds"
    before, content = path.stat(), bytearray(path.read_bytes())
    content[at : at + 4] = struct.pack("<I", number)
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DatasetError, match=reason):
        dataset.open(0)


def test_a_record_that_does_not_fit_its_columns_is_named_and_skipped(tmp_path: Path) -> None:
    shards = [[record(i) for i in range(5)]]
    mds_folder(tmp_path, shards, COLUMNS)
    path = tmp_path / "shard.00000.mds"
    content = bytearray(path.read_bytes())
    start = struct.unpack_from("<I", content, 4 + 4 * 2)[0]
    dataset = Dataset.from_path("web", tmp_path)
    before = path.stat()
    for length, reason in (
        (3, "column 'text' reaches to byte 15 of 14"),
        (1, "14 bytes, its colu"),
    ):
        content[start : start + 4] = struct.pack("<I", length)
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(RecordError, match=f"shard.00000.mds', record 2: .*{reason}"):
            dataset[2]
    with DataLoader(dataset, batch_size=5, on_error="skip", num_threads=0) as loader:
        assert [batch["id"].tolist() for batch in loader] == [[0, 1, 3, 4]]
        assert "record 2" in str(loader.stats.bad)


def test_remote_folders_are_read_like_local_ones(tmp_path: Path) -> None:
    folder_of(tmp_path, ["gz"])
    filesystem = fsspec.filesystem("memory")
    for path in tmp_path.iterdir():
        filesystem.pipe_file(f"/mds/ö %20#/{path.name}", path.read_bytes())
    dataset = Dataset.from_path("a", "memory://mds/ö %20#")
    assert list(dataset) == SAMPLES
    with closing(dataset.open(1)) as reader:
        assert reader.read(np.array([1, 0, 1])) == [SAMPLES[i] for i in (5, 4, 5)]
    filesystem.rm("/mds", recursive=True)


WHOLE = mds_shard(SHARDS[0], COLUMNS)


@settings(max_examples=60)
@given(
    flips=st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), max_size=3),
    in_index=st.none() | st.tuples(st.integers(0, 590), st.integers(32, 126)),
)
def test_damaged_shards_and_indexes_give_records_or_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, flips: Any, in_index: Any
) -> None:
    folder = folder_of(tmp_path_factory.mktemp("fuzz"))
    content = bytearray(WHOLE)
    for at, value in flips:
        content[at] = value
    (folder / "shard.00000.mds").write_bytes(content)
    if in_index is not None:
        index = bytearray((folder / "index.json").read_bytes())
        index[in_index[0]] = in_index[1]
        (folder / "index.json").write_bytes(index)
    try:
        samples = list(Dataset.from_path("a", folder))
    except ZephonError:
        return
    if not flips and in_index is None:
        assert samples == SAMPLES
    assert len(samples) == 6 and all(len(sample) == 2 for sample in samples)
