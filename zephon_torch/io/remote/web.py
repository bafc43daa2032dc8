"""Ranges of files over HTTP: nothing but the bytes that were asked for.

Each answer of the sessions of fsspec's web client is checked as soon as its headers are there
(``answers.py``), whoever asked. Plain ranges are read here, not by fsspec.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

from zephon_torch.io.remote.answers import Body, checked_size, with_prepared
from zephon_torch.io.remote.retries import seconds_allowed

WEB = ("http", "https")


def with_checks(options: dict[str, Any], protocols: list[str]) -> dict[str, Any]:
    """Options for fsspec whose web clients check what they are sent, and end when it stalls.

    Args:
        options: Options of the user; taken over.
        protocols: Protocols of the URL, the outermost first.
    """
    try:
        import aiohttp  # noqa: F401
    except ImportError:  # fsspec says what is missing
        return options
    return with_prepared(options, protocols, WEB, _prepared)


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
        asked = request.headers.get("Range", "")
        num_bytes = checked_size(answer.status, answer.headers, asked)
    except Exception:
        answer.close()  # not to be read
        raise
    if num_bytes:
        answer.content = Body(answer.content, num_bytes)


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
        try:
            # a user's own session may have no checks
            num_bytes = checked_size(answer.status, answer.headers, headers["Range"])
            return await Body(answer.content, num_bytes).read()
        except Exception:
            answer.close()  # what else it sends is not waited for
            raise
