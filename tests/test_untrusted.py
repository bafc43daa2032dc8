"""Data from anywhere: reading it runs no code of whoever made it, starts nothing, ends always."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from format_files import mds_folder
from tars import tar

from zephon_torch import DataLoader
from zephon_torch.audit.cli import main
from zephon_torch.errors import ConfigurationError, DatasetError, RecordError
from zephon_torch.io import Dataset
from zephon_torch.io.formats.tar import decoding as tar_decoding

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEPHON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """A folder that is there once a trap was unpickled."""
    return tmp_path / "unpickled"


class Trap:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return (os.mkdir, (self.mark,))


def tar_of(folder: Path, *members: tuple[str, bytes], name: str = "data.tar") -> Path:
    path = folder / name
    path.write_bytes(tar(members))
    return path


def by_torch(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def by_numpy(value: object) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.array([value], object), allow_pickle=True)
    return buffer.getvalue()


def zipped(value: object) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=True, first=np.arange(2), second=np.array([value], object))
    return buffer.getvalue()


def squeezed(value: object) -> bytes:
    return gzip.compress(pickle.dumps(value))


HIDING_PLACES = {
    "pkl": pickle.dumps,
    "pickle": pickle.dumps,
    "pyd": pickle.dumps,
    "PKL": pickle.dumps,
    "seg.pkl": pickle.dumps,
    "pkl.gz": squeezed,
    "pickle.gz": squeezed,
    "pth": by_torch,
    "npy": by_numpy,
    "npz": zipped,
}


@pytest.mark.parametrize("extension", HIDING_PLACES)
def test_no_pickle_of_a_tar_is_loaded_unless_asked_for(
    tmp_path: Path, mark: Path, capsys: pytest.CaptureFixture[str], extension: str
) -> None:
    content = HIDING_PLACES[extension](Trap(mark))
    path = tar_of(tmp_path, ("a.cls", b"1"), (f"a.{extension}", content))
    told = rf"'web', file '{path}', record 0 \(key 'a'\): '{extension.lower()}' is a pickle.*"
    told += r"give allow_pickle=True if you trust whoever made the file"
    with pytest.raises(ConfigurationError, match=told):
        Dataset.from_path("web", path)[0]
    for on_error in ("raise", "skip", "substitute"):  # no bad record: none is left out for it
        with pytest.raises(ConfigurationError, match=told):
            next(iter(DataLoader(Dataset.from_path("web", path), on_error=on_error)))
    for more in ([], ["--option", "allow_pickle=true"]):
        assert main(["inspect", str(path), *more]) == 0
        shown = capsys.readouterr().out
        assert "'cls': 1" in shown and "<pickle of" in shown and "not loaded>" in shown
    assert Dataset.from_path("web", path, decode=False)[0][extension.lower()] == content
    assert not mark.exists()
    Dataset.from_path("web", path, allow_pickle=True)[0]
    assert mark.exists()


def test_what_was_asked_for_comes_as_webdataset_has_it(tmp_path: Path) -> None:
    members = {"pkl": pickle.dumps({1}), "pth": by_torch(torch.arange(3)), "npy": by_numpy("x")}
    members["npz"] = zipped("y")
    path = tar_of(tmp_path, *((f"a.{name}", content) for name, content in members.items()))
    sample = Dataset.from_path("web", path, allow_pickle=True)[0]
    assert sample["pkl"] == {1} and sample["pth"].tolist() == [0, 1, 2]
    assert sample["npy"].tolist() == ["x"] and sample["npz"]["second"].tolist() == ["y"]


def test_arrays_without_pickles_are_read_as_ever(tmp_path: Path) -> None:
    whole, both = io.BytesIO(), io.BytesIO()
    np.save(whole, np.arange(3))
    np.savez_compressed(both, a=np.arange(2), b=np.eye(2))
    path = tar_of(tmp_path, ("a.npy", whole.getvalue()), ("a.npz", both.getvalue()))
    sample = Dataset.from_path("web", path)[0]
    assert sample["npy"].tolist() == [0, 1, 2] and sample["npz"]["b"].tolist() == [[1, 0], [0, 1]]


def test_a_function_of_the_users_may_load_them(tmp_path: Path) -> None:
    path = tar_of(tmp_path, ("a.pkl", pickle.dumps([7])))

    def decode(extension: str, content: bytes) -> Any:
        return pickle.loads(content) if extension == ".pkl" else None

    assert Dataset.from_path("web", path, decode=decode)[0]["pkl"] == [7]


def test_the_word_changes_no_fingerprint(tmp_path: Path) -> None:
    path = tar_of(tmp_path, ("a.txt", b"1"), ("b.txt", b"2"))
    datasets = [Dataset.from_path("web", path, **o) for o in ({}, {"allow_pickle": True})]
    before = "126033a1af8323a5"  # by the version without the word
    assert [dataset.fingerprint[:16] for dataset in datasets] == [before, before]


@pytest.mark.parametrize("value", [1, "yes", 0.5])
def test_the_word_is_true_or_false(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"allow_pickle is {value!r}: expected True or F"):
        Dataset.from_path("web", tar_of(tmp_path, ("a.txt", b"")), allow_pickle=value)
    (tmp_path / "a.jsonl").write_text("1\n")
    with pytest.raises(ConfigurationError, match="'jsonl' has no option 'allow_pickle'"):
        Dataset.from_path("web", tmp_path / "a.jsonl", allow_pickle=True)


def test_no_manifest_gives_leave_to_load(tmp_path: Path, mark: Path) -> None:
    tar_of(tmp_path, ("a.pkl", pickle.dumps(Trap(mark))))
    saved = tmp_path / "web.zman"
    Dataset.from_path("web", tmp_path, allow_pickle=True).save_manifest(saved)
    with pytest.raises(ConfigurationError, match="give allow_pickle=True"):
        Dataset.from_manifest("web", saved)[0]
    raw = saved.read_bytes()
    length = struct.unpack_from("<I", raw, 12)[0]
    header = json.loads(raw[20 : 20 + length])
    assert header["options"] == {"decode": True}  # as versions before the word wrote it
    header["options"]["allow_pickle"] = True
    text = json.dumps(header).encode()
    forged = text + raw[20 + length :]
    saved.write_bytes(raw[:12] + struct.pack("<II", len(text), zlib.crc32(forged)) + forged)
    with pytest.raises(DatasetError, match=r"web.zman' cannot be used: it says 'allow_pickle'"):
        Dataset.from_manifest("web", saved)
    assert not mark.exists()
    saved.write_bytes(raw)
    Dataset.from_manifest("web", saved, allow_pickle=True)[0]
    assert mark.exists()


def test_no_pickle_of_an_mds_folder_is_loaded_unless_asked_for(
    tmp_path: Path, mark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mds"
    mds_folder(folder, [[{"x": pickle.dumps(Trap(mark))}]], {"x": ("pkl", None)})
    with pytest.raises(DatasetError, match=r"shard.00000.mds', column 'x': .*allow_pickle=True"):
        Dataset.from_path("web", folder)
    assert main(["inspect", str(folder), "--option", "allow_pickle=true"]) == 0
    assert "{'x': <pickle of" in capsys.readouterr().out
    assert not mark.exists()
    Dataset.from_path("web", folder, allow_pickle=True)[0]
    assert mark.exists()


def test_no_extension_type_of_arrow_is_unpickled(tmp_path: Path, mark: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    ipc = pytest.importorskip("pyarrow.ipc")
    name, payload = b"arrow.py_extension_type", pickle.dumps(Trap(mark))
    metadata = {b"ARROW:extension:name": name, b"ARROW:extension:metadata": payload}
    schema = pa.schema([pa.field("x", pa.int64(), metadata=metadata)])
    with ipc.new_file(tmp_path / "a.arrow", schema) as file:
        file.write_batch(pa.record_batch([pa.array([1, 2])], schema=schema))
    assert list(Dataset.from_path("web", tmp_path / "a.arrow")) == [{"x": 1}, {"x": 2}]
    assert not mark.exists()


# --- decoders that would not end, or take the process down ---------------------------------------


def chunks(*lengths: int) -> bytes:
    return b"".join(b"~TenBin~" + struct.pack("<q", length) for length in lengths) + bytes(64)


@pytest.mark.parametrize(
    "content",
    [chunks(0, 0, 0, -64), chunks(0, 0, 0, -80), chunks(-1), chunks(1 << 62), b"~TenBin~"],
)
def test_tensors_that_lead_back_into_themselves_are_bad_records(
    tmp_path: Path, content: bytes
) -> None:
    path = tar_of(tmp_path, ("a.ten", content))
    with pytest.raises(RecordError, match=rf"'{path}', record 0 .*'ten' cannot be decoded"):
        Dataset.from_path("web", path)[0]


def test_tensors_of_webdataset_are_read(tmp_path: Path) -> None:
    from webdataset import tenbin

    arrays = [np.arange(3), np.ones((2, 5), np.float32)]
    path = tar_of(tmp_path, ("a.ten", bytes(tenbin.encode_buffer(arrays))))
    read = Dataset.from_path("web", path)[0]["ten"]
    assert [array.tolist() for array in read] == [array.tolist() for array in arrays]


def bomb(name: str, num_bytes: int) -> bytes:
    """Zeros, packed."""
    if name.endswith(".gz"):
        return gzip.compress(bytes(num_bytes))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a", bytes(num_bytes))
    return buffer.getvalue()


@pytest.mark.parametrize("name", ["txt.gz", "npz"])
def test_what_unpacks_to_too_much_is_a_bad_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(tar_decoding, "MAX_UNPACKED_BYTES", 5000)
    fits = tar_of(tmp_path, (f"a.{name}", bomb(name, 5000)), name="fits.tar")
    assert name in Dataset.from_path("web", fits)[0]
    path = tar_of(tmp_path, (f"a.{name}", bomb(name, 5001)), ("b.txt", b"next"))
    dataset = Dataset.from_path("web", path)
    with pytest.raises(RecordError, match=rf"record 0 .*'{name}' .*more than 5,000 bytes"):
        dataset[0]
    assert dataset[1]["txt"] == "next"


def test_cbor_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tar_of(tmp_path, ("a.cbor", b"\x81" * 1_000_000 + b"\x00"))
    with pytest.raises(ConfigurationError, match=r"record 0 .*'cbor' is not decoded: .*cbor2"):
        Dataset.from_path("web", path)[0]
    assert Dataset.from_path("web", path, decode=lambda e, c: len(c))[0]["cbor"] == 1_000_001


def test_deep_msgpack_and_its_claims_are_bad_records(tmp_path: Path) -> None:
    pytest.importorskip("msgpack")
    deep, claims = b"\x91" * 1_000_000 + b"\x00", b"\xdd\xff\xff\xff\xff"
    dataset = Dataset.from_path("web", tar_of(tmp_path, ("a.mp", deep), ("b.mp", claims)))
    for number in (0, 1):
        with pytest.raises(RecordError, match=f"record {number} .*'mp' cannot be decoded"):
            dataset[number]


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 2 2\n%%EndComments\nshowpage\n"


@pytest.mark.parametrize("extension", ["eps", "png", "jpg", "ps"])
def test_no_image_starts_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extension: str
) -> None:
    image = pytest.importorskip("PIL.Image")
    started: list[bool] = []

    def start(*arguments: Any, **options: Any) -> Any:
        started.append(True)
        return image.new("RGB", (2, 2)).im

    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", start)
    image.open(io.BytesIO(POSTSCRIPT)).load()
    assert started.pop()  # so PIL would
    path = tar_of(tmp_path, (f"a.{extension}", POSTSCRIPT))
    for decode in ("pil", "rgb8", ["torchrgb"]):
        with pytest.raises(ConfigurationError, match=rf"'{extension}' is not decoded: .*Ghostsc"):
            Dataset.from_path("web", path, decode=decode)[0]
    assert not started
    text = tar_of(tmp_path, ("a.txt", POSTSCRIPT), name="text.tar")
    assert Dataset.from_path("web", text, decode="pil")[0]["txt"] == POSTSCRIPT.decode()
