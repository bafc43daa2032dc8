"""From a path to data files: what is refused, in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zephon_torch.errors import ConfigurationError, DatasetError
from zephon_torch.io import Dataset, formats


def test_dataset_is_found_missing_empty_or_mixed_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, message: str, format: str | None = None) -> None:
        with pytest.raises(DatasetError, match=message):
            Dataset.from_path("a", path, format=format)

    refuse(tmp_path / "none", f"no file or folder '{tmp_path}/none'")
    refuse(tmp_path / "*.jsonl", rf"no file matches '{tmp_path}/\*.jsonl'")
    refuse(
        tmp_path,
        r"holds no data files: found nothing, expected 'jsonl' \(.jsonl .ndjson .gz .zst\)",
    )
    for i in range(7):
        (tmp_path / f"{i}.txt").write_text("1\n")
    refuse(tmp_path, "found '0.txt', .*'4.txt' and 2 more, expected 'jsonl'")
    refuse(tmp_path, "found '0.txt'.* expected 'jsonl'", "jsonl")
    refuse(tmp_path / "0.txt", "cannot tell the format of '.*0.txt'.*'jsonl'.*with format=")
    refuse(tmp_path / "*.txt", "cannot tell the format of '.*0.txt'.*'jsonl'.*with format=")
    assert list(Dataset.from_path("a", tmp_path / "0.txt", format="jsonl")) == [1]
    assert list(Dataset.from_path("a", tmp_path / "*.txt", format="jsonl")) == [1] * 7

    monkeypatch.setitem(formats.FORMATS, "text", formats.FormatEntry((".txt",), "nowhere"))
    (tmp_path / "z.jsonl").write_text("5\n")
    for path in (tmp_path, tmp_path / "*"):
        refuse(path, "more than one format: .*'0.txt' is text.* pick one with format=")
    assert list(Dataset.from_path("a", tmp_path, format="jsonl")) == [5]


@pytest.mark.parametrize("extension", ["bz2", "xz", "lz4", "tgz", "XZ"])
def test_shards_of_an_unknown_compression_are_not_left_out_silently(
    tmp_path: Path, extension: str
) -> None:
    (tmp_path / "a.jsonl").write_text("1\n")
    (tmp_path / f"b.jsonl.{extension}").write_bytes(b"")
    for path in (tmp_path, tmp_path / "*", tmp_path / f"b.jsonl.{extension}"):
        with pytest.raises(
            DatasetError,
            match=rf"b.jsonl.{extension}' is compressed in a way that .*gzip or zstd",
        ):
            Dataset.from_path("a", path)


@pytest.mark.parametrize("path", ["", None, 3, ["a"], b"a"])
def test_path_must_be_a_path(path: Any) -> None:
    with pytest.raises(ConfigurationError, match="path must be a folder, a file or a pattern"):
        Dataset.from_path("a", path)


def test_unknown_format_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="unknown format 'csv'; known are 'jsonl'"):
        Dataset.from_path("a", tmp_path, format="csv")


def test_what_was_found_and_what_is_missing_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"")
    with pytest.raises(DatasetError, match=r"'a.bin' \(tokens\), expected .*\(.bin with .idx\)"):
        Dataset.from_path("a", tmp_path, format="megatron")
    (tmp_path / "a.idx").write_bytes(b"")
    with pytest.raises(DatasetError, match=r"'a.bin' \(megatron\), 'a.idx', expected 'tokens'"):
        Dataset.from_path("a", tmp_path, format="tokens")


def test_patterns_with_braces_say_that_these_are_not_expanded(tmp_path: Path) -> None:
    for pattern in ("p-{0..3}.jsonl", "*.{jsonl,ndjson}"):
        with pytest.raises(DatasetError, match=r"braces are not expanded, use \*"):
            Dataset.from_path("a", tmp_path / pattern)
