"""Calls of fsspec's file systems that can be given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from zephon_torch.io.remote import web
from zephon_torch.support import waits


@dataclass(frozen=True, slots=True)
class Client:
    """A file system, and until when (of `time.monotonic`) it may take to answer.

    An asynchronous one stops asking when it is given up. Another one is left behind, in a thread
    of its own, until its own limits end it.

    Attributes:
        is_web: Whether it is fsspec's web client itself, around no other.
    """

    fs: Any
    until: float
    is_web: bool

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        """Call a method.

        Raises:
            TimeoutError: It did not answer in time.
            StorageError: Nobody wants its answer any longer.
        """
        # asked of the class: file systems around others pass their attributes on
        if not getattr(type(self.fs), "async_impl", False):
            return self._call_in_thread(partial(getattr(self.fs, name), *arguments, **options))
        return self._run(getattr(self.fs, f"_{name}")(*arguments, **options))

    def read_ranges(self, path: str, starts: list[int], stops: list[int]) -> list[Any]:
        """Read ranges that are not empty; an exception in the place of one that failed."""
        if self.is_web:
            return list(self._run(web.read_ranges(self.fs, path, starts, stops)))
        paths = [path] * len(starts)
        if "simplecache" not in self.fs.protocol:
            return list(self.call("cat_ranges", paths, starts, stops, on_error="return"))
        # its own (2026.2) cannot read ranges of files that it has not copied
        return list(self._call_in_thread(partial(_cat_each, self.fs, path, starts, stops)))

    def _run(self, coroutine: Any) -> Any:
        return waits.result_of(
            asyncio.run_coroutine_threadsafe(coroutine, self.fs.loop), self.until
        )

    def _call_in_thread(self, function: Callable[[], Any]) -> Any:
        return waits.result_of(waits.in_thread(function), self.until)


def _cat_each(fs: Any, path: str, starts: list[int], stops: list[int]) -> list[Any]:
    read: list[Any] = []
    for start, stop in zip(starts, stops, strict=True):
        try:
            read.append(fs.cat_file(path, start=start, end=stop))
        except Exception as error:
            read.append(error)
    return read
