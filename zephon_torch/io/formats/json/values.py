"""Values of lines of JSON: what `json.loads` makes of them, by the fastest parser that is there.

orjson (``pip install 'zephon-torch[fast]'``) parses text at about twice the speed of the standard
library. Where the two differ the standard library decides, so that the same file gives the same
samples on every machine:

- orjson refuses NaN, Infinity, numbers beyond a double, lone surrogates and deep nesting: a line
  that it refuses is parsed once more;
- it makes floats of whole numbers beyond 64 bits, without a word: so is a line with a float that
  large;
- it has a limit of its own on nesting: so is what is nested too deep to be looked through here.

``ZEPHON_JSON=stdlib`` in the environment leaves orjson aside, from the first import on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import chain
from typing import Any

from zephon_torch.io.formats.json.lines import BLANKS, NEWLINE
from zephon_torch.io.storage.ranges import View

BLANK_CHARACTERS = BLANKS.decode()

_PLAIN = {str, int, float, bool, type(None)}  # all but lists and dicts
_MAX_EXACT = 2.0**63  # no float below it was a whole number that does not fit
_MAX_DEPTH = 64

_raw_decode = json.JSONDecoder().raw_decode


def find_orjson() -> Callable[[View], Any] | None:
    """Its parser, where it is installed and wanted."""
    if os.environ.get("ZEPHON_JSON") == "stdlib":
        return None
    try:
        loads: Callable[[View], Any] = import_module("orjson").loads
    except ImportError:
        return None
    return loads


fast_loads = find_orjson()


def parse_lines(lines: Sequence[View]) -> list[Any]:
    """Values of lines, each with the newline before it in front.

    Raises:
        ValueError, RecursionError: One of them is no such line, or holds no JSON; `parse_line` of
            it says so.
    """
    loads = fast_loads
    if loads is None:
        return [parse_line(line) for line in lines]
    values = []
    for line in lines:
        try:
            value = loads(line)
        except ValueError:
            value = parse_line(line)
        if line[0] != NEWLINE:  # orjson skips blanks
            raise ValueError(_NO_START)
        values.append(value)
    if not _are_exact(values):
        for number, value in enumerate(values):
            if not _are_exact([value]):
                values[number] = parse_line(lines[number])
    return values


def parse_line(line: View) -> Any:
    """Parse a line by the standard library; the newline before it stands in front.

    Raises:
        ValueError, RecursionError: It is no such line, or holds no JSON.
    """
    text = str(line, "utf-8")
    if text[:1] != "\n":
        raise ValueError(_NO_START)
    start = 1
    if text[1:2] in BLANK_CHARACTERS:  # indented: the scanner itself skips no blanks
        start = len(text) - len(text[1:].lstrip(BLANK_CHARACTERS))
    value, stop = _raw_decode(text, start)
    if (rest := text[stop:]) != "\n" and (extra := rest.lstrip(BLANK_CHARACTERS)):
        raise json.JSONDecodeError("Extra data", text, len(text) - len(extra))
    return value


_NO_START = "not at the start of a line"


def _are_exact(values: Iterable[Any]) -> bool:
    """Whether nothing in values by orjson may be else than the standard library has it."""
    with suppress(TypeError):  # mostly dicts: a quick way into them
        values = [*chain.from_iterable(map(dict.values, values))]
    for _ in range(_MAX_DEPTH):
        kinds = set(map(type, values))
        if float in kinds:
            floats = [value for value in values if type(value) is float]
            if min(floats) <= -_MAX_EXACT or max(floats) >= _MAX_EXACT:
                return False
        if kinds <= _PLAIN:
            return True
        dicts = [value.values() for value in values if type(value) is dict]
        lists = [value for value in values if type(value) is list]
        values = [*chain.from_iterable(dicts), *chain.from_iterable(lists)]
    return False
