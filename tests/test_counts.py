"""Counts that cannot be, in every file and state that holds some: refused by name, never wrong."""

from __future__ import annotations

import json
import math
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from format_files import mds_folder, megatron_pair

from zephon_torch import DataLoader, bind
from zephon_torch.errors import ConfigurationError, DatasetError, PlanMismatch, StateError
from zephon_torch.io import Dataset
from zephon_torch.io.index.index import StaleIndexWarning
from zephon_torch.support import checks
from zephon_torch.trainers.iterable import WorkSourceDataset
from zephon_torch.work import StaticMixtureWorkSource

pytestmark = pytest.mark.timeout(60)
HUGE = 1 << 62
NO_COUNTS: dict[str, Any] = {
    "negative": -1,
    "half": 1.5,
    "float": 3.0,
    "bool": True,
    "nan": math.nan,
    "inf": math.inf,
    "text": "3",
    "list": [3],
    "none": None,
    "2**63": 1 << 63,
    "2**64": 1 << 64,
}
IN_MEMORY = NO_COUNTS | {"digits": 10**5000}  # JSON in files refuses such a number by itself
in_files = pytest.mark.parametrize("value", NO_COUNTS.values(), ids=NO_COUNTS)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEPHON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


def deep(kind: type = list, levels: int = 100_000) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value} if kind is dict else [value]
    return value


# --- the helper ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", IN_MEMORY.values(), ids=IN_MEMORY)
def test_a_count_is_a_whole_number(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"num_samples is .*: expected an integer >= 0"):
        checks.integer("num_samples", value, minimum=0, maximum=checks.MAX_SAMPLES)


@pytest.mark.parametrize("value", [0, 7, np.int64(7), np.uint8(7), checks.MAX_SAMPLES])
def test_numpys_integers_are_counts(value: Any) -> None:
    found = checks.integer("n", value, minimum=0, maximum=checks.MAX_SAMPLES)
    assert found == value and type(found) is int


def test_what_is_shown_is_short() -> None:
    for value in (deep(), 10**5000, {"a": deep()}, "x" * 10**6, list(range(10**6))):
        assert 0 < len(checks.shown(value)) < 200


def test_a_sum_is_exact() -> None:
    assert checks.total("n", np.array([3, 4, 0])) == 7
    assert checks.total("n", np.zeros(0, np.int64)) == 0
    most = np.full(1000, 1 << 61)
    assert checks.total("n", most, maximum=1000 << 61) == 1000 << 61
    for counts in ([HUGE] * 4 + [3], [(1 << 63) - 1], [1 << 53, 1 << 53], [HUGE] * 8):
        with pytest.raises(ConfigurationError, match=f"n sum to {sum(counts):,}"):
            checks.total("n", np.array(counts))
    with pytest.raises(ConfigurationError, match="n has -2, less than 0"):
        checks.total("n", np.array([5, -2]))


# --- files ---------------------------------------------------------------------------------------


def manifest_of(path: Path, samples: list[int], num_bytes: list[int], **header: Any) -> Path:
    """A manifest that is sound as a file."""
    plain = {"format": "jsonl", "options": {}, "num_shards": len(samples), "beside": ""}
    text = json.dumps(plain | header).encode()
    columns = np.array([samples, num_bytes, [1] * len(samples)], "<i8").tobytes()
    paths = b"".join(b"%03d.jsonl\0" % number for number in range(len(samples)))
    content = text + columns + paths
    path.write_bytes(
        struct.pack("<8sIII", b"ZEPHMAN\n", 1, len(text), zlib.crc32(content)) + content
    )
    return path


@pytest.mark.parametrize(
    ("samples", "num_bytes", "message"),
    [
        ([HUGE] * 4 + [3], [9] * 5, "numbers of samples sum to 18,446,744,073,709,551,619"),
        ([1 << 54], [9], "numbers of samples sum to 18,014,398,509,481,984"),
        ([(1 << 54) - 1, 1], [9, 9], "numbers of samples sum to"),
        ([5, -2], [9, 9], "numbers of samples has -2, less than 0"),
        ([1] * 5, [HUGE] * 4 + [3], "sizes in bytes sum to"),
        ([1], [-1], "sizes in bytes has -1, less than 0"),
    ],
)
def test_a_manifest_cannot_claim_more_than_there_can_be(
    tmp_path: Path, samples: list[int], num_bytes: list[int], message: str
) -> None:
    path = manifest_of(tmp_path / "web.zman", samples, num_bytes)
    with pytest.raises(DatasetError, match=f"manifest '{path}' cannot be used: its {message}"):
        Dataset.from_manifest("web", path)
    fits = manifest_of(tmp_path / "fits.zman", [(1 << 54) - 2, 1], [9, 9])
    assert len(Dataset.from_manifest("web", fits)) == (1 << 54) - 1


@in_files
def test_the_header_of_a_manifest_holds_counts(tmp_path: Path, value: Any) -> None:
    path = manifest_of(tmp_path / "web.zman", [1], [9], num_shards=value)
    with pytest.raises(DatasetError, match=f"manifest '{path}' cannot be used: it.*shards"):
        Dataset.from_manifest("web", path)


def change_sidecar(path: Path, **values: Any) -> None:
    """Write other values into the header of a sidecar."""
    raw = path.read_bytes()
    length = struct.unpack_from("<I", raw, 12)[0]
    text = json.dumps(json.loads(raw[16 : 16 + length]) | values).encode()
    text += b" " * (-(16 + len(text)) % 64)
    path.write_bytes(raw[:12] + struct.pack("<I", len(text)) + text + raw[16 + length :])


@pytest.mark.parametrize("key", ["num_samples", "num_blocks", "crc32", "num_bytes", "stamp"])
@in_files
def test_a_sidecar_holds_counts(tmp_path: Path, key: str, value: Any) -> None:
    if key == "num_blocks" and value is None:
        pytest.skip("of a plain file")
    path = tmp_path / "a.jsonl"
    path.write_text("1\n2\n3\n")
    Dataset.from_path("web", path)
    change_sidecar(tmp_path / ".a.jsonl.zidx", **{key: value})
    with pytest.warns(StaleIndexWarning, match=rf"\.a\.jsonl\.zidx': .*{key}"):
        assert list(Dataset.from_path("web", path)) == [1, 2, 3]
    assert list(Dataset.from_path("web", path)) == [1, 2, 3]


def test_numbers_that_are_equal_but_no_integers_are_no_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("1\n")
    Dataset.from_path("web", path)
    for key, value in (("num_samples", 1.0), ("num_samples", True), ("num_bytes", 2.0)):
        change_sidecar(tmp_path / ".a.jsonl.zidx", **{key: value})
        with pytest.warns(StaleIndexWarning, match=key):
            Dataset.from_path("web", path)


def test_blocks_of_a_plain_file_and_none_of_a_compressed_one_are_built_anew(tmp_path: Path) -> None:
    import gzip

    plain, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    plain.write_text("1\n2\n")
    packed.write_bytes(gzip.compress(b"3\n"))
    sound = Dataset.from_path("web", tmp_path)
    beside = tmp_path / ".a.jsonl.zidx"
    raw = beside.read_bytes()
    length = struct.unpack_from("<I", raw, 12)[0]
    tables = raw[16 + length :] + struct.pack("<4q", 0, 0, 4, 4)
    beside.write_bytes(raw[: 16 + length] + tables)
    change_sidecar(beside, num_blocks=1, crc32=zlib.crc32(tables))
    with pytest.warns(StaleIndexWarning, match=r"a table of blocks, and 'a.jsonl' is not compr"):
        assert list(Dataset.from_path("web", plain)) == [1, 2]
    beside.write_bytes(raw[: 16 + length] + tables)
    change_sidecar(beside, num_blocks=1, crc32=zlib.crc32(tables))
    with pytest.warns(StaleIndexWarning, match=r"a table of blocks, and 'a.jsonl' is not compr"):
        assert list(sound) == [1, 2, 3]  # where the shard is opened
    beside = tmp_path / ".b.jsonl.gz.zidx"
    raw = beside.read_bytes()
    length = struct.unpack_from("<I", raw, 12)[0]
    offsets = struct.pack("<2q", 0, packed.stat().st_size)
    beside.write_bytes(raw[: 16 + length] + offsets)
    change_sidecar(beside, num_blocks=None, crc32=zlib.crc32(offsets))
    with pytest.warns(StaleIndexWarning, match=r"no table of blocks, and 'b.jsonl.gz' is compr"):
        assert list(sound) == [1, 2, 3]


@in_files
@pytest.mark.parametrize("key", ["samples", "bytes"])
def test_an_index_of_mds_holds_counts(tmp_path: Path, key: str, value: Any) -> None:
    mds_folder(tmp_path, [[{"x": b"1"}]], {"x": ("bytes", None)})
    path = tmp_path / "index.json"
    index = json.loads(path.read_text())
    shard = index["shards"][0]
    (shard if key == "samples" else shard["raw_data"])[key] = value
    path.write_text(json.dumps(index))
    with pytest.raises(DatasetError, match=rf"'{path}', shard 0.*: {key} is .*expected an integer"):
        Dataset.from_path("web", tmp_path)


@pytest.mark.parametrize("name", ["5", "null", "NaN", "true", "[[1]]", "1" * 5000, "[" * 100_000])
def test_a_state_of_hugging_face_names_files(tmp_path: Path, name: str) -> None:
    pa, ipc = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.ipc")
    with ipc.new_stream(tmp_path / "data.arrow", pa.schema({"x": pa.int64()})):
        pass
    (tmp_path / "state.json").write_text(f'{{"_data_files": [{{"filename": {name}}}]}}')
    with pytest.raises(DatasetError, match=r"state\.json"):
        Dataset.from_path("web", tmp_path)


@pytest.mark.parametrize(
    ("sequences", "marks"), [(1 << 63, 2), ((1 << 64) - 1, 2), (1, 1 << 63), (1 << 63, 1 << 63)]
)
def test_a_header_of_megatron_cannot_claim_more_than_there_is(
    tmp_path: Path, sequences: int, marks: int
) -> None:
    megatron_pair(tmp_path / "a", [np.arange(3, dtype="<u2")], [0, 1])
    path = tmp_path / "a.idx"
    raw = path.read_bytes()
    path.write_bytes(raw[:18] + struct.pack("<QQ", sequences, marks) + raw[34:])
    for options in ({}, {"unit": "document"}, {"row_length": 2}):
        with pytest.raises(DatasetError, match=f"'{path}' has {len(raw)} bytes, .* expected"):
            Dataset.from_path("web", tmp_path, **options)


@pytest.mark.parametrize(
    "shape",
    ["(9223372036854775808,)", "(9223372036854775808, 2)", "(True, 2)", "(2, True)", "(-1, 2)",
     "(1.0, 2)", "(4611686018427387904, 4)", "(" + "9" * 5000 + ",)", "(None,)", "(2, -2)"],
)  # fmt: skip
def test_a_header_of_numpy_holds_counts(tmp_path: Path, shape: str) -> None:
    text = f"{{'descr': '<u2', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    path = tmp_path / "a.npy"
    head = b"\x93NUMPY\1\0" + struct.pack("<H", len(text)) + text
    for content in (bytes(4), bytes(8)):
        path.write_bytes(head + content)
        with pytest.raises(DatasetError, match=f"'{path}'"):
            Dataset.from_path("web", path, row_length=2 if shape.endswith(",)") else None)


def varint(number: int) -> bytes:
    """A zigzag number of Thrift's compact protocol."""
    number, parts = 2 * number, []
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes([*parts, number])


@pytest.mark.parametrize("number", [HUGE, (1 << 63) - 1, 1 << 54])
def test_a_footer_of_parquet_cannot_claim_more_than_there_can_be(
    tmp_path: Path, number: int
) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"x": pa.nulls(123_457, pa.int8())}), path, row_group_size=10**9)
    raw = path.read_bytes()
    length = struct.unpack("<I", raw[-8:-4])[0]
    footer = raw[-8 - length : -8]
    assert footer.count(varint(123_457)) >= 2
    footer = footer.replace(varint(123_457), varint(number))
    path.write_bytes(raw[: -8 - length] + footer + struct.pack("<I", len(footer)) + b"PAR1")
    with pytest.raises(DatasetError, match=f"'{path}'.* is {number}: expected"):
        Dataset.from_path("web", path)


def test_a_file_of_arrow_cannot_claim_more_than_there_can_be(tmp_path: Path) -> None:
    """Four batches of 2**62 rows and one of three: 3 in 64 bits."""
    pa, ipc = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.ipc")
    sizes = [1_234_561, 1_234_562, 1_234_563, 1_234_564, 3]
    path = tmp_path / "a.arrow"
    schema = pa.schema({"x": pa.null()})
    with ipc.new_file(path, schema) as file:
        for size in sizes:
            file.write_batch(pa.record_batch([pa.nulls(size)], schema=schema))
    raw = path.read_bytes()
    for size in sizes[:4]:
        assert struct.pack("<q", size) in raw
        raw = raw.replace(struct.pack("<q", size), struct.pack("<q", HUGE))
    path.write_bytes(raw)
    with pytest.raises(DatasetError, match=str(path)):
        len(Dataset.from_path("web", path))


def test_files_cannot_hold_more_than_a_plan_has_room_for(tmp_path: Path) -> None:
    """Each may be sound; together they are too many. Written into manifests, so not at all."""
    from zephon_torch.io.datasets.shards import ShardTable

    table = ShardTable(np.array([1 << 53] * 4), None, ["a", "b", "c", "d"])
    made = Dataset.from_samples("web", [1])
    with pytest.raises(DatasetError, match="dataset 'web': numbers of samples sum to 36,028,797,0"):
        Dataset("web", "jsonl", table, made.content)


# --- in memory ------------------------------------------------------------------------------------


class Sized:
    def __init__(self, length: Any) -> None:
        self.length = length

    def __len__(self) -> Any:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    "length", [1 << 54, HUGE, sys.maxsize, 1 << 63, 10**30, -1, 1.5, math.nan, math.inf, None]
)
@pytest.mark.parametrize("make", [Dataset.from_torch, Dataset.from_samples])
def test_lengths_that_cannot_be_are_refused(make: Callable[..., Dataset], length: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"length of dataset 'web' is .*: expected an int"):
        make("web", Sized(length))
    with pytest.raises(ConfigurationError, match="length"):
        DataLoader(Sized(length))


def test_the_largest_dataset_is_taken() -> None:
    assert len(Dataset.from_torch("web", Sized((1 << 54) - 1))) == (1 << 54) - 1
    loader = DataLoader(Sized((1 << 54) - 1), batch_size=4, shuffle=True)
    assert next(iter(loader)).shape == (4,)


@pytest.mark.parametrize(
    "sizes",
    [
        [HUGE] * 4 + [3],
        np.array([1 << 63, 3], np.uint64),
        [-1, 4],
        [2.0, 1.0],
        [math.nan],
        [1 << 64],
    ],
    ids=str,
)
def test_sizes_of_shards_that_cannot_be_are_refused(sizes: Any) -> None:
    with pytest.raises(ConfigurationError, match="shard_sizes of dataset 'web'"):
        Dataset.from_samples("web", range(3), shard_sizes=sizes)


# --- states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["version", "epoch", "delivered", "lanes"])
@pytest.mark.parametrize("kind", [*IN_MEMORY, "deep lists", "deep dicts"])
def test_a_state_holds_counts(key: str, kind: str) -> None:
    too_deep = {"deep lists": list, "deep dicts": dict}
    value = deep(too_deep[kind]) if kind in too_deep else IN_MEMORY[kind]
    loader = DataLoader(list(range(10)))
    with pytest.raises(StateError, match=f"'?{key}"):
        loader.load_state_dict(loader.state_dict() | {key: value})
    assert (loader.epoch, loader.delivered) == (0, 0)


@pytest.mark.parametrize("key", ["fingerprint", "description"])
def test_a_state_holds_texts(key: str) -> None:
    loader = DataLoader(list(range(10)))
    for value in (1, None, b"x", deep(), deep(dict), math.nan):
        with pytest.raises(StateError, match=key):
            loader.load_state_dict(loader.state_dict() | {key: value})


def test_what_is_no_state_at_all_is_refused() -> None:
    source = StaticMixtureWorkSource([Dataset.from_samples("a", range(9))], {"a": 1})
    for load in (
        DataLoader(list(range(10))).load_state_dict,
        WorkSourceDataset(source).load_state_dict,
        source.reset,
    ):
        for state in (deep(), deep(dict), {"a": deep()}, {"epoch": deep(dict)}, 7, "x"):
            with pytest.raises(StateError):
                load(state)  # type: ignore[arg-type]


@pytest.mark.parametrize("levels", [500, 100_000])
def test_a_description_that_is_nested_deep_is_another_plan(levels: int) -> None:
    loader = DataLoader(list(range(10)))
    state = loader.state_dict() | {"fingerprint": "0" * 64}
    for text in ("[" * levels + "]" * levels, "{" + '"options":{' * levels):
        loader.load_state_dict(state | {"description": text})
        with pytest.raises(PlanMismatch):
            iter(loader)


@pytest.mark.parametrize(
    "words",
    [torch.full((16,), math.nan), torch.full((16,), math.inf), torch.ones(16),
     torch.full((16,), -1), torch.full((16,), (1 << 63) - 1), torch.ones(16, dtype=torch.bool)],
    ids=["nan", "inf", "ones", "-1", "2**63-1", "bool"],
)  # fmt: skip
def test_words_that_are_no_counts_are_refused(words: Any) -> None:
    loader, model = DataLoader(list(range(10))), torch.nn.Linear(1, 1)
    bind(model, loader)
    state = model.state_dict()
    model.load_state_dict(state | {"data_progress._extra_state": words})
    with pytest.raises(StateError):
        iter(loader)


@pytest.mark.parametrize("kind", [list, dict])
def test_no_words_at_all_are_refused_however_deep(kind: type) -> None:
    loader, model = DataLoader(list(range(10))), torch.nn.Linear(1, 1)
    bind(model, loader)
    model.load_state_dict(model.state_dict() | {"data_progress._extra_state": deep(kind)})
    with pytest.raises(StateError, match="16 integers"):
        iter(loader)
