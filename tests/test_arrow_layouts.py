"""Arrow as others write it, and what is refused: the same answers wherever a file lies."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from decimal import Decimal
from io import BytesIO
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from zephon_torch import DataLoader
from zephon_torch.errors import DatasetError, RecordError
from zephon_torch.io import Dataset

pa = pytest.importorskip("pyarrow")
ipc = pytest.importorskip("pyarrow.ipc")
parquet = pytest.importorskip("pyarrow.parquet")

pytestmark = pytest.mark.timeout(120)
MADE = Path(__file__).parent / "data" / "arrow"  # by make_arrow_files.py beside it
LONG = "a text of more than twelve bytes"
BY_RUST = [
    {"id": 0, "text": "a", "tags": ["a", LONG]},
    {"id": 1, "text": None, "tags": []},
    {"id": 2, "text": "ö", "tags": None},
    {"id": 3, "text": LONG, "tags": [""]},
    {"id": 4, "text": "", "tags": ["b"]},
]
NEW = pytest.mark.parametrize("new", [ipc.new_stream, ipc.new_file], ids=["stream", "file"])


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("ZEPHON_CACHE_DIR", str(tmp_path / "cache"))
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    yield fs
    fs.store.clear()


def write(*batches: Any, new: Any = ipc.new_stream, **options: Any) -> bytes:
    sink = BytesIO()
    with new(sink, batches[0].schema, options=ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue()


class Everywhere:
    """One file: local, by URL, and by URL through the shard cache."""

    def __init__(self, tmp_path: Path, content: bytes, extension: str = ".arrow") -> None:
        self.local = tmp_path / f"x{extension}"
        self.local.write_bytes(content)
        fsspec.filesystem("memory").pipe(f"/d/x{extension}", content)
        self.url = f"memory://d/x{extension}"
        self.cache = tmp_path / "copies"

    def rows(self) -> list[dict[str, Any]]:
        """The rows, which must be the same in each way of reading."""
        local, remote = (Dataset.from_path("a", where) for where in (self.local, self.url))
        rows = list(local)
        assert list(remote) == rows
        for dataset in (local, remote):
            with closing(dataset.open(0)) as reader:
                order = np.random.default_rng(0).permutation(len(rows))
                assert reader.read(order) == [rows[i] for i in order.tolist()]
        options: list[dict[str, Any]] = [{}, {"cache_dir": self.cache, "cache_limit": "1GB"}]
        for dataset in (local, remote):
            for option in options:
                with DataLoader(
                    dataset, 3, collate_fn=list, shuffle=True, num_threads=0, **option
                ) as loader:
                    seen = [row for batch in loader for row in batch]
                assert sorted(map(repr, seen)) == sorted(map(repr, rows))
        return rows

    def refused(self, message: str) -> None:
        """Neither way makes a dataset of it, and both say why and name the file."""
        for where in (str(self.local), self.url):
            with pytest.raises(DatasetError, match=message) as caught:
                Dataset.from_path("a", where)
            assert where.rpartition("/")[2] in str(caught.value)


class Header:
    """Fields of the header of one message, to be written over."""

    def __init__(self, content: bytes, kind: str, number: int = 0) -> None:
        self.content = bytearray(content)
        skip = 8 if content.startswith(b"ARROW1") else 0
        source = pa.BufferReader(pa.py_buffer(content).slice(skip))
        messages = ipc.MessageReader.open_stream(source)
        while True:
            start = source.tell()
            message = messages.read_next_message()
            if message.type == kind:
                if number == 0:
                    break
                number -= 1
        self.body = source.tell() - message.body.size + skip if message.body else 0
        self.message = self.follow(skip + start + 8)

    def follow(self, position: int) -> int:
        return position + int(struct.unpack_from("<I", self.content, position)[0])

    def slot(self, table: int, field: int) -> int:
        """Where the offset of a field is."""
        return table - int(struct.unpack_from("<i", self.content, table)[0]) + 4 + 2 * field

    def field(self, table: int, field: int) -> int:
        """Where a field is that must be there."""
        (offset,) = struct.unpack_from("<H", self.content, self.slot(table, field))
        assert offset
        return table + int(offset)

    @property
    def inner(self) -> int:
        """The table of the schema or batch."""
        return self.follow(self.field(self.message, 2))

    def put(self, form: str, position: int, *values: int) -> None:
        struct.pack_into(form, self.content, position, *values)


def numbered(start: int = 0, stop: int = 20) -> Any:
    ids = range(start, stop)
    return pa.record_batch({"id": ids, "text": [f"t{i} ö" if i % 5 else None for i in ids]})


# --- read as pyarrow has it -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["polars.arrow", "polars-zstd.arrow", "polars.arrows", "arrow-rs.arrow", "arrow-rs.arrows"],
)
def test_files_by_writers_in_rust_are_read(name: str, tmp_path: Path) -> None:
    """A schema without marker and length, padding before the first message, views of text."""
    extension = f".{name.rpartition('.')[2]}"
    assert Everywhere(tmp_path, (MADE / name).read_bytes(), extension).rows() == BY_RUST


RANDOM = np.random.default_rng(0).integers(0, 2**62, 300)
BY_ARROW_0_17 = {
    "few numbers": {"a": pa.array(range(5))},  # the length before them reads as their first: 40
    "many numbers": {"a": pa.array(RANDOM)},  # their buffer grows
    "numbers and nulls": {"a": pa.array([None if i % 3 else i for i in RANDOM.tolist()])},
    "small numbers": {"a": pa.array(range(60), pa.int16()), "b": pa.array([True, False] * 30)},
    "text": {"a": pa.array(range(60)), "text": pa.array(["word " * i for i in range(60)])},
    "few texts": {"text": pa.array(["a", None, "c"])},
}


@NEW
@pytest.mark.parametrize("compression", ["lz4", "zstd"])
@pytest.mark.parametrize("columns", BY_ARROW_0_17.values(), ids=BY_ARROW_0_17.keys())
def test_compression_as_arrow_0_17_tells_it(
    new: Any, compression: str, columns: dict[str, Any], tmp_path: Path
) -> None:
    """By metadata of the message, where later versions have a field."""
    name = {"lz4": b"LZ4", "zstd": b"ZSTD"}[compression]
    batch = pa.record_batch(columns)
    sink = BytesIO()
    options = ipc.IpcWriteOptions(compression=compression, metadata_version=ipc.MetadataVersion.V4)
    with new(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch, custom_metadata={b"ARROW:experimental_compression": name})
    header = Header(sink.getvalue(), "record batch")
    header.put("<H", header.slot(header.inner, 3), 0)  # no such field
    file = Everywhere(tmp_path, bytes(header.content), ".feather")
    assert file.rows() == batch.to_pylist()


@NEW
def test_numbers_with_their_big_end_first(new: Any, tmp_path: Path) -> None:
    ids = np.arange(1, 8, dtype=np.int32)
    batch = pa.record_batch({"id": ids, "same": ids}, metadata={"ones": "\1\0" * 4})
    header = Header(write(batch, new=new), "schema")
    schema = header.inner
    content = bytes(header.content).replace(ids.tobytes(), ids.byteswap().tobytes())
    tables = [schema]
    if new is ipc.new_file:  # the schema stands in the footer, too
        length = struct.unpack("<i", content[-10:-6])[0]
        footer = header.follow(len(content) - 10 - length)
        tables.append(header.follow(header.field(footer, 1)))
    header.content = bytearray(content)
    for table in tables:  # its field is there if not 0: point to a 1 somewhere behind
        one = next(
            at for at in range(table + 4, len(content), 2) if content[at : at + 2] == b"\1\0"
        )
        header.put("<H", header.slot(table, 0), one - table)
    assert Everywhere(tmp_path, bytes(header.content)).rows() == [
        {"id": i, "same": i} for i in range(1, 8)
    ]


NESTED: dict[str, tuple[Any, list[Any]]] = {
    "text": (pa.string_view(), [LONG, None, "b"]),
    "bytes": (pa.binary_view(), [b"\xff" * 40, None, b""]),
    "texts": (pa.list_(pa.string_view()), [[LONG, None], [], None]),
    "in struct": (pa.struct({"a": pa.string_view()}), [{"a": LONG}, None, {"a": "b"}]),
    "deep": (
        pa.list_(pa.struct({"role": pa.string_view(), "n": pa.list_(pa.binary_view())})),
        [[{"role": LONG, "n": [b"x"]}], [], None],
    ),
}
LIST_VIEWS: dict[str, tuple[Any, list[Any]]] = {
    "list": (pa.list_view(pa.int32()), [[1, None], [], None]),
    "large": (pa.large_list_view(pa.string()), [["a", None], [], None]),
    "of views": (pa.list_view(pa.string_view()), [[LONG], [], None]),
}


@NEW
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_views_are_read(new: Any, compression: str | None, tmp_path: Path) -> None:
    kinds = NESTED | LIST_VIEWS
    batch = pa.record_batch(
        {name: pa.array(values * 3, kind) for name, (kind, values) in kinds.items()}
    )
    file = Everywhere(tmp_path, write(batch, batch, new=new, compression=compression))
    rows = file.rows()
    assert rows == [{name: kinds[name][1][i % 3] for name in kinds} for i in range(18)]


def test_views_inside_lists_are_read_from_parquet(tmp_path: Path) -> None:
    content = (MADE / "arrow-rs.parquet").read_bytes()
    kinds = parquet.ParquetFile(BytesIO(content)).schema_arrow
    assert kinds.field("tags").type.value_type == pa.string_view()
    assert Everywhere(tmp_path, content, ".parquet").rows() == BY_RUST


@NEW
@pytest.mark.parametrize("compression", [None, "lz4"])
def test_decimals_beyond_their_precision(new: Any, compression: str | None, tmp_path: Path) -> None:
    values = [-123456789, 5, 10**30]
    content = b"".join(value.to_bytes(16, "little", signed=True) for value in values)
    kind = pa.decimal128(4, 2)
    column = pa.Array.from_buffers(kind, 3, [None, pa.py_buffer(content)])
    lists = pa.ListArray.from_arrays([0, 1, 2, 3], column)
    batch = pa.record_batch({"price": column, "prices": lists})
    file = Everywhere(tmp_path, write(batch, new=new, compression=compression))
    expected = [Decimal(value).scaleb(-2) for value in values]
    assert file.rows() == [{"price": value, "prices": [value]} for value in expected]


def test_extension_types_inside_others_are_read_as_what_they_are_stored_as(tmp_path: Path) -> None:
    stored = pa.array([b"0123456789abcdef"] * 2, pa.binary(16))
    keys = pa.ExtensionArray.from_storage(pa.uuid(), stored)
    batch = pa.record_batch({"keys": pa.ListArray.from_arrays([0, 2], keys)})
    assert Everywhere(tmp_path, write(batch)).rows() == [{"keys": [b"0123456789abcdef"] * 2}]


def test_structs_without_fields_are_left_out_of_parquet(tmp_path: Path) -> None:
    """As pyarrow reads them. No writer here makes such a file: one is written over."""
    inner = pa.array([{"x": 7}, {"x": 8}], pa.struct({"x": pa.int32()}))
    fields = [pa.field("id", pa.int64()), pa.field("s", inner.type, nullable=False)]
    table = pa.Table.from_arrays([pa.array([1, 2]), inner], schema=pa.schema(fields))
    sink = BytesIO()
    parquet.write_table(table, sink, store_schema=False)
    content = sink.getvalue()
    root, group = b"\x18\x06schema\x15\x04", b"\x18\x01s\x15\x02"  # names, numbers of children
    assert content.count(root) == content.count(group) == 1
    content = content.replace(root, root[:-1] + b"\x06").replace(group, group[:-1] + b"\x00")
    assert parquet.ParquetFile(BytesIO(content)).schema_arrow.field("s").type == pa.struct([])
    expected = [{"id": 1, "x": 7}, {"id": 2, "x": 8}]
    assert parquet.ParquetFile(BytesIO(content)).read().to_pylist() == expected
    assert Everywhere(tmp_path, content, ".parquet").rows() == expected


# --- refused --------------------------------------------------------------------------------------


@NEW
@pytest.mark.parametrize("kind", [4, 9])  # a tensor, and one that nobody knows
def test_a_message_of_another_kind_is_refused(new: Any, kind: int, tmp_path: Path) -> None:
    content = write(*(numbered(i, i + 20) for i in (0, 20, 40)), new=new)
    header = Header(content, "record batch", number=1)
    header.put("<B", header.field(header.message, 1), kind)
    Everywhere(tmp_path, bytes(header.content)).refused("unexpected kind|cannot be decoded")


@NEW
def test_a_batch_that_became_a_dictionary_is_refused(new: Any, tmp_path: Path) -> None:
    words = pa.array(["a", "b", "a"]).dictionary_encode()
    header = Header(write(pa.record_batch({"word": words}), new=new), "record batch")
    header.put("<B", header.field(header.message, 1), 2)
    file = Everywhere(tmp_path, bytes(header.content))
    file.refused("unexpected kind|cannot be decoded")


@NEW
@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("has_nodes", [False, True])
def test_more_rows_than_there_are_bytes_are_refused(
    new: Any, compression: str | None, has_nodes: bool, tmp_path: Path
) -> None:
    header = Header(write(numbered(), new=new, compression=compression), "record batch")
    header.put("<q", header.field(header.inner, 0), 10**12)
    if has_nodes:
        nodes = header.follow(header.field(header.inner, 1))
        for number in range(struct.unpack_from("<I", header.content, nodes)[0]):
            header.put("<q", nodes + 4 + 16 * number, 10**12)
    Everywhere(tmp_path, bytes(header.content)).refused(r"claims 1,000,000,000,000 rows")


def test_more_rows_than_can_be_are_refused(tmp_path: Path) -> None:
    for claim in (-1, 1 << 62):
        header = Header(write(numbered()), "record batch")
        header.put("<q", header.field(header.inner, 0), claim)
        Everywhere(tmp_path, bytes(header.content)).refused(r"x.arrow' ")


def test_columns_of_nulls_have_rows_without_bytes(tmp_path: Path) -> None:
    batch = pa.record_batch({"nothing": pa.nulls(5000)})
    assert Everywhere(tmp_path, write(batch)).rows() == [{"nothing": None}] * 5000


@NEW
def test_tables_without_columns_are_refused(new: Any, tmp_path: Path) -> None:
    Everywhere(tmp_path, write(numbered().select([]), new=new)).refused("has no columns")


@NEW
@pytest.mark.parametrize("has_batches", [True, False])
def test_files_of_before_arrow_0_15_are_refused_as_old(
    new: Any, has_batches: bool, tmp_path: Path
) -> None:
    sink = BytesIO()
    options = ipc.IpcWriteOptions(use_legacy_format=True, metadata_version=ipc.MetadataVersion.V4)
    with new(sink, numbered().schema, options=options) as writer:
        if has_batches:
            writer.write_batch(numbered())
    Everywhere(tmp_path, sink.getvalue()).refused("is old: it was written before Arrow 0.15")


def test_feather_of_version_1_is_refused_as_old(tmp_path: Path) -> None:
    Everywhere(tmp_path, b"FEA1" + bytes(200) + b"FEA1", ".feather").refused(
        "is old: it is Feather"
    )


def test_what_a_footer_leaves_out_is_refused(tmp_path: Path) -> None:
    """Of files that were joined, the last footer lists the batches of the first file."""
    content = write(numbered(), numbered(), new=ipc.new_file)
    Everywhere(tmp_path, content + content).refused("its footer leaves out")


def test_intervals_of_months_are_refused_by_name(tmp_path: Path) -> None:
    """pyarrow has no values for them."""
    header = Header(write(pa.record_batch({"d": pa.array([1, 2], pa.duration("s"))})), "schema")
    fields = header.follow(header.field(header.inner, 1))
    field = header.follow(fields + 4)
    header.put("<B", header.field(field, 2), 11)  # Interval in the place of Duration
    Everywhere(tmp_path, bytes(header.content)).refused("interval")


# --- damage ---------------------------------------------------------------------------------------

DAMAGE: dict[str, Callable[[], Any]] = {
    "text": lambda: pa.array(["aaaa", "bbbb", "cccc", "dddd"]),
    "bytes in structs": lambda: pa.StructArray.from_arrays(
        [pa.array([b"aaaa", b"bbbb", b"cccc", b"dddd"])], ["b"]
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("bad", [-1, 2**31 - 1, 1])
def test_an_offset_that_leads_elsewhere_is_a_bad_record(
    name: str, bad: int, tmp_path: Path
) -> None:
    """Of one row, in whatever way it is read; others are read. Inside of others, of all rows."""
    column = DAMAGE[name]()
    content = write(pa.record_batch({"c": column}))
    offsets = np.array([0, 4, 8, 12, 16], np.int32)
    assert content.count(offsets.tobytes()) == 1
    damaged = offsets.copy()
    damaged[2] = bad
    path = tmp_path / "x.arrow"
    path.write_bytes(content.replace(offsets.tobytes(), damaged.tobytes()))
    with closing(Dataset.from_path("a", path).open(0)) as reader:
        group = reader.group_kind.make(1)
        group.add(0, reader)
        with pytest.raises(pa.ArrowInvalid):
            group.read(np.zeros(4, np.int64), np.arange(4))
        with pytest.raises(RecordError, match=f"record {name == 'text':d} cannot be decoded"):
            reader.read(np.arange(4))
        if name == "text":
            assert reader.read(np.array([3, 0])) == [{"c": "dddd"}, {"c": "aaaa"}]


def numbered_row(i: int) -> dict[str, Any]:
    return {"id": i, "text": f"t{i} ö" if i % 5 else None}


def test_shards_of_any_datasets_are_read_in_one_call(tmp_path: Path) -> None:
    """Compressed ones, too, and with batches of no rows between others."""
    readers = []
    for number in range(4):
        start = 100 * number
        batches = [
            numbered(start, start + 7),
            numbered(1, 2).slice(1),
            numbered(start + 7, start + 20),
        ]
        compression = "lz4" if number == 3 else None
        path = tmp_path / f"{number}.arrow"
        path.write_bytes(write(*batches, numbered(1, 2).slice(1), compression=compression))
        readers.append(Dataset.from_path(f"d{number}", path).open(0))
    assert len({reader.group_kind for reader in readers}) == 1
    group = readers[0].group_kind.make(9)
    for number, reader in enumerate(readers):
        group.add(2 * number, reader)
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(80), 2))
    read = group.read(2 * (order // 20), order % 20)
    assert read == [numbered_row(100 * (i // 20) + i % 20) for i in order.tolist()]
    assert group.read(np.empty(0, np.int64), np.empty(0, np.int64)) == []
    group.remove(2)
    readers[1].close()
    read = group.read(np.array([6, 0, 4]), np.array([19, 6, 7]))
    assert read == [numbered_row(319), numbered_row(6), numbered_row(207)]
    for shard, sample in ((2, 0), (0, 20), (0, -1), (1, 0)):
        with pytest.raises(IndexError):
            group.read(np.array([6, shard]), np.array([0, sample]))
    with pytest.raises(DatasetError, match="closed"):
        readers[1].read(np.array([0]))
    for reader in (readers[0], *readers[2:]):
        reader.close()


def test_a_file_that_is_cut_short_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    path.write_bytes(write(numbered(0, 5000)))
    with closing(Dataset.from_path("a", path).open(0)) as reader:
        assert reader.read(np.array([4999])) == [numbered_row(4999)]
        with path.open("r+b") as file:
            file.truncate(100)
        with pytest.raises(DatasetError, match="cut short"):
            reader.read(np.array([4999]))


def test_an_index_of_today_is_what_it_was(tmp_path: Path, memory: Any) -> None:
    """Where each message of a remote stream starts, then its size, as versions before wrote it."""
    content = write(numbered(0, 7), numbered(7, 20))
    source, starts = pa.BufferReader(content), []
    messages = ipc.MessageReader.open_stream(source)
    for _ in range(3):
        starts.append(source.tell())
        messages.read_next_message()
    memory.pipe("/i/x.arrow", content)
    dataset = Dataset.from_path("a", "memory://i")
    (sidecar,) = (tmp_path / "cache").glob("*.zidx")
    expected = np.array([*starts, len(content)], "<i8").tobytes()
    assert sidecar.read_bytes().endswith(expected)
    sidecar.unlink()
    assert list(dataset) == [numbered_row(i) for i in range(20)]
