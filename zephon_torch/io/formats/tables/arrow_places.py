"""Where the record batches of an Arrow IPC stream or file lie, and how many rows each holds.

pyarrow reads the messages, but tells neither where they lie nor how many rows a batch has without
its values. Both come from the headers: of a stream by going from message to message, of a file by
the list in its footer. Source: "Serialization and Interprocess Communication" of the Arrow columnar
format, with ``File.fbs`` and ``Message.fbs``.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import DatasetError
from zephon_torch.io.formats.tables.libarrow import ipc, pa
from zephon_torch.io.formats.tables.table import refusing
from zephon_torch.io.storage.ranges import View

Int64Array = npt.NDArray[np.int64]

MAGIC = b"ARROW1"
_MARKER = b"\xff\xff\xff\xff"  # begins each message since Arrow 0.15
_END_BYTES = 8  # the marker and a length of 0
_START = struct.Struct("<ii")  # the marker, as a number, and the length of the header
_MAX_ROWS = 1 << 48
_MAX_PADDING = 63 + 8  # to a multiple of 64 bytes, behind an end mark
_BLOCK = np.dtype([("start", "<i8"), ("header", "<i4"), ("padding", "<i4"), ("body", "<i8")])
_NOTHING = pa.schema([])


class Headers(NamedTuple):
    """The headers of one file.

    Attributes:
        source: a ``pyarrow.NativeFile`` of the whole file; what is no header may read as zeros.
        begin: called with the position of each message before it is read.
        num_bytes: size of the file.
        name: of the file, for messages.
    """

    source: Any
    begin: Callable[[int], object]
    num_bytes: int
    name: str


class Dictionary(NamedTuple):
    """A message of a stream that defines a dictionary, or adds to one.

    Attributes:
        start, stop: byte positions.
        number: of the dictionary.
        is_delta: whether it adds to what was defined before.
    """

    start: int
    stop: int
    number: int
    is_delta: bool


class Blocks(NamedTuple):
    """Blocks that the footer of a file lists.

    Attributes:
        dictionaries, batches: arrays of `_BLOCK`.
        stop: byte position of the footer.
    """

    dictionaries: npt.NDArray[Any]
    batches: npt.NDArray[Any]
    stop: int

    @property
    def starts(self) -> list[int]:
        """Byte positions of all these messages."""
        return [*self.dictionaries["start"].tolist(), *self.batches["start"].tolist()]


class Places(NamedTuple):
    """Where the record batches of one file lie.

    Attributes:
        starts, stops: int64[num_batches], byte positions of their messages.
        edges: int64[num_batches + 1], number of the first row of each, then of all rows.
        schema_stop: of a stream, byte position behind its first message.
        dictionaries: of a stream, in its order.
    """

    starts: Int64Array
    stops: Int64Array
    edges: Int64Array
    schema_stop: int = 0
    dictionaries: Sequence[Dictionary] = ()

    def doubtful(self) -> list[int]:
        """Numbers of batches that claim more rows than their messages have bits, or none.

        One of none may be one whose number of rows is damaged: only reading it tells.
        """
        rows = np.diff(self.edges)
        claims = (rows == 0) | (rows > 8 * (self.stops - self.starts))
        return [int(number) for number in np.flatnonzero(claims)]


def find_in_stream(headers: Headers) -> Places:
    """Go through a stream from message to message.

    Raises:
        DatasetError: It is no stream, is not whole, or holds a message that is not understood.
    """
    source, name = headers.source, headers.name
    check_begins(headers, 0)
    source.seek(0)
    messages = ipc.MessageReader.open_stream(source)
    batches: list[tuple[int, int, int]] = []
    dictionaries: list[Dictionary] = []
    schema_stop = 0
    while True:
        start = int(source.tell())
        headers.begin(start)
        message = _next(messages, start, name)
        stop = int(source.tell())
        if message is None:
            _check_end(headers, start, stop)
            break
        if not schema_stop:
            if message.type != "schema":
                raise DatasetError(f"{name} has no schema: it is no Arrow IPC stream or file")
            schema_stop = stop
        elif message.type == "record batch":
            batches.append((start, stop, _count_rows(message, start, name)))
        elif message.type == "dictionary":
            dictionaries.append(Dictionary(start, stop, *_dictionary(message)))
        else:
            _refuse_message(message, start, name)
    return _places(batches, name)._replace(schema_stop=schema_stop, dictionaries=dictionaries)


def find_in_file(headers: Headers, blocks: Blocks) -> Places:
    """Look at the batches that a footer lists.

    Raises:
        DatasetError: What it lists is not there, or is not understood.
    """
    _check_gaps(blocks, headers.name)
    listed = blocks.batches.tolist()
    check_begins(headers, listed[0][0] if listed else len(MAGIC) + 2)
    for start, *_ in blocks.dictionaries.tolist():
        _read(headers, start, "dictionary")
    batches = []
    for start, num_header, _, num_body in listed:
        stop = start + num_header + num_body
        message = _read(headers, start, "record batch")
        if not stop - len(message.body) > start or stop > headers.num_bytes:
            _refuse_cut(headers.name, f"its footer does not fit to the batch at byte {start:,}")
        batches.append((start, stop, _count_rows(message, start, headers.name)))
    return _places(batches, headers.name)


def header_stop(head: View) -> int:
    """How long the header is that some bytes begin with."""
    if len(head) < _START.size:
        return len(head)
    marker, length = _START.unpack_from(head)
    num_bytes = _START.size + length if marker == -1 else 4 + marker
    return max(0, int(num_bytes))


def check_begins(headers: Headers, start: int) -> None:
    """Refuse a file whose first message has no marker, if it is one of before Arrow 0.15.

    Those of other writers may lack a schema at the beginning of a file.
    """
    headers.begin(start)
    headers.source.seek(start)
    if headers.source.read(len(_MARKER)) == _MARKER:
        return
    headers.source.seek(start)
    try:
        message = ipc.read_message(headers.source)
    except (pa.ArrowException, OSError, EOFError):
        message = None
    if message is not None and message.type in ("schema", "record batch"):
        raise DatasetError(
            f"{headers.name} is old: it was written before Arrow 0.15, which changed the format; "
            "read it and write it anew with pyarrow"
        )
    if start == 0:
        raise DatasetError(
            f"{headers.name} is not an Arrow IPC stream or file, or is corrupt: no message at byte "
            "0; restore it or move it out of the dataset"
        )


def _next(messages: Any, start: int, name: str) -> Any:
    """The message at a position; None at the end of the stream."""
    with refusing(f"the message at byte {start:,} of {name}", DatasetError):
        try:
            return messages.read_next_message()
        except StopIteration:
            return None


def _read(headers: Headers, start: int, kind: str) -> Any:
    headers.begin(start)
    with refusing(f"the message at byte {start:,} of {headers.name}", DatasetError):
        headers.source.seek(start)
        message = ipc.read_message(headers.source)
    if message.type != kind:
        _refuse_message(message, start, headers.name)
    return message


def _count_rows(message: Any, start: int, name: str) -> int:
    with refusing(f"the batch at byte {start:,} of {name}", DatasetError):
        num_rows = int(ipc.read_record_batch(message, _NOTHING).num_rows)
    if not 0 <= num_rows < _MAX_ROWS:
        raise DatasetError(
            f"{name} is corrupt: a batch at byte {start:,} claims {num_rows:,} rows; restore it or "
            "move it out of the dataset"
        )
    return num_rows


def _places(batches: Sequence[tuple[int, int, int]], name: str) -> Places:
    table = np.array(batches, np.int64).reshape(-1, 3)
    num_rows = sum(rows for _, _, rows in batches)
    if num_rows >= _MAX_ROWS:
        raise DatasetError(f"{name} is corrupt: its batches claim {num_rows:,} rows; restore it")
    edges = np.concatenate(([0], np.cumsum(table[:, 2])))
    return Places(table[:, 0], table[:, 1], edges)


def _check_end(headers: Headers, start: int, stop: int) -> None:
    if stop - start != _END_BYTES:
        _refuse_cut(headers.name, f"no end mark at byte {start:,}")
    if stop != headers.num_bytes:
        raise DatasetError(
            f"{headers.name} has {headers.num_bytes - stop:,} bytes behind the end mark of its "
            f"stream, at byte {stop:,}: streams that are joined must be read and written anew"
        )


def _check_gaps(blocks: Blocks, name: str) -> None:
    """Refuse bytes between or behind messages that no footer lists: files that were joined, say."""
    spans = [(s, s + n + m) for table in blocks[:2] for s, n, _, m in table.tolist()]
    spans.sort()
    for (_, stop), (start, _) in pairwise([*spans, (blocks.stop, 0)]):
        if not 0 <= start - stop <= _MAX_PADDING:
            raise DatasetError(
                f"{name} is corrupt, or is several files that were joined: its footer leaves out "
                f"what stands between byte {stop:,} and {start:,}; restore it or write it anew"
            )


def _refuse_message(message: Any, start: int, name: str) -> NoReturn:
    raise DatasetError(
        f"{name} holds a message of an unexpected kind ({message.type}) at byte {start:,}: restore "
        "it or move it out of the dataset"
    )


def _refuse_cut(name: str, reason: str) -> NoReturn:
    raise DatasetError(
        f"{name} is cut short or corrupt: {reason}; restore it, or move it out of the dataset "
        "until it is written"
    )


# --- what pyarrow does not tell: fields of flatbuffers that it has verified -----------------------


def _dictionary(message: Any) -> tuple[int, bool]:
    """Number of the dictionary of a message, and whether it adds to it."""
    data = memoryview(message.metadata)
    table = _follow(data, _field(data, _follow(data, 0), 2))
    number, is_delta = _field(data, table, 0), _field(data, table, 2)
    return (
        struct.unpack_from("<q", data, number)[0] if number else 0,
        bool(is_delta and data[is_delta]),
    )


def find_blocks(footer: View, start: int) -> Blocks:
    """Read the blocks of the footer at a position, which pyarrow has verified."""
    return Blocks(_blocks(footer, 2), _blocks(footer, 3), start)


def _blocks(footer: View, number: int) -> npt.NDArray[Any]:
    field = _field(footer, _follow(footer, 0), number)
    if not field:
        return np.empty(0, _BLOCK)
    vector = _follow(footer, field)
    (length,) = struct.unpack_from("<I", footer, vector)
    return np.frombuffer(footer, _BLOCK, length, vector + 4).copy()  # holds no view of a map


def _follow(data: View, position: int) -> int:
    return position + int(struct.unpack_from("<I", data, position)[0])


def _field(data: View, table: int, number: int) -> int:
    """Position of a field of a table; 0 if it is not there."""
    offsets = table - int(struct.unpack_from("<i", data, table)[0])
    slot = 4 + 2 * number
    if slot >= struct.unpack_from("<H", data, offsets)[0]:
        return 0
    offset = int(struct.unpack_from("<H", data, offsets + slot)[0])
    return table + offset if offset else 0
