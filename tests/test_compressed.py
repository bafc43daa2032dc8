"""Compressed JSON lines: the records of the decoded bytes, whatever members or frames hold them."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_jsonl import naive_starts, stored

from zephon_torch import DataLoader
from zephon_torch.errors import ConfigurationError, DatasetError, RecordError, ZephonError
from zephon_torch.io import Dataset
from zephon_torch.io.codecs import Compressed, blocks, codec_of, decoded, open_decoder
from zephon_torch.io.codecs import decoded_files as whole
from zephon_torch.io.codecs import gzip as gzip_codec
from zephon_torch.io.formats.json import jsonl
from zephon_torch.io.formats.json.lines import find_decoded_lines
from zephon_torch.io.index import index
from zephon_torch.io.index.index import StaleIndexWarning
from zephon_torch.io.index.sidecar import encode_header
from zephon_torch.io.storage.ranges import open_ranges
from zephon_torch.support.lru import Recent

Compress = Callable[[bytes], bytes]
CODECS: dict[str, Compress] = {
    ".gz": lambda content: gzip.compress(content, mtime=0),
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
BOTH = pytest.mark.parametrize("codec", CODECS)
SKIPPABLE = b"\x5e\x2a\x4d\x18\x05\0\0\0table"


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("ZEPHON_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and limits of a few bytes, so that small files have many blocks and pieces."""
    monkeypatch.setattr(blocks, "_MIN_BLOCK_BYTES", 8)
    monkeypatch.setattr(blocks, "_STEP_BYTES", 5)
    monkeypatch.setattr(gzip_codec, "_INPUT_BYTES", 7)
    monkeypatch.setattr(decoded, "PIECE_BYTES", 6)
    monkeypatch.setattr(decoded, "_STEP_BYTES", 40)
    monkeypatch.setattr(decoded, "_MAX_AHEAD_BYTES", 90)
    monkeypatch.setattr(decoded, "_MAX_PIECES_BYTES", 30)
    monkeypatch.setattr(decoded, "_pieces", Recent())


def write(folder: Path, codec: str, *members: bytes, name: str = "data") -> Path:
    path = folder / f"{name}.jsonl{codec}"
    path.write_bytes(b"".join(map(CODECS[codec], members)))
    return path


def read(dataset: Dataset, samples: Sequence[int], shard: int = 0) -> list[Any]:
    with closing(dataset.open(shard)) as reader:
        return list(reader.read(np.array(samples, dtype=np.int64)))


def lines(start: int, stop: int) -> bytes:
    return b"".join(json.dumps({"id": i}).encode() + b"\n" for i in range(start, stop))


# --- what is read --------------------------------------------------------------------------------


def noisy() -> tuple[bytes, list[Any]]:
    """Case C11: a byte order mark, all kinds of ends, separators in strings, one line of 3 MB."""
    records = [{"id": i, "text": f"a\u2028b\u0085c {i}"} for i in range(40)]
    records[17]["text"] = "x" * 3_000_000
    ends = [b"\n", b"\r\n", b"\n\n", b"\r\n  \t\r\n"]
    texts = [json.dumps(record, ensure_ascii=False).encode() for record in records]
    content = b"\xef\xbb\xbf" + b"".join(text + ends[i % 4] for i, text in enumerate(texts))
    return content.rstrip(), records


@pytest.mark.parametrize("cut", [1, 100, 1_000_000, -3], ids=str)
@BOTH
def test_noise_in_two_members_reads_as_a_clean_copy(tmp_path: Path, codec: str, cut: int) -> None:
    content, records = noisy()
    dataset = Dataset.from_path("noisy", write(tmp_path, codec, content[:cut], content[cut:]))
    assert list(dataset) == records
    order = np.random.default_rng(0).integers(0, 40, 60)
    assert read(dataset, order.tolist()) == [records[i] for i in order]
    assert [dataset[i] for i in (39, 0, 17)] == [records[i] for i in (39, 0, 17)]


bits = st.sampled_from([b"\n", b"\r\n", b" ", b"{}", b"[1]", b"\xef\xbb\xbf", b"\xe2\x80\xa8"])


@pytest.mark.usefixtures("small")
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    members=st.lists(st.lists(bits | st.binary(max_size=9), max_size=9).map(b"".join), min_size=1),
    extra=st.sampled_from([b"", SKIPPABLE]),
    ranges=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), max_size=8),
)
@BOTH
def test_lines_and_ranges_are_those_of_the_decoded_bytes(
    tmp_path: Path, codec: str, members: list[bytes], extra: bytes, ranges: list[tuple[int, int]]
) -> None:
    content = b"".join(members)
    between = extra if codec == ".zst" else b""
    path = tmp_path / f"a.jsonl{codec}"
    path.write_bytes(between + between.join(map(CODECS[codec], members)) + between)
    file = stored(path)
    done: list[int] = []
    found = find_decoded_lines(file, codec, done.append)
    assert found.offsets.tolist() == [*naive_starts(content), len(content)]
    assert found.blocks is not None and sum(done) == file.num_bytes
    assert found.blocks[-1].tolist() == [file.num_bytes, len(content)]
    wanted = np.array([sorted((a % (len(content) + 1), b % (len(content) + 1))) for a, b in ranges])
    starts, stops = wanted.reshape(-1, 2).astype(np.int64).T
    with closing(decoded.open_decoded(file, open_ranges(file), found.blocks)) as opened:
        for _ in range(2):
            assert opened.read(starts, stops) == [
                content[a:b] for a, b in zip(starts, stops, strict=True)
            ]


@pytest.mark.parametrize("name", ["a", "100% ü #1 [b]?", "A.JSONL"])
@BOTH
def test_any_name_and_any_case_of_the_extension(tmp_path: Path, codec: str, name: str) -> None:
    path = write(tmp_path, codec, lines(0, 3), name=name)
    path = path.rename(path.with_suffix(codec.upper()))
    assert read(Dataset.from_path("a", path), [2, 0]) == [{"id": 2}, {"id": 0}]


def test_plain_and_compressed_shards_are_one_dataset_in_the_order_of_their_names(
    tmp_path: Path,
) -> None:
    write(tmp_path, ".zst", lines(0, 2), name="a")
    (tmp_path / "b.jsonl").write_bytes(lines(2, 4))
    write(tmp_path, ".gz", lines(4, 5), lines(5, 7), name="c")
    dataset = Dataset.from_path("a", tmp_path)
    assert [sample["id"] for sample in dataset] == list(range(7))
    assert dataset.shard_num_samples.tolist() == [2, 2, 3]
    sizes = [(tmp_path / shard.path).stat().st_size for shard in dataset.shards]
    assert dataset.shard_num_bytes.tolist() == sizes


def test_a_seekable_zstd_file_and_skippable_frames_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    first, second = map(CODECS[".zst"], (lines(0, 3), lines(3, 5)))
    path.write_bytes(SKIPPABLE + first + SKIPPABLE + SKIPPABLE + second + SKIPPABLE)
    assert [sample["id"] for sample in Dataset.from_path("a", path)] == list(range(5))
    path.write_bytes(SKIPPABLE)
    with pytest.warns(UserWarning, match="anew"):
        assert len(Dataset.from_path("a", path)) == 0


def test_frames_without_size_or_checksum_and_of_every_kind_of_block(tmp_path: Path) -> None:
    """Streams that were flushed have raw, repeated and empty blocks."""
    noise = np.random.Generator(np.random.Philox(1)).integers(0, 256, 300_000, np.uint8)
    records = ["a" * 400_000, noise.tobytes().hex(), list(range(1000))]
    written = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    stream = zstandard.ZstdCompressor(level=1).compressobj()
    parts = [stream.compress(written[:7]), stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    parts += [stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK), stream.compress(written[7:])]
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(b"".join([*parts, stream.flush()]))
    assert list(Dataset.from_path("a", path)) == records


@BOTH
def test_a_file_whose_members_hold_nothing_has_no_records(tmp_path: Path, codec: str) -> None:
    dataset = Dataset.from_path("a", write(tmp_path, codec, b"", b""))
    assert list(dataset) == []
    with pytest.raises(RecordError, match="has no record 0: it holds 0 records"):
        read(dataset, [0])


def test_zeros_behind_a_gzip_member_are_padding(tmp_path: Path) -> None:
    path = write(tmp_path, ".gz", lines(0, 3))
    path.write_bytes(path.read_bytes() + bytes(100_000))
    assert len(Dataset.from_path("a", path)) == 3


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
@BOTH
def test_a_file_cut_anywhere_names_the_last_good_record(tmp_path: Path, codec: str) -> None:
    members = [lines(0, 7), lines(7, 20)]
    path = write(tmp_path, codec, *members)
    whole, edge = path.read_bytes(), len(CODECS[codec](members[0]))
    for size in range(1, len(whole)):
        path = tmp_path / f"{size}.jsonl{codec}"
        path.write_bytes(whole[:size])
        if size == edge:
            assert len(Dataset.from_path("a", path)) == 7
            continue
        with pytest.raises(DatasetError, match=f"'{path}' cannot be decoded: ") as caught:
            Dataset.from_path("a", path)
        num_good = decodable_lines(whole[:size]) if codec == ".gz" else 0 if size < edge else 7
        last = f"the last good record is {num_good - 1}" if num_good else "no record before is good"
        assert last in str(caught.value), size
        start = 0 if size < edge else edge
        if size > start + 4:
            assert f"it ends inside the {'gzip member' if codec == '.gz' else 'zstd frame'} that "
            assert f"begins at byte {start}; " in str(caught.value)


def decodable_lines(content: bytes) -> int:
    count = 0
    while content.startswith(b"\x1f\x8b"):
        decoder = zlib.decompressobj(31)
        count += decoder.decompress(content).count(b"\n")
        content = decoder.unused_data
    return count


@pytest.mark.parametrize(
    ("codec", "at", "reason"),
    [
        (".gz", -6, "incorrect data check"),
        (".gz", -2, "incorrect length check"),
        (".zst", -1, "doesn't match checksum"),
    ],
)
def test_records_of_a_member_with_a_wrong_checksum_are_not_good(
    tmp_path: Path, codec: str, at: int, reason: str
) -> None:
    for stop in (20, 40_000):  # so large that much is decoded before the checksum is seen
        path = write(tmp_path, codec, lines(0, 7), lines(7, stop))
        path.write_bytes(flip(path.read_bytes(), at))
        with pytest.raises(DatasetError, match=rf"damaged \(.*{reason}\); .* record is 6\."):
            Dataset.from_path("a", path)


def flip(content: bytes, at: int) -> bytes:
    changed = bytearray(content)
    changed[at] ^= 0x10
    return bytes(changed)


@pytest.mark.parametrize(
    ("codec", "content", "reason"),
    [
        (".gz", b"", "it is empty, which is not gzip"),
        (".zst", b"", "it is empty, which is not zstd"),
        (".gz", b'{"id": 1}\n', r"it begins with b'\{\"', which is not gzip"),
        (".zst", b'{"id": 1}\n', r"it begins with b'\{\"id', which is not zstd"),
        (".gz", CODECS[".zst"](b"1\n"), "which is not gzip"),
        (".zst", CODECS[".gz"](b"1\n"), "which is not zstd"),
        (".gz", CODECS[".gz"](b"1\n") + b"garbage", "follows at byte 22 is not gzip; .* is 0"),
        (".gz", CODECS[".gz"](b"1\n") + bytes(9) + b"x", "follows at byte 31 is not gzip; .* is 0"),
        (".zst", CODECS[".zst"](b"1\n") + b"garbage", "follows at byte 15 is not zstd; .* is 0"),
        (".zst", CODECS[".zst"](b"1\n") + bytes(4), "what follows at byte 15 is not zstd; .* is 0"),
        (".zst", b"\x28\xb5\x2f\xfd\x00\x98\x01\0\0", "536,870,912 .* than 134,217,728; .*--long"),
        (".zst", b"\x28\xb5\x2f\xfd\x01\x00\x07\x01\0\0", "it needs the zstd dictionary 7"),
        (".zst", b"\x28\xb5\x2f\xfd\x00\x00\x07\0\0", "no block follows where one should"),
        (".zst", b"\x28\xb5\x2f\xfd\x00\x00\x01\0\x20", "no block follows where one should"),
        (".zst", SKIPPABLE[:-1], "it ends inside the zstd frame that begins at byte 0"),
        (".zst", SKIPPABLE[:6], "it ends inside the zstd frame that begins at byte 0"),
    ],
)  # fmt: skip
def test_what_is_not_the_codec_is_refused_in_words(
    tmp_path: Path, codec: str, content: bytes, reason: str
) -> None:
    path = tmp_path / f"a.jsonl{codec}"
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=f"'{path}' cannot be decoded: .*{reason}"):
        Dataset.from_path("a", path)
    assert os.listdir(tmp_path) == [path.name]  # no index of it


@BOTH
def test_a_compressed_file_that_is_named_as_if_it_were_not_is_refused(
    tmp_path: Path, codec: str
) -> None:
    path = write(tmp_path, codec, lines(0, 3)).rename(tmp_path / "a.jsonl")
    with pytest.raises(DatasetError, match=f"a.jsonl' is compressed: .* extension '{codec}'"):
        Dataset.from_path("a", path)


@BOTH
def test_a_bad_record_is_named_by_its_line_in_the_decoded_bytes(tmp_path: Path, codec: str) -> None:
    path = write(tmp_path, codec, b"\n1\n\n2\n{", b"]\n4\n")
    dataset = Dataset.from_path("web", path)
    place = rf"dataset 'web', file '{path}', line 5 \(record 2\): not valid JSON"
    with pytest.raises(RecordError, match=place):
        list(dataset)
    assert read(dataset, [3, 1, 0]) == [4, 2, 1]


changes = st.lists(
    st.tuples(st.sampled_from("xxxid"), st.integers(0, 10**4), st.integers(1, 255)), max_size=3
)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=changes, size=st.integers(0, 1000))
@BOTH
def test_a_mutated_file_gives_the_right_records_or_an_error(
    tmp_path: Path, codec: str, changes: list[tuple[str, int, int]], size: int
) -> None:
    """Members are checksummed: what is read at all is what was written, or whole members of it."""
    members = [lines(0, 9), lines(9, 30), lines(30, 33)]
    content = bytearray(b"".join(map(CODECS[codec], members)))
    for kind, at, value in changes:
        at %= len(content)
        content[at : at + (kind != "i")] = bytes([content[at] ^ value] if kind == "x" else [value])
        if kind == "d":
            del content[at]
    path = tmp_path / f"a.jsonl{codec}"
    path.write_bytes(content[: size or None])
    for old in tmp_path.glob(".*"):
        old.unlink()
    try:
        found = [sample["id"] for sample in Dataset.from_path("a", path)]
    except ZephonError:
        return
    assert found in [list(range(stop)) for stop in (9, 30, 33)]


def test_without_the_package_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, ".zst", lines(0, 3))
    Dataset.from_path("a", path)
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    for _ in range(2):
        with pytest.raises(ConfigurationError, match=r"zstandard.*'zephon-torch\[zstd\]'"):
            Dataset.from_path("a", path)
        for sidecar in tmp_path.glob(".*.zidx"):
            sidecar.unlink()


@BOTH
def test_a_file_changed_under_an_open_reader_is_an_error(tmp_path: Path, codec: str) -> None:
    path = write(tmp_path, codec, lines(0, 5000), lines(5000, 10_000))
    dataset = Dataset.from_path("a", path)
    content = path.read_bytes()
    with closing(dataset.open(0)) as reader:
        with open(path, "r+b") as stream:
            stream.seek(100)
            stream.write(flip(content, 1000)[100:1500])
        with pytest.raises(DatasetError, match=r"cannot be decoded: .*damaged.*was sound when"):
            reader.read(np.array([4999]))
        assert reader.read(np.array([9999])) == [{"id": 9999}]
        os.truncate(path, 100)
        with pytest.raises(DatasetError, match=r"was cut short: .* 100 now"):
            reader.read(np.array([1]))
    with pytest.raises(DatasetError, match="changed since the dataset was made"):
        dataset.open(0)


# --- what it costs -------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"\n" * (16 << 20), b"1" * (16 << 20)], ids=["lines", "line"])
@BOTH
def test_memory_is_bounded_however_dense_a_file_is(
    tmp_path: Path, codec: str, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "_MAX_DECODED_BYTES", 1 << 20)
    path = write(tmp_path, codec, content)
    tracemalloc.start()
    try:
        dataset = Dataset.from_path("a", path)
        if len(dataset):
            with pytest.raises(RecordError, match="record 0: 16,777,216 bytes when decoded, more"):
                dataset[0]
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[tuple[int, int]]]]:
    """Ranges of compressed bytes, request by request."""
    seen: list[list[tuple[int, int]]] = []

    def open_noted(file: Any) -> Any:
        opened = open_ranges(file)
        read = opened.read

        def note(starts: Any, stops: Any) -> list[bytes]:
            seen.append(list(zip(starts.tolist(), stops.tolist(), strict=True)))
            return read(starts, stops)

        monkeypatch.setattr(opened, "read", note)
        return opened

    monkeypatch.setattr(jsonl, "open_ranges", open_noted)
    yield seen


@BOTH
def test_only_blocks_that_are_needed_are_read_and_all_at_once(
    tmp_path: Path, codec: str, requests: list[list[tuple[int, int]]]
) -> None:
    members = [lines(4000 * i, 4000 * (i + 1)) for i in range(6)]
    path = write(tmp_path, codec, *members)
    ends = np.cumsum([0, *(len(CODECS[codec](member)) for member in members)]).tolist()
    spans = list(pairwise(ends))
    dataset = Dataset.from_path("a", path)
    with closing(dataset.open(0)) as reader:
        for numbers in ([12_001, 4001, 4500], [20_001, 12_100, 8001], [4001, 8001, 12_001]):
            found = reader.read(np.array(numbers, np.int64))
            assert [sample["id"] for sample in found] == numbers
    assert requests == [[spans[1], spans[3]], [spans[2], spans[5]]]


@pytest.mark.parametrize("times", [1, 2], ids=["middle", "large"])
@pytest.mark.usefixtures("small")
@BOTH
def test_reading_in_order_decodes_each_byte_once_and_large_blocks_twice(
    tmp_path: Path,
    codec: str,
    times: int,
    requests: list[list[tuple[int, int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Although large blocks keep no more than a few pieces, and are read in steps."""
    given: list[bytes] = []

    def open_noted(codec: str, source: Compressed) -> Any:
        decoder = open_decoder(codec, source)
        read = decoder.read
        decoder.read = lambda limit: given.append(read(limit)) or given[-1]  # type: ignore
        return decoder

    dataset = Dataset.from_path("a", write(tmp_path, codec, lines(0, 300), lines(300, 500)))
    monkeypatch.setattr(decoded, "open_decoder", open_noted)
    monkeypatch.setattr(decoded, "_ALWAYS_WHOLE_BYTES", 100)
    if times == 2:  # once for the checksums
        monkeypatch.setattr(decoded, "LARGE_BLOCK_BYTES", 100)
    else:
        monkeypatch.setattr(decoded, "_MAX_PIECES_BYTES", 1 << 20)
    with closing(dataset.open(0)) as reader:
        for start in range(0, 500, 7):
            numbers = np.arange(start, min(start + 7, 500))
            assert [s["id"] for s in reader.read(numbers)] == numbers.tolist()
        assert sum(map(len, given)) == times * len(lines(0, 500))
        if codec == ".gz":  # zstd reads no less than a block of its own
            assert max(stop - start for request in requests for start, stop in request) <= 40
        assert reader.read(np.array([3])) == [{"id": 3}]


def test_several_readers_of_one_thread_do_not_disturb_each_other(
    tmp_path: Path, small: None
) -> None:
    for name, codec in (("a", ".gz"), ("b", ".zst"), ("c", ".gz")):
        write(tmp_path, codec, lines(0, 60), lines(60, 100), name=name)
    dataset = Dataset.from_path("a", tmp_path)
    readers = [dataset.open(shard) for shard in range(3)]
    for number in range(100):
        for at, reader in enumerate(readers):
            wanted = number if at else 99 - number
            assert reader.read(np.array([wanted])) == [{"id": wanted}]
    for reader in readers:
        reader.close()
        reader.close()
    assert not len(decoded._pieces) and not len(decoded._decoders)


def test_what_was_used_least_recently_is_forgotten_first() -> None:
    recent: Recent[str] = Recent()
    for number, size in enumerate((4, 4, 2)):
        recent.put((number,), str(number), size, 10)
    assert recent.get((0,)) == "0"
    recent.put((3,), "3", 3, 10)
    assert [recent.get((number,)) for number in range(4)] == ["0", None, "2", "3"]
    recent.put((4,), "4", 100, 10)  # more than the limit: alone
    assert [recent.get((number,)) for number in range(5)] == [None, None, None, None, "4"]
    assert recent.pop((4,)) == "4" and recent.pop((4,)) is None
    recent.put((5, 1), "5", 10, 10)
    assert recent.get((5, 1)) == "5"
    recent.drop(5)
    assert (5, 1) not in recent and recent.num_bytes == 0


def test_each_thread_keeps_its_own() -> None:
    recent: Recent[str] = Recent()
    recent.put((1,), "here", 1, 10)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(recent.get, (1,)).result() is None
        pool.submit(recent.put, (1,), "there", 1, 10).result()
    assert recent.get((1,)) == "here"


@BOTH
def test_remote_files_are_decoded_here(tmp_path: Path, codec: str) -> None:
    fs = fsspec.filesystem("memory")
    members = [lines(4000 * i, 4000 * (i + 1)) for i in range(3)]
    try:
        fs.pipe_file(f"/zip/a b#%.jsonl{codec}", b"".join(map(CODECS[codec], members)))
        fs.pipe_file("/zip/b.jsonl", b'{"id": 1}\n')
        dataset = Dataset.from_path("a", "memory://zip")
        assert len(dataset) == 12_001
        assert read(dataset, [9000, 5, 11_999]) == [{"id": i} for i in (9000, 5, 11_999)]
        fs.pipe_file(f"/zip/a b#%.jsonl{codec}", CODECS[codec](lines(0, 3)))
        with pytest.raises(DatasetError, match="changed since the dataset was made"):
            dataset.open(0)
    finally:
        fs.rm("/zip", recursive=True)


# --- the index -----------------------------------------------------------------------------------


def test_codecs_are_told_by_extension() -> None:
    assert [codec_of(p) for p in ("a.jsonl.gz", "b.ZST", "c.gz/x.jsonl")] == [".gz", ".zst", None]


@BOTH
def test_the_index_holds_a_table_of_blocks(tmp_path: Path, codec: str) -> None:
    members = [lines(0, 9), lines(9, 4000), lines(4000, 8000), lines(8000, 8001), b""]
    path = write(tmp_path, codec, *members)
    Dataset.from_path("a", path)
    sizes = [len(CODECS[codec](member)) for member in members]
    raw = path.with_name(f".{path.name}.zidx").read_bytes()
    header = json.loads(raw[16 : 16 + int.from_bytes(raw[12:16], "little")])
    assert (header["num_samples"], header["num_blocks"]) == (8001, 3)  # small ones joined
    tables = np.frombuffer(raw, "<i8", offset=len(raw) - 8 * (8002 + 8))
    assert tables[:3].tolist() == [0, 10, 20] and tables[8001] == len(b"".join(members))
    assert tables[8002:].reshape(4, 2).tolist() == [
        [0, 0],
        [sum(sizes[:2]), len(b"".join(members[:2]))],
        [sum(sizes[:3]), len(b"".join(members[:3]))],
        [sum(sizes), len(b"".join(members))],
    ]
    assert header["crc32"] == zlib.crc32(tables.tobytes())


def forge(path: Path, table: list[list[int]]) -> None:
    """Write a sidecar with other blocks that is sound in itself."""
    file = stored(path)
    found = index.load_index(file, jsonl.INDEXER, len(Dataset.from_path("a", path)))
    forged = index.Index(found.offsets, np.array(table, np.int64))
    sidecar = Path(next(index.sidecar_paths(file)))
    header = encode_header(jsonl.INDEXER.origin(file), forged)
    sidecar.write_bytes(header + b"".join(table.tobytes() for table in forged.tables))


@pytest.mark.parametrize(
    "table",
    [
        [[0, 0], [-1, 20_000], [0, 0]],
        [[0, 0], [0, 100], [0, 0]],
        [[0, 0], [1, 1 << 62], [2, -(1 << 62) - 1], [0, 0]],
        [[0, 1], [0, 0]],
        [[1, 0], [0, 0]],
        [[0, 0], [1, 0]],
        [[0, 0]],
    ],
    ids=str,
)
def test_impossible_blocks_are_built_anew(tmp_path: Path, table: list[list[int]]) -> None:
    path = write(tmp_path, ".gz", lines(0, 9000))
    table[-1] = [path.stat().st_size + table[-1][0], len(lines(0, 9000)) + table[-1][1]]
    forge(path, table)
    dataset = Dataset.from_path("a", path)
    with pytest.warns(StaleIndexWarning, match="its blocks are not ascending from 0"):
        assert read(dataset, [8999]) == [{"id": 8999}]


def test_an_empty_file_is_refused_whatever_its_index_says(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.touch()
    none = index.Index(np.zeros(1, np.int64), np.zeros((1, 2), np.int64))
    content = encode_header(jsonl.INDEXER.origin(stored(path)), none)
    Path(next(index.sidecar_paths(stored(path)))).write_bytes(content + bytes(24))
    dataset = Dataset.from_path("a", path)
    with (
        pytest.warns(StaleIndexWarning, match="its blocks are not ascending from 0"),
        pytest.raises(DatasetError, match="it is empty, which is not gzip"),
    ):
        dataset.open(0)


@BOTH
def test_damaged_blocks_are_noticed_and_built_anew(tmp_path: Path, codec: str) -> None:
    dataset = Dataset.from_path("a", write(tmp_path, codec, lines(0, 9000), lines(9000, 9009)))
    (sidecar,) = tmp_path.glob(".*.zidx")
    sidecar.write_bytes(flip(sidecar.read_bytes(), -1))
    with pytest.warns(StaleIndexWarning, match="the checksum of its tables does not match"):
        assert read(dataset, [9008]) == [{"id": 9008}]


def test_an_index_of_the_layout_before_is_built_anew(tmp_path: Path) -> None:
    path = write(tmp_path, ".gz", lines(0, 9))
    dataset = Dataset.from_path("a", path)
    (sidecar,) = tmp_path.glob(".*.zidx")
    content = sidecar.read_bytes()
    sidecar.write_bytes(content[:8] + b"\1" + content[9:])
    with pytest.warns(StaleIndexWarning, match="its layout has version 1, 2 expected"):
        assert len(Dataset.from_path("a", path)) == 9 == len(list(dataset))


@pytest.mark.parametrize("at", [0, 5, 2000, 8999])
@BOTH
def test_blocks_that_are_possible_but_wrong_never_give_wrong_records(
    tmp_path: Path, codec: str, at: int
) -> None:
    members = [lines(0, 3000), lines(3000, 6000), lines(6000, 9000)]
    path = write(tmp_path, codec, *members)
    ends = np.cumsum([[len(CODECS[codec](m)), len(m)] for m in members], axis=0).tolist()
    wrong = [
        [[0, 0], [ends[0][0], ends[0][1] + 1], *ends[1:]],
        [[0, 0], [ends[0][0], ends[0][1] - 1], *ends[1:]],
        [[0, 0], [ends[0][0] + 1, ends[0][1]], *ends[1:]],
        [[0, 0], [ends[1][0], ends[0][1]], ends[2]],
        [[0, 0], [ends[0][0], ends[1][1]], ends[2]],
    ]
    for table in wrong:
        forge(path, table)
        dataset = Dataset.from_path("a", path)
        with closing(dataset.open(0)) as reader:
            try:
                assert reader.read(np.array([at])) == [{"id": at}]
            except ZephonError as error:
                assert "delete" in str(error)
        Path(next(index.sidecar_paths(stored(path)))).unlink()


# --- files of one large block --------------------------------------------------------------------


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Blocks are large from 100 bytes on; the codecs of the files that were decoded as a whole."""
    seen: list[str] = []

    def note(codec: str, *arguments: Any) -> Any:
        seen.append(codec)
        return blocks.decode(codec, *arguments)

    monkeypatch.setattr(whole, "LARGE_BLOCK_BYTES", 100)
    monkeypatch.setattr(decoded, "LARGE_BLOCK_BYTES", 100)
    monkeypatch.setattr(decoded, "_ALWAYS_WHOLE_BYTES", 100)
    monkeypatch.setattr(whole, "decode", note)
    monkeypatch.setattr(whole, "_warned", False)
    yield seen


@BOTH
def test_a_large_block_is_decoded_once_and_mapped_by_all(
    tmp_path: Path, codec: str, large: list[str], cache: Path
) -> None:
    path = write(tmp_path, codec, lines(0, 99), lines(99, 100))
    dataset = Dataset.from_path("a", path)
    readers = [dataset.open(0) for _ in range(2)]
    for reader in readers:
        assert reader.read(np.array([99, 0, 50])) == [{"id": i} for i in (99, 0, 50)]
    (entry,) = (cache / "decoded").glob("*.shard")
    assert entry.read_bytes() == lines(0, 100)
    maps = Path("/proc/self/maps").read_text()
    assert maps.count(str(entry)) == 2 and str(path) not in maps
    for reader in readers:
        reader.close()
        reader.close()
    assert str(entry) not in Path("/proc/self/maps").read_text()
    assert dataset[7] == {"id": 7}
    assert large == [codec]


def test_another_file_under_the_same_name_is_decoded_anew(
    tmp_path: Path, large: list[str], cache: Path
) -> None:
    for number in (15, 16):
        path = write(tmp_path, ".gz", lines(number, number + 50))
        os.utime(path, ns=(number, number))
        for sidecar in tmp_path.glob(".*.zidx"):
            sidecar.unlink()
        assert Dataset.from_path("a", path)[0] == {"id": number}
    assert large == [".gz", ".gz"]


def test_a_file_that_changes_while_it_is_decoded_is_not_kept(
    tmp_path: Path, large: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, ".gz", lines(0, 50))
    dataset = Dataset.from_path("a", path)

    def change(*arguments: Any) -> Any:
        os.utime(path, ns=(5, 5))
        return blocks.decode(*arguments)

    monkeypatch.setattr(whole, "decode", change)
    with pytest.raises(DatasetError, match=f"'{path}' changed since the dataset was made"):
        dataset.open(0)
    assert [entry.name for entry in (cache / "decoded").iterdir()] == ["zephon-cache.lock"]


def test_workers_share_what_is_decoded(tmp_path: Path, large: list[str], cache: Path) -> None:
    for shard in range(3):
        ids = range(shard * 40, shard * 40 + 40)
        write(tmp_path, (".gz", ".zst")[shard % 2], lines(ids.start, ids.stop), name=str(shard))
    dataset = Dataset.from_path("a", tmp_path)
    seen = []
    for workers in (0, 2):
        options = {"multiprocessing_context": "fork"} if workers else {}
        with DataLoader(dataset, 8, shuffle=True, num_workers=workers, **options) as loader:
            seen.append([batch["id"].tolist() for batch in loader])
    assert seen[0] == seen[1] and sorted(i for batch in seen[0] for i in batch) == list(range(120))
    assert len(list((cache / "decoded").glob("*.shard"))) == 3


@pytest.mark.parametrize("limit", ["0", "500", "1500"])
@BOTH
def test_without_room_it_is_decoded_as_it_is_read_and_one_warning_says_so(
    tmp_path: Path,
    codec: str,
    limit: str,
    large: list[str],
    small: None,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ZEPHON_DECODED_LIMIT", limit)
    for name in ("a", "b"):
        write(tmp_path, codec, lines(0, 100), name=name)
    dataset = Dataset.from_path("a", tmp_path)
    kept = dataset.open(0) if limit == "1500" else None  # as long as it is held there is no room
    with pytest.warns(whole.SlowDecodingWarning, match=rf"b.jsonl{codec}'.*\({int(limit):,} bytes"):
        reader = dataset.open(1)
    order = np.random.default_rng(3).permutation(100)
    for start in range(0, 100, 9):
        found = reader.read(order[start : start + 9])
        assert [sample["id"] for sample in found] == order[start : start + 9].tolist()
    dataset.open(1).close()  # a second warning would fail
    reader.close()
    if kept is not None:
        kept.close()
        dataset.open(1).close()
    assert large == [codec] * (2 if kept else 0)


def test_a_cache_folder_that_cannot_be_used_is_named_in_the_warning(
    tmp_path: Path, large: list[str], cache: Path
) -> None:
    (cache / "decoded").write_text("a file where the folder would be")
    dataset = Dataset.from_path("a", write(tmp_path, ".gz", lines(0, 100)))
    with pytest.warns(whole.SlowDecodingWarning, match=f"{cache}/decoded' cannot be used"):
        assert dataset[99] == {"id": 99}


def test_a_limit_that_is_no_number_is_refused(
    tmp_path: Path, large: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEPHON_DECODED_LIMIT", "16GB")
    dataset = Dataset.from_path("a", write(tmp_path, ".gz", lines(0, 100)))
    with pytest.raises(ConfigurationError, match="ZEPHON_DECODED_LIMIT must be a number of bytes"):
        dataset.open(0)


@BOTH
def test_a_large_block_that_is_damaged_since_is_refused(
    tmp_path: Path, codec: str, large: list[str], cache: Path
) -> None:
    path = write(tmp_path, codec, lines(0, 100))
    dataset, stamp = Dataset.from_path("a", path), path.stat().st_mtime_ns
    path.write_bytes(flip(path.read_bytes(), -8))
    os.utime(path, ns=(stamp, stamp))
    with pytest.raises(DatasetError, match=f"'{path}' cannot be decoded: .*damaged"):
        dataset.open(0)
    assert not list((cache / "decoded").glob("*.*rt"))
    (tmp_path / "gone").mkdir()
    path.rename(tmp_path / "gone" / path.name)
    with pytest.raises(DatasetError, match="is gone since the dataset was made"):
        dataset.open(0)
