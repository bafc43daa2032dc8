"""JSON lines: what counts as a record, how records are read, and how bad ones are named."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon_torch.errors import DatasetError, RecordError
from zephon_torch.io import Dataset
from zephon_torch.io.formats.json.lines import find_lines
from zephon_torch.io.remote.storage import connect
from zephon_torch.io.storage.files import StoredFile
from zephon_torch.io.storage.ranges import open_ranges


def write(folder: Path, content: bytes, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def stored(path: Path) -> StoredFile:
    storage, name = connect(str(path)).split()
    return StoredFile(storage, *storage.info(name))


def read(dataset: Dataset, *samples: int, shard: int = 0) -> list[Any]:
    with closing(dataset.open(shard)) as reader:
        return reader.read(np.array(samples, dtype=np.int64))


def naive_starts(content: bytes) -> list[int]:
    """Starts of records, found line by line."""
    starts, position = [], 0
    for line in content.split(b"\n"):
        text = line.removeprefix(b"\xef\xbb\xbf") if position == 0 else line
        if text.strip(b" \t\r"):
            starts.append(position + len(line) - len(text))
        position += len(line) + 1
    return starts


pieces = st.sampled_from(
    [
        b"\n",
        b"\r\n",
        b"\r",
        b" ",
        b"\t",
        b"{}",
        b"[1, 2]",
        b'"\xe2\x80\xa8"',
        b"\xef\xbb\xbf",
        b"\x00",
    ]
)


@given(content=st.lists(pieces | st.binary(max_size=4)).map(b"".join), block=st.integers(1, 40))
def test_lines_are_those_of_a_naive_reader_at_any_block_size(content: bytes, block: int) -> None:
    class Memory:
        def read(self, path: str, start: int, stop: int) -> bytes:
            return content[start:stop]

    done: list[int] = []
    file = StoredFile(Memory(), "x", len(content), 0)  # type: ignore[arg-type]
    offsets = find_lines(file, done.append, block)
    assert offsets.dtype == np.int64
    assert offsets.tolist() == [*naive_starts(content), len(content)]
    assert sum(done) == len(content)


noisy_ends = st.sampled_from([b"\n", b"\r\n", b"\n\n", b" \t\r\n \n", b"\n\r\n"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(rows=st.lists(st.tuples(values, st.sampled_from([b"", b" ", b"\t"]), noisy_ends)))
def test_values_survive_line_noise(tmp_path_factory: pytest.TempPathFactory, rows: Any) -> None:
    folder = tmp_path_factory.mktemp("noise")
    ascii_too = [
        json.dumps(value, ensure_ascii=bool(at % 2)) for at, (value, _, _) in enumerate(rows)
    ]
    lines = [pad + text.encode() + end for text, (_, pad, end) in zip(ascii_too, rows, strict=True)]
    dataset = Dataset.from_path("noise", write(folder, b"\xef\xbb\xbf\n" + b"".join(lines)))
    assert list(dataset) == [value for value, _, _ in rows]


def test_noisy_file_reads_as_its_clean_copy_in_any_order(tmp_path: Path) -> None:
    records = [{"id": i, "text": f"a\u2028b\u0085c {i}"} for i in range(20)]
    records[7]["text"] = "x" * 3_000_000
    texts = [json.dumps(record, ensure_ascii=False).encode() for record in records]
    ends = [b"\n", b"\r\n", b"\n\n", b"\r\n  \t\r\n"]
    noisy = b"\xef\xbb\xbf" + b"".join(text + ends[i % 4] for i, text in enumerate(texts))
    dataset = Dataset.from_path("noisy", write(tmp_path, noisy.rstrip()))
    assert list(dataset) == records
    order = np.random.default_rng(0).integers(0, 20, 50)
    assert read(dataset, *order) == [records[i] for i in order]
    assert [dataset[i] for i in (0, 7, 19, -1)] == [records[i] for i in (0, 7, 19, 19)]


@pytest.mark.parametrize("content", [b"", b"\n", b" \r\n\t", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n "])
def test_file_without_records_is_an_empty_shard(tmp_path: Path, content: bytes) -> None:
    dataset = Dataset.from_path("empty", write(tmp_path, content))
    assert (dataset.num_shards, len(dataset), list(dataset)) == (1, 0, [])
    assert read(dataset) == []
    with pytest.raises(RecordError, match=r"data\.jsonl' has no record 0: it holds 0 records"):
        read(dataset, 0)


def test_repeated_numbers_give_separate_objects(tmp_path: Path) -> None:
    first, second = read(Dataset.from_path("a", write(tmp_path, b'{"id": 1}\n')), 0, 0)
    assert first == second == {"id": 1} and first is not second


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"id": }', r"not valid JSON: Expecting value at character 8"),
        (b"{} {}", r"not valid JSON: Extra data at character 4"),
        (b"  {} x", r"not valid JSON: Extra data at character 6"),
        (b"nul", r"not valid JSON: Expecting value at character 1"),
        (b'"\xff"', r"not valid UTF-8: invalid start byte at byte 2"),
        (b"1\r2", r"not valid JSON: Extra data at character 3"),
        (b"1\x0b", r"not valid JSON: Extra data at character 2"),
        (b"[" * 100_000, r"not valid JSON: maximum recursion depth exceeded"),
        (b"9" * 5000, r"not valid JSON: Exceeds the limit"),
    ],
)
@pytest.mark.parametrize("number", [0, 2])
def test_bad_record_is_named_by_dataset_file_line_and_number(
    tmp_path: Path, line: bytes, reason: str, number: int
) -> None:
    lines = [b"1", b"2", b"3", b"4"]
    lines[number] = line
    path = write(tmp_path, b"\n" + b"\n \n".join(lines))
    dataset = Dataset.from_path("web", path)  # counting does not parse
    assert len(dataset) == 4
    place = rf"dataset 'web', file '{path}', line {2 + 2 * number} \(record {number}\): {reason}"
    with pytest.raises(RecordError, match=place):
        read(dataset, 1, number)
    assert read(dataset, 1, 3) == [2, 4]


@pytest.mark.parametrize("number", [-1, 2, 2**62])
def test_number_outside_of_the_shard_is_refused(tmp_path: Path, number: int) -> None:
    dataset = Dataset.from_path("a", write(tmp_path, b"1\n2\n"))
    with pytest.raises(RecordError, match=rf"has no record {number}: it holds 2 records"):
        read(dataset, 0, number)


def test_closed_reader_says_so_and_closes_twice(tmp_path: Path) -> None:
    reader = Dataset.from_path("a", write(tmp_path, b"1\n")).open(0)
    reader.close()
    reader.close()
    with pytest.raises(DatasetError, match="is closed"):
        reader.read(np.array([0]))


def test_readers_leave_no_descriptor_or_map_behind(tmp_path: Path) -> None:
    dataset = Dataset.from_path("a", write(tmp_path, b"1\n"))

    def held() -> tuple[int, int]:
        maps = Path("/proc/self/maps").read_text()
        return len(os.listdir("/proc/self/fd")), maps.count(str(tmp_path))

    before = held()
    for _ in range(10):
        assert read(dataset, 0) == [1]
    assert held() == before


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"1\n2\n3\n", r"6 bytes then, 4 now"),
        (b"1\n2\n", r"4 bytes then, 6 now"),
        (b"", r"0 bytes then, 4 now"),
    ],
)
def test_file_of_another_size_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    path = write(tmp_path, content)
    dataset = Dataset.from_path("a", path)
    path.write_bytes(b"1\n2\n" if len(content) != 4 else b"1\n2\n3\n")
    with pytest.raises(DatasetError, match=rf"{path}' changed since .*{reason}"):
        dataset.open(0)


def test_file_of_the_same_size_but_another_time_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, b"1\n2\n")
    dataset = Dataset.from_path("a", path)
    os.utime(path, ns=(5, 5))
    with pytest.raises(DatasetError, match=r"modified at \d+ ns then, at 5 now"):
        dataset.open(0)


def test_missing_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, b"1\n")
    dataset = Dataset.from_path("a", path)
    path.unlink()
    with pytest.raises(DatasetError, match=rf"{path}' is gone"):
        dataset.open(0)


def test_file_cut_short_under_an_open_reader_is_an_error_not_a_crash(tmp_path: Path) -> None:
    path = write(tmp_path, b"1\n" * 10_000)
    with closing(Dataset.from_path("a", path).open(0)) as reader:
        os.truncate(path, 2)
        with pytest.raises(DatasetError, match=r"was cut short: 20,000 bytes .* 2 now"):
            reader.read(np.array([9_999]))


def test_file_cut_short_while_it_is_scanned_is_an_error(tmp_path: Path) -> None:
    file = stored(write(tmp_path, b"1\n2\n"))
    os.truncate(tmp_path / "data.jsonl", 2)
    with pytest.raises(DatasetError, match=r"2 bytes now, 4 when it was listed"):
        find_lines(file, int)


def test_ranges_come_in_the_order_asked_for(tmp_path: Path) -> None:
    with closing(open_ranges(stored(write(tmp_path, b"abcdef")))) as ranges:
        starts = np.array([4, 0, 0, 2], dtype=np.int64)
        assert ranges.read(starts, starts + 2) == [b"ef", b"ab", b"ab", b"cd"]
