"""Counts the records of many files in several processes, so that their indexes are there after.

Files are handed out in chunks, so a million small ones are a thousand tasks. A process says how far
it is through one shared number.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from zephon_torch.arithmetic.permutation import Int64Array
from zephon_torch.errors import WorkerError
from zephon_torch.io.datasets.discovery import Found, count_samples
from zephon_torch.io.formats import FormatOptions, load_format
from zephon_torch.support.progress_bar import byte_bar

_CHUNK_FILES = 1024
_CHUNK_BYTES = 64 << 20
_POLL_SECONDS = 0.2


@dataclass(slots=True)
class Counted:
    """Counts of some files.

    Attributes:
        num_samples: Records of each file.
        num_read: Number of files that had to be read for it.
        warnings: What was said meanwhile, of stale indexes say.
    """

    num_samples: list[int] = field(default_factory=list)
    num_read: int = 0
    warnings: list[str] = field(default_factory=list)

    def add(self, other: Counted) -> None:
        """Take what was found out about the files that follow."""
        self.num_samples += other.num_samples
        self.num_read += other.num_read
        self.warnings += other.warnings

    @property
    def sizes(self) -> Int64Array:
        """Records of each file as int64[num_files]."""
        return np.array(self.num_samples, dtype=np.int64)


def count_in_processes(title: str, found: Found, options: FormatOptions, jobs: int) -> Counted:
    """Count the records of every file; builds the indexes that are missing.

    Args:
        title: For the progress bar.
        found: The files.
        options: Of their format.
        jobs: Most processes at once; 1 counts in this one.

    Raises:
        DatasetError: A file cannot be read or changes meanwhile; the first such.
        WorkerError: A process died.
    """
    if hasattr(load_format(found.format), "count_all"):  # of files that must be alike, no index
        return Counted(count_samples(title, found, options).tolist())
    task, chunks, total = _Task(options), list(_chunks(found)), Counted()
    with byte_bar(f"indexing {title}", sum(file.num_bytes for file in found.files)) as advance:
        if min(jobs, len(chunks)) <= 1:
            parts: Sequence[Counted] = [task.count(chunk, advance) for chunk in chunks]
        else:
            parts = _in_processes(task, chunks, min(jobs, len(chunks)), advance)
    for part in parts:
        total.add(part)
    return total


@dataclass(frozen=True, slots=True)
class _Task:
    options: FormatOptions

    def count(self, chunk: Found, advance: Callable[[int], object]) -> Counted:
        """Count the files of one chunk; `advance` hears of every byte of them."""
        module = load_format(chunk.format)
        counted = Counted()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for at in range(len(chunk)):
                file = chunk[at]
                known = module.count(file, self.options)
                if known is None:
                    known = module.scan(file, self.options, advance)
                    counted.num_read += 1
                else:
                    advance(file.num_bytes)
                counted.num_samples.append(known)
        counted.warnings = [str(warning.message) for warning in caught]
        return counted


def _chunks(found: Found) -> Iterator[Found]:
    """Cut into runs of files with some bytes together."""
    start = num_bytes = 0
    for at, file in enumerate(found.files):
        if at - start == _CHUNK_FILES or (at > start and num_bytes + file.num_bytes > _CHUNK_BYTES):
            yield found.part(start, at)
            start, num_bytes = at, 0
        num_bytes += file.num_bytes
    if found.files:
        yield found.part(start, len(found))


def _in_processes(
    task: _Task,
    chunks: Sequence[Found],
    jobs: int,
    advance: Callable[[int], object],
) -> list[Counted]:
    # Not forked: a storage may have started threads in this process.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    others = set(multiprocessing.active_children())
    num_done = context.Value("q", 0)
    pool = ProcessPoolExecutor(jobs, context, _start_worker, (task, num_done))
    try:
        futures = [pool.submit(_count_chunk, chunk) for chunk in chunks]
        _watch(futures, num_done, advance)
        counted = [future.result() for future in futures]
    except BrokenProcessPool:
        raise WorkerError(
            "a process that built indexes died, for want of memory perhaps: try fewer jobs"
        ) from None
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return counted


def _watch(futures: Sequence[Future[Counted]], num_done: Any, advance: Any) -> None:
    """Wait until all are done or one has failed; move the bar meanwhile."""
    pending, shown = set(futures), 0
    while pending:
        done, pending = wait(pending, _POLL_SECONDS, FIRST_EXCEPTION)
        now = num_done.value
        advance(now - shown)
        shown = now
        for future in done:
            future.result()


_worker: tuple[_Task, Any] | None = None


def _start_worker(task: _Task, num_done: Any) -> None:
    """Ctrl-C is for the main process, which ends this one; it then removes its temporary file."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    threading.Thread(target=_end_with_main_process, daemon=True).start()
    _worker = task, num_done


def _end_with_main_process() -> None:
    """The pool's queue would keep this process waiting for ever."""
    main = multiprocessing.parent_process()
    assert main is not None
    main.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _count_chunk(chunk: Found) -> Counted:
    assert _worker is not None
    task, num_done = _worker

    def advance(num_bytes: int) -> None:
        with num_done.get_lock():
            num_done.value += num_bytes

    try:
        return task.count(chunk, advance)
    except SystemExit:  # the pool would take it for an error of this chunk and give out the next
        os._exit(1)
