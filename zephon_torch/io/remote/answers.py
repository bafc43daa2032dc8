"""Answers to requests for ranges of files: whether one is what was asked for (RFC 9110).

fsspec's clients take any answer to a range for the range. Sections 14.4 and 15.3.7: it must come
as 206 with the `Content-Range` that was asked for, or be the whole of a file that was asked for
whole; nothing may be compressed on its way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from zephon_torch.io.remote.retries import AnswerError, ShortReadError

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_REST = re.compile(r"bytes=(\d+)-")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)")


def checked_size(status: int, headers: Mapping[str, str], asked: str) -> int:
    """Check the head of an answer; returns the size of the range that it brings, 0 for no range.

    Args:
        status: Of the answer.
        headers: Of the answer, found by names in any case.
        asked: The header `Range` of the request, "" without.

    Raises:
        AnswerError: It is compressed, or no answer to that range.
        ShortReadError: It is a part of it only.
    """
    encoding = headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ("", "identity"):
        raise AnswerError(
            f"sent it compressed (Content-Encoding: {encoding[:40]}) where its own bytes were "
            "asked for: switch that off in the server, or in what stands before it"
        )
    wanted = _RANGE.fullmatch(asked)
    if wanted is None:
        _check_rest(status, headers, asked)
        return 0
    start, stop = int(wanted[1]), int(wanted[2]) + 1
    length = headers.get("Content-Length", "")
    if status != 206:
        if start == 0 and length == str(stop):
            return stop  # all of it, which is what was asked for
        sent = f"{int(length):,} bytes" if length.isdecimal() else "all that it has"
        raise AnswerError(
            f"sent {sent} where {stop - start:,} bytes from byte {start:,} on were asked for "
            f"(status {status} in place of 206): it does not serve ranges of files. Use one that "
            "does, or put simplecache:: before the URL to keep whole files on this machine"
        )
    return _range_bytes(start, stop, headers.get("Content-Range", ""), length)


def _check_rest(status: int, headers: Mapping[str, str], asked: str) -> None:
    """Check where an answer begins that was asked for up to the end of the file."""
    wanted = _REST.fullmatch(asked)
    if wanted is None or (status != 206 and int(wanted[1]) == 0):
        return
    content_range = headers.get("Content-Range", "")
    told = _CONTENT_RANGE.fullmatch(content_range.strip())
    if status != 206 or told is None or told[1] != wanted[1]:
        raise AnswerError(
            f"sent something else (status {status}, Content-Range: {content_range[:80] or 'none'}) "
            f"where all from byte {int(wanted[1]):,} on was asked for"
        )


def _range_bytes(start: int, stop: int, content_range: str, length: str) -> int:
    told = _CONTENT_RANGE.fullmatch(content_range.strip())
    if told is None or int(told[1]) != start or not start < int(told[2]) + 1 <= stop:
        raise AnswerError(
            f"sent another range (Content-Range: {content_range[:80] or 'none'}) where bytes "
            f"{start}-{stop - 1} were asked for: put simplecache:: before the URL, or use a server "
            "or proxy that serves ranges of files"
        )
    num_bytes = int(told[2]) + 1 - start
    if length.isdecimal() and int(length) > num_bytes:
        raise AnswerError(f"sent {int(length):,} bytes as a range of {num_bytes:,}")
    if length.isdecimal() and int(length) < num_bytes:
        raise ShortReadError(f"{int(length):,} bytes instead of {num_bytes:,}")
    return num_bytes


class Body:
    """The body of an answer, never read further than the range that its head promises.

    Stands in the place of a stream of aiohttp or aiobotocore, and has all that these have.

    Args:
        stream: Has ``async read(n)``, which returns b"" at the end.
        num_bytes: Size of the range.
    """

    def __init__(self, stream: Any, num_bytes: int) -> None:
        self._stream, self._num_bytes, self._left = stream, num_bytes, num_bytes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def read(self, n: int | None = None) -> bytes:
        """Read some bytes, or all that are left.

        Raises:
            AnswerError: There are more than the range has.
            ShortReadError: There are fewer.
        """
        if n is not None and n >= 0:
            return await self._read_some(n)
        parts = []
        while part := await self._read_some(1 << 16):
            parts.append(part)
        return b"".join(parts)

    async def _read_some(self, n: int) -> bytes:
        part: bytes = await self._stream.read(n)
        self._left -= len(part)
        if self._left < 0:
            raise AnswerError(f"sent more than {self._num_bytes:,} bytes as a range of so many")
        if not part and n and self._left:
            got = self._num_bytes - self._left
            raise ShortReadError(f"{got:,} bytes instead of {self._num_bytes:,}")
        return part


def with_prepared(
    options: dict[str, Any],
    protocols: list[str],
    names: tuple[str, ...],
    prepare: Callable[[dict[str, Any]], dict[str, Any]],
) -> dict[str, Any]:
    """Options for fsspec, prepared where they are those of some protocols.

    Args:
        options: Options of the user; taken over.
        protocols: Protocols of the URL, the outermost first.
        names: Of the protocols to prepare.
        prepare: Makes new options of a protocol.
    """
    for protocol in {*names}.intersection(protocols):
        if protocol == protocols[0]:  # fsspec lets these options win over nested ones
            options = prepare(dict(options.pop(protocol, {})) | options)
        else:
            options[protocol] = prepare(dict(options.get(protocol, {})))
    return options
