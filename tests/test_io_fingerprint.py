"""The identity of a dataset: what changes it, what does not, and the exact encoding."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon_torch.io import Dataset


def test_fingerprint_is_the_documented_encoding(folder: Path) -> None:
    def text(value: str) -> bytes:
        return b"s" + len(value).to_bytes(8, "little") + value.encode()

    def number(value: int) -> bytes:
        return b"i" + (8).to_bytes(8, "little") + value.to_bytes(8, "little")

    def column(values: list[int]) -> bytes:
        content = b"".join(value.to_bytes(8, "little") for value in values)
        return b"a" + len(content).to_bytes(8, "little") + content

    paths = ["a/0.jsonl", "a/1.jsonl", "b.jsonl", "c.jsonl"]
    joined = "".join(paths)
    encoded = text("zephon_torch.dataset") + number(1) + text("web") + text("jsonl") + number(4)
    encoded += column([len(path) for path in paths])
    encoded += b"b" + len(joined).to_bytes(8, "little") + joined.encode()
    encoded += column([7, 30, 0, 1]) + column([70, 327, 0, 11])
    assert Dataset.from_path("web", folder).fingerprint == hashlib.sha256(encoded).hexdigest()


def test_fingerprints_are_pinned(folder: Path) -> None:
    assert [
        Dataset.from_path("web", folder).fingerprint,
        Dataset.from_samples("web", range(5), shard_sizes=[2, 3]).fingerprint,
        Dataset.from_torch("web", range(5), version="v1").fingerprint,
    ] == [
        "7c13c00d6bdce71668eafcd91f68e8b6d45376047152902740c2a92059028370",
        "fbd48a884cb933c9e6d2eb5bbb893493342fa78213ae5a4fdbfea714c5a4b82c",
        "47e347c6bc6fa868efb7c77dac8f72ae5c9e2ef95ea52e0cc017a63303dee18b",
    ]


def test_fingerprint_tells_what_matters_and_nothing_else(folder: Path, tmp_path: Path) -> None:
    def make(name: str = "web") -> str:
        return Dataset.from_path(name, folder).fingerprint

    first = make()
    moved = folder.rename(tmp_path / "elsewhere")
    assert Dataset.from_path("web", moved).fingerprint == first
    assert Dataset.from_path("web", moved.as_uri()).fingerprint == first
    assert Dataset.from_path("web", moved / "**" / "*.jsonl").fingerprint == first
    moved.rename(folder)
    assert make("other") != first
    (folder / "c.jsonl").rename(folder / "d.jsonl")  # a renamed shard
    assert (renamed := make()) != first
    with (folder / "d.jsonl").open("a") as file:
        file.write("\n")  # another size, the same records
    with pytest.warns(UserWarning, match="anew"):
        assert make() not in (first, renamed)


@given(
    sizes=st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=2, max_size=2, unique_by=tuple)
)
def test_fingerprint_in_memory_tells_shard_sizes_apart(sizes: list[list[int]]) -> None:
    one, other = (Dataset.from_samples("a", range(sum(s)), shard_sizes=s) for s in sizes)
    assert one.fingerprint != other.fingerprint


def test_fingerprint_in_memory_knows_kind_and_version() -> None:
    made = [
        Dataset.from_samples("a", [1, 2]),
        Dataset.from_torch("a", [1, 2]),
        Dataset.from_torch("a", [1, 2], version="1"),
        Dataset.from_torch("a", [1, 2], version=""),
    ]
    assert len({dataset.fingerprint for dataset in made}) == 4
    assert made[0].fingerprint == Dataset.from_samples("a", [8, 9]).fingerprint
