"""Ranges of files over HTTP: nothing but the bytes that were asked for.

fsspec's web client takes any answer to a range for the range. Here each answer of its sessions is
checked as soon as its headers are there (RFC 9110, sections 14.4 and 15.3.7): a range must come as
206 with the `Content-Range` that was asked for, or be the whole of a file that was asked for whole;
nothing may be compressed on its way. Plain ranges are read here, never further than they reach.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from zephon_torch.io.storage.retries import AnswerError, ShortReadError, seconds_allowed

WEB = ("http", "https")

_RANGE = re.compile(r"bytes=(\d+)-(\d+)")
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(?:\d+|\*)")


def with_checks(options: dict[str, Any], protocols: Sequence[str]) -> dict[str, Any]:
    """Options for fsspec whose web clients check what they are sent, and end when it stalls.

    Args:
        options: Options of the user; taken over.
        protocols: Protocols of the URL, the outermost first.
    """
    try:
        import aiohttp  # noqa: F401
    except ImportError:  # fsspec says what is missing
        return options
    for protocol in {*WEB}.intersection(protocols):
        if protocol == protocols[0]:  # fsspec lets these options win over nested ones
            options = _prepared(dict(options.pop(protocol, {})) | options)
        else:
            options[protocol] = _prepared(dict(options.get(protocol, {})))
    return options


def _prepared(options: dict[str, Any]) -> dict[str, Any]:
    import aiohttp

    headers = dict(options.get("headers") or {})
    if "accept-encoding" not in map(str.lower, headers):
        headers["Accept-Encoding"] = "identity"
    client = dict(options.get("client_kwargs") or {})
    stalled = seconds_allowed() / 4
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=stalled, sock_read=stalled)
    client.setdefault("timeout", timeout)
    client["trace_configs"] = [*(client.get("trace_configs") or ()), _checks()]
    return options | {"headers": headers, "client_kwargs": client}


@cache
def _checks() -> Any:
    """One for all clients: fsspec knows a client again by its options."""
    import aiohttp

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(_check_answer)
    return trace


async def _check_answer(_session: Any, _context: Any, request: Any) -> None:
    answer = request.response
    if request.method != "GET" or answer.status >= 400:
        return
    try:
        _num_bytes(answer.status, answer.headers, request.headers.get("Range", ""))
    except Exception:
        answer.close()  # not to be read
        raise


def _num_bytes(status: int, headers: Mapping[str, str], asked: str) -> int:
    """Check the head of an answer; returns the size of the range that it brings, 0 for no range.

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


async def read_ranges(
    fs: Any, url: str, starts: Sequence[int], stops: Sequence[int]
) -> list[bytes | BaseException]:
    """Read ranges at once, through the session of a web client of fsspec.

    Args:
        fs: The client.
        url: Of the file.
        starts: Of the ranges.
        stops: Of the ranges; none is empty.

    Returns:
        For each range its bytes, fewer where the file ends before, or what it raised.
    """
    ranges = zip(starts, stops, strict=True)
    asked = [_read_range(fs, url, start, stop) for start, stop in ranges]
    return await asyncio.gather(*asked, return_exceptions=True)


async def _read_range(fs: Any, url: str, start: int, stop: int) -> bytes:
    options = dict(fs.kwargs)
    headers = dict(options.pop("headers", {})) | {"Range": f"bytes={start}-{stop - 1}"}
    session = await fs.set_session()
    async with session.get(fs.encode_url(url), headers=headers, **options) as answer:
        if answer.status == 404:
            raise FileNotFoundError(url)
        answer.raise_for_status()
        num_bytes = _num_bytes(answer.status, answer.headers, headers["Range"])
        parts, left = [], num_bytes
        async for part in answer.content.iter_any():
            parts.append(part)
            if (left := left - len(part)) < 0:
                answer.close()
                raise AnswerError(f"sent more than {num_bytes:,} bytes as a range of so many")
    if left:
        raise ShortReadError(f"{num_bytes - left:,} bytes instead of {num_bytes:,}")
    return b"".join(parts)
