"""JSON by orjson: the values and errors of the standard library, whatever the line."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon_torch.errors import DatasetError, RecordError
from zephon_torch.io import Dataset
from zephon_torch.io.formats.json import values as json_values
from zephon_torch.io.formats.json.values import parse_line, parse_lines

orjson = pytest.importorskip("orjson")

PARSERS = pytest.mark.parametrize("parser", [None, orjson.loads], ids=["stdlib", "orjson"])

ODD_NUMBERS = [
    *("-0", "-0.0", "0.1", "1e5", "1E-7", "5e-324", "1e-400", "1e400", "-1e400", "NaN", "Infinity"),
    *("-Infinity", "9223372036854775807", "-9223372036854775808", "-9223372036854775809"),
    *("18446744073709551615", "18446744073709551616", "9007199254740993.0", "9.3e18", "1" * 400),
    *("1" * 5000, "123456789012345678901234567890.5", "2.2250738585072011e-308"),
]
numbers = st.sampled_from(ODD_NUMBERS) | st.integers().map(str) | st.floats().map(json.dumps)
strings = st.text(max_size=8).map(json.dumps) | st.sampled_from(
    ['"\\ud800"', '"\\udc00\\ud800"', '"\\ud83d\\ude00"', '"\\u0000"', '"\x7f\u2028é😀"', '"\\/"']
)
names = st.sampled_from(['"a"', '"b"', '"\\ud800"', '""'])
BROKEN = ["", "tru", "01", "1.", "+1", "[1,]", '{"a":1,}', "'a'", '"\t"', "nan", "{} {}", "1 // c"]


def around(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    items = st.lists(inner, max_size=4)
    pairs = st.lists(st.tuples(names, inner).map(": ".join), max_size=4)  # names may come twice
    return items.map(lambda i: f"[{', '.join(i)}]") | pairs.map(lambda p: f"{{{','.join(p)}}}")


values = st.recursive(numbers | strings | st.sampled_from(["true", "null"]), around, max_leaves=12)
nested = st.tuples(st.sampled_from([5, 63, 64, 65, 200]), numbers).map(
    lambda pair: "[" * pair[0] + pair[1] + "]" * pair[0]
)
blanks = st.sampled_from(["", "", " ", "\t\r ", "\f", "\0", "\ufeff"])
texts = st.tuples(blanks, values | nested | st.sampled_from(BROKEN), blanks).map("".join)
lines = texts.map(str.encode) | st.sampled_from([b'"\xed\xa0\x80"', b"\xff", b'"\xc3'])


def outcome(parse: Any, *args: Any) -> str:
    """Value to the last bit and type, or type and text of the error."""
    try:
        return repr(parse(*args))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def by(parser: Any, content: list[bytes]) -> list[Any]:
    before, json_values.fast_loads = json_values.fast_loads, parser
    try:
        return parse_lines([memoryview(b"\n" + line + b"\n") for line in content])
    finally:
        json_values.fast_loads = before


@settings(max_examples=100)
@given(lines)
def test_a_line_has_the_value_or_error_of_the_standard_library(line: bytes) -> None:
    expected = outcome(lambda: [parse_line(b"\n" + line + b"\n")])
    assert outcome(by, orjson.loads, [line]) == expected
    if "Error" not in expected:
        assert expected == repr([json.loads(line)])


@settings(max_examples=50)
@given(st.lists(values.map(str.encode), max_size=5))
def test_lines_together_have_the_values_that_each_has_alone(content: list[bytes]) -> None:
    expected = [outcome(lambda line=line: by(None, [line])[0]) for line in content]
    bad = [text for text in expected if "Error: " in text]
    assert outcome(by, orjson.loads, content) in (bad or [f"[{', '.join(expected)}]"])


@pytest.mark.parametrize("place", ["{}", '{{"a": {}}}', '{{"a": [{}, 1]}}', "[0.5, [[{}]]]"])
def test_numbers_at_the_edges_of_what_orjson_can_hold(place: str) -> None:
    for number in ODD_NUMBERS:
        line = place.format(number).encode()
        assert outcome(by, orjson.loads, [line]) == outcome(by, None, [line]), number


def test_nesting_that_only_one_parser_would_follow_is_left_to_the_standard_library() -> None:
    def is_followed(parser: Any, line: bytes) -> bool:
        try:
            by(parser, [line])
        except RecursionError:
            return False
        return True

    followed = []
    for depth in (60, 500, 980, 1010, 1500, 100_000):
        line = b"[" * depth + b"]" * depth
        followed.append(is_followed(None, line))
        assert is_followed(orjson.loads, line) is followed[-1], depth
    assert followed[0] and not followed[-1]


ODD_LINES = [
    b'{"id": 0, "n": 18446744073709551616}',
    b'  {"id": 1}  \r',
    b'{"id": 2, "x": [NaN, {"y": 1e400}]}',
    b'{"id": 3, "x": "\\ud800"}',
    b'{"id": 4, "x": 0.5, "y": [[123456789012345678901]]}',
    b"5",
    b"[6, null]",
    b"\xef\xbb\xbf7",  # no value: a mark belongs at the start of a file
    b'{"id": 8',
    b'{"id": 9} {}',
]


def odd_shards(folder: Path) -> Dataset:
    for shard in range(3):
        (folder / f"{shard}.jsonl").write_bytes(b"\n".join(ODD_LINES) + b"\n" * (shard % 2))
    return Dataset.from_path("odd", folder)


@PARSERS
def test_readers_and_groups_give_what_json_loads_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parser: Any
) -> None:
    monkeypatch.setattr(json_values, "fast_loads", parser)
    dataset = odd_shards(tmp_path)
    readers = [dataset.open(shard) for shard in range(3)]
    group = readers[0].group_kind.make(3)
    for shard, reader in enumerate(readers):
        group.add(shard, reader)
    expected = [repr(json.loads(line)) for line in ODD_LINES[:7]]
    order = np.random.default_rng(0).integers(0, 7, 60)
    shards = np.arange(60) % 3
    together = group.read(shards, order)
    assert [*map(repr, together)] == [expected[i] for i in order]
    assert [*map(repr, readers[2].read(order))] == [expected[i] for i in order]
    for bad in (7, 8, 9):
        with pytest.raises(RecordError, match=f"line {bad + 1} .record {bad}.: not valid JSON: "):
            readers[1].read(np.array([bad]))
        with pytest.raises(ValueError, match=r"column|char"):
            group.read(np.array([0, 1]), np.array([2, bad]))
    for outside in (-1, -2, 10):
        with pytest.raises(IndexError):
            group.read(np.array([0, 1]), np.array([2, outside]))
    group.remove(1)
    readers[1].close()
    with pytest.raises(KeyError):
        group.read(np.array([1]), np.array([0]))
    with pytest.raises(DatasetError, match="closed"):
        readers[1].read(np.array([0]))
    readers[0].close()
    readers[2].close()


@PARSERS
def test_a_line_that_does_not_begin_behind_a_newline_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parser: Any
) -> None:
    """A number has ends that are numbers: only the byte before tells."""
    monkeypatch.setattr(json_values, "fast_loads", parser)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"11\n22\n33\n")
    dataset = Dataset.from_path("x", path)
    with closing(dataset.open(0)) as reader:
        group = reader.group_kind.make(1)
        group.add(0, reader)
        assert group.read(np.zeros(3, np.int64), np.arange(3)) == [11, 22, 33]
        with path.open("r+b") as file:
            file.write(b"1\n222")  # the same size
        with pytest.raises(ValueError, match="not at the start of a line"):
            group.read(np.zeros(1, np.int64), np.array([1]))
        with pytest.raises(DatasetError, match="does not begin at the start of a line"):
            reader.read(np.array([1]))


def test_the_environment_can_leave_orjson_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    assert json_values.find_orjson() is orjson.loads
    monkeypatch.setenv("ZEPHON_JSON", "stdlib")
    assert json_values.find_orjson() is None
    monkeypatch.delenv("ZEPHON_JSON")
    monkeypatch.setitem(sys.modules, "orjson", None)  # as if it were not installed
    assert json_values.find_orjson() is None
