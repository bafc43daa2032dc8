"""Where the messages of an Arrow IPC stream or file are, told from their headers alone.

A message is the marker ``FF FF FF FF``, the int32 length of its header, the header (a flatbuffer
``Message``) and its body, whose length the header tells; a length of 0 ends the stream. A file is
``ARROW1`` and two zeros, a stream, a footer, its int32 length and ``ARROW1``. Numbers are little
endian. Source: "Serialization and Interprocess Communication" of the Arrow columnar format, with
``Message.fbs`` of format version 1.0 to 1.5.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple, NoReturn

from zephon_torch.errors import DatasetError
from zephon_torch.io.ranges import View

SCHEMA, DICTIONARY, BATCH = 1, 2, 3  # of the union MessageHeader
MAGIC = b"ARROW1"
HEADER_BYTES = 8 << 10  # read at once: a header is rarely longer

_START = struct.Struct("<Ii")
_MARKER = 0xFFFFFFFF
_MAX_ROWS = 1 << 48

ReadView = Callable[[int, int], View]


class Message(NamedTuple):
    """One message.

    Attributes:
        kind: `SCHEMA`, `DICTIONARY`, `BATCH`, or another number of the format.
        start: byte position of its marker.
        stop: behind its body.
        body: byte position behind its header.
        is_big_endian: of a schema, whether the file's numbers are.
        num_rows: of a batch.
        nodes: of a batch, byte position of the vector of lengths and numbers of nulls; 0 without.
        buffers: of a batch, byte position of the vector of buffers.
        is_compressed: whether a batch's values are.
        dictionary: number of the dictionary that a dictionary batch defines.
        is_delta: whether it adds to it.
    """

    kind: int
    start: int
    stop: int
    body: int = 0
    is_big_endian: bool = False
    num_rows: int = 0
    nodes: int = 0
    buffers: int = 0
    is_compressed: bool = False
    dictionary: int = 0
    is_delta: bool = False


def find_messages(read: ReadView, num_bytes: int, name: str) -> Iterator[Message]:
    """Walk a file from message to message; bodies are not read.

    Args:
        read: bytes [start, stop).
        num_bytes: size of the file.
        name: of the file, for messages.

    Raises:
        DatasetError: it is neither a stream nor a file of Arrow IPC, or is not whole.
    """
    is_file = bytes(read(0, min(8, num_bytes))) == MAGIC + b"\0\0"
    position = 8 if is_file else 0
    while True:
        head = read(position, min(position + HEADER_BYTES, num_bytes))
        if len(head) < _START.size:
            _refuse_cut(name, f"no end mark at byte {position:,}")
        marker, length = _START.unpack_from(head)
        if marker != _MARKER:
            _refuse_foreign(name, position)
        stop = position + _START.size + length
        if length == 0:
            break
        if length < 0 or stop > num_bytes:
            _refuse_cut(name, f"a header of {length:,} bytes begins at byte {position:,}")
        if _START.size + length > len(head):
            head = read(position, stop)
        message, num_body = _parse(head[_START.size : _START.size + length], name, position)
        body, stop = stop, stop + num_body
        if num_body < 0 or stop > num_bytes:
            _refuse_cut(name, f"a body of {num_body:,} bytes ends at byte {stop:,}")
        header = position + _START.size
        yield message._replace(
            start=position,
            stop=stop,
            body=body,
            nodes=message.nodes and message.nodes + header,
            buffers=message.buffers and message.buffers + header,
        )
        position = stop
    _check_end(read, num_bytes, name, stop, is_file)


def _check_end(read: ReadView, num_bytes: int, name: str, position: int, is_file: bool) -> None:
    tail = bytes(read(position, num_bytes)[-10:]) if is_file else b""
    footer = struct.unpack_from("<i", tail)[0] if len(tail) == 10 else -1
    if is_file and (not tail.endswith(MAGIC) or position + footer + 10 != num_bytes):
        _refuse_cut(name, "no footer stands at its end")
    if not is_file and position != num_bytes:
        raise DatasetError(
            f"{name} has {num_bytes - position:,} bytes behind the end mark of its stream, at byte "
            f"{position:,}: streams that are joined must be read and written anew"
        )


def _parse(header: View, name: str, position: int) -> tuple[Message, int]:
    """Return a message, places as in its header, and the length of its body."""
    try:
        root = _Table(header, _Table.follow(header, 0))
        kind = root.integer(1, "<B")
        num_body = root.integer(3, "<q")
        message = Message(kind, 0, 0)
        if kind == BATCH:
            table = root.table(2)
            message = message._replace(
                num_rows=table.integer(0, "<q"),
                nodes=table.vector(1),
                buffers=table.vector(2),
                is_compressed=table.has(3),
            )
        elif kind == SCHEMA:
            message = message._replace(is_big_endian=bool(root.table(2).integer(0, "<h")))
        elif kind == DICTIONARY:
            table = root.table(2)
            message = message._replace(
                dictionary=table.integer(0, "<q"), is_delta=bool(table.integer(2, "<B"))
            )
    except struct.error:
        _refuse_foreign(name, position)
    if not 0 <= message.num_rows < _MAX_ROWS:
        raise DatasetError(
            f"{name} is corrupt: a batch at byte {position:,} claims {message.num_rows:,} rows"
        )
    return message, num_body


def _refuse_foreign(name: str, position: int) -> NoReturn:
    raise DatasetError(
        f"{name} is not an Arrow IPC stream or file, or is corrupt: no message at byte "
        f"{position:,}; restore it or move it out of the dataset"
    )


def _refuse_cut(name: str, reason: str) -> NoReturn:
    raise DatasetError(
        f"{name} is cut short or corrupt: {reason}; restore it, or move it out of the dataset "
        "until it is written"
    )


class _Table:
    """A table of a flatbuffer: the place of each field is told by a table of offsets."""

    def __init__(self, data: View, position: int) -> None:
        self._data = data
        self._position = position
        self._offsets = position - self._at("<i", position)
        self._num_bytes = self._at("<H", self._offsets)

    @staticmethod
    def follow(data: View, position: int) -> int:
        """Where the offset at a position leads to."""
        return position + int(struct.unpack_from("<I", data, position)[0])

    def integer(self, field: int, kind: str) -> int:
        """A number, 0 by default."""
        place = self._place(field)
        return self._at(kind, place) if place else 0

    def has(self, field: int) -> bool:
        """Whether a field is there."""
        return self._place(field) > 0

    def table(self, field: int) -> _Table:
        """A table that must be there."""
        place = self._place(field)
        if not place:
            raise struct.error("no such field")
        return _Table(self._data, self.follow(self._data, place))

    def vector(self, field: int) -> int:
        """Where a vector begins, with its length; 0 if it is not there."""
        place = self._place(field)
        return self.follow(self._data, place) if place else 0

    def _place(self, field: int) -> int:
        slot = 4 + 2 * field
        if slot + 2 > self._num_bytes:
            return 0
        offset = self._at("<H", self._offsets + slot)
        return self._position + offset if offset else 0

    def _at(self, kind: str, position: int) -> int:
        if position < 0:  # struct counts such from the end
            raise struct.error("outside of the header")
        return int(struct.unpack_from(kind, self._data, position)[0])
