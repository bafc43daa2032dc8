"""JSON lines and their indexes with bytes changed, cut, put in: right answers or an error."""

from __future__ import annotations

import gzip
import json
import os
import warnings
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon_torch.errors import ZephonError
from zephon_torch.io import Dataset

RECORDS = [{"id": i, "text": "ö" * (i % 4)} for i in range(40)]
LINES = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()

# where in the file, 0 to 1; what is done there; with which byte
changes = st.lists(
    st.tuples(
        st.floats(0, 1), st.sampled_from("nudge change cut insert drop zero".split()), st.binary()
    ),
    min_size=1,
    max_size=4,
)


def mutated(content: bytes, todo: list[tuple[float, str, bytes]]) -> bytes:
    for place, how, new in todo:
        at = int(place * len(content))
        if how == "cut":
            content = content[:at]
        elif how == "drop":
            content = content[:at] + content[at + 1 :]
        elif how == "nudge" and content:  # the lowest byte of a number: an index off by a byte
            at = min(at, len(content) - 1) // 8 * 8
            content = content[:at] + bytes([(content[at] + 1) % 256]) + content[at + 1 :]
        elif how == "zero":
            content = content[:at] + bytes(min(8, len(content) - at)) + content[at + 8 :]
        else:
            behind = at + len(new) if how == "change" else at
            content = content[:at] + new + content[behind:]
    return content


@pytest.fixture(scope="module", params=["plain", "gz"])
def indexed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A shard with a sound index."""
    path = tmp_path_factory.mktemp("index") / "a.jsonl"
    if request.param == "gz":
        path = path.with_name("a.jsonl.gz")
        members = [LINES[i : i + 500] for i in range(0, len(LINES), 500)]
        path.write_bytes(b"".join(map(gzip.compress, members)))
    else:
        path.write_bytes(LINES)
    assert list(Dataset.from_path("x", path)) == RECORDS
    return path


@settings(max_examples=150)
@given(todo=changes)
def test_a_changed_index_is_never_believed(
    indexed: Path, todo: list[tuple[float, str, bytes]]
) -> None:
    beside = indexed.with_name(f".{indexed.name}.zidx")
    sound = beside.read_bytes()
    try:
        beside.write_bytes(mutated(sound, todo))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it says that it is built anew
            assert list(Dataset.from_path("x", indexed)) == RECORDS
    finally:
        beside.write_bytes(sound)


@settings(max_examples=150)
@given(todo=changes)
def test_changed_lines_give_what_json_gives_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, todo: list[tuple[float, str, bytes]]
) -> None:
    content = mutated(LINES, todo)
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(content)
    lines = content.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    filled = [line for line in lines if line.strip(b" \t\r")]
    dataset = Dataset.from_path("x", path)
    assert len(dataset) == len(filled)
    for number, line in enumerate(filled):
        try:
            expected = json.loads(line.decode().strip(" \t\r"))
        except (ValueError, RecursionError):
            with pytest.raises(ZephonError, match=f"record {number}"):
                dataset[number]
        else:
            assert dataset[number] == expected
    os.unlink(path)
