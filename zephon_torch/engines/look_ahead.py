"""Copies shards before they are needed: the plan says which ones the next steps read.

Looks at work items on their way to the engine, some steps ahead, and lets threads copy the remote
shards that they point to. Each is held until the loop is past the last of these steps, so that it
is still there when its reader comes. All that is held ahead takes at most half of the cache, less
with several ranks on the machine: what does not fit is left to the readers. So is any failure,
which they will meet themselves.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from zephon_torch.io.cache.copies import ShardCopies
from zephon_torch.io.cache.shard_cache import Held
from zephon_torch.io.datasets.dataset import Dataset
from zephon_torch.io.storage.files import StoredFile
from zephon_torch.support import waits
from zephon_torch.work.sharing.items import WorkItem

_NUM_THREADS = 4
_MAX_STEPS = 256  # looked ahead
_FIRST_STEPS = 32  # looked at before the first batch, which should come soon
_NEW_STEPS = 4  # looked at before each other one
_MAX_WANTED = 128  # shards at once: each that is held takes a descriptor
_WAIT_SECONDS = 5.0  # for threads to end; after that they are left to a store that hangs

_Key = tuple[int, int]  # dataset and shard


class Ahead:
    """Threads that copy what a run is about to read. Belongs to one run.

    Args:
        copies: where to.
        datasets: what ``Pointers.dataset`` counts in.
    """

    def __init__(self, copies: ShardCopies, datasets: Sequence[Dataset]) -> None:
        self._datasets = datasets
        ranks_here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))  # torchrun's
        self._window = _Window(copies, copies.cache.limit_bytes // (2 * ranks_here))
        self._end = weakref.finalize(self, _end, self._window)  # also when the interpreter exits

    def look_at(self, items: Iterator[WorkItem]) -> Iterator[WorkItem]:
        """The same items, each looked at some steps before it comes out."""
        return _LookedAt(self, items)

    def want(self, item: WorkItem) -> None:
        """Let the shards of an item be copied."""
        if self._window.is_inherited:
            return
        pointers = item.pointers
        pairs = np.unique(np.stack([pointers.dataset, pointers.shard]), axis=1)
        for dataset, shard in pairs.T.tolist():
            if not self._window.extend((dataset, shard), item.stop):
                file = self._datasets[dataset].remote_file(shard)
                if file is not None:
                    self._window.add((dataset, shard), file, item.stop)

    @property
    def is_full(self) -> bool:
        """Whether there is no room to look further ahead."""
        return self._window.is_full or self._window.is_inherited

    def reached(self, item: WorkItem) -> None:
        """Let go of what only items up to this one need."""
        if not self._window.is_inherited:
            self._window.release(item.stop)

    def close(self) -> None:
        """Give up what is being copied, let all go and end the threads."""
        self._end()


@dataclass(slots=True)
class _Wanted:
    file: StoredFile
    until: int  # delivered samples after which nobody known needs it
    held: Held | None = None


@dataclass(slots=True, weakref_slot=True)
class _Window:
    """Shards wanted or held ahead; shared with the threads, which may outlive their `Ahead`."""

    copies: ShardCopies
    budget_bytes: int
    num_bytes: int = 0
    is_full: bool = False
    is_closed: bool = False
    wanted: OrderedDict[_Key, _Wanted] = field(default_factory=OrderedDict)
    queue: deque[_Wanted] = field(default_factory=deque)
    threads: list[threading.Thread] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    pid: int = field(default_factory=os.getpid)

    @property
    def is_inherited(self) -> bool:
        """Whether this is a forked child: without threads, and possibly locked for ever."""
        return self.pid != os.getpid()

    def extend(self, key: _Key, until: int) -> bool:
        """Note that a shard is needed longer; False where it is not wanted yet."""
        with self.changed:
            if key not in self.wanted:
                return False
            self.wanted[key].until = until
            return True

    def add(self, key: _Key, file: StoredFile, until: int) -> None:
        """Queue a shard if it fits."""
        if file.num_bytes > self.budget_bytes:  # never does, but others may
            return
        with self.changed:
            is_crowded = len(self.wanted) >= _MAX_WANTED
            if is_crowded or self.num_bytes + file.num_bytes > self.budget_bytes:
                self.is_full = True
                return
            self.num_bytes += file.num_bytes
            self.wanted[key] = wanted = _Wanted(file, until)
            self.queue.append(wanted)
            if len(self.threads) < _NUM_THREADS:
                thread = threading.Thread(
                    target=_work, args=(self,), name="zephon-ahead", daemon=True
                )
                self.threads.append(thread)
                thread.start()
            self.changed.notify()

    def release(self, delivered: int) -> None:
        """Let go of what nobody needs after so many delivered samples."""
        with self.changed:
            over = [key for key, wanted in self.wanted.items() if wanted.until <= delivered]
            for key in over:
                wanted = self.wanted.pop(key)
                self.num_bytes -= wanted.file.num_bytes
                wanted.until = -1
                if wanted.held is not None:
                    wanted.held.close()
            if over:
                self.is_full = False

    def copy_next(self) -> bool:
        """Copy the next shard, waiting for one; False once closed."""
        with self.changed:
            while not self.queue and not self.is_closed:
                self.changed.wait()
            if self.is_closed:
                return False
            wanted = self.queue.popleft()
            if wanted.until < 0:  # came too late
                return True
        try:
            with waits.wanted_until(lambda: self.is_closed):
                held = self.copies.hold(wanted.file, lambda: not self.is_closed)
        except Exception:  # whoever reads it will meet it, and say so
            return True
        with self.changed:
            if wanted.until < 0 or self.is_closed:
                if held is not None:
                    held.close()
            else:
                wanted.held = held
        return True


class _LookedAt(Iterator[WorkItem]):
    """Holds no `Ahead`: an engine may hold this for longer than the run."""

    def __init__(self, ahead: Ahead, items: Iterator[WorkItem]) -> None:
        self._ahead, self._items = weakref.ref(ahead), items
        self._seen: deque[WorkItem] = deque()
        self._num_new = _FIRST_STEPS

    def __next__(self) -> WorkItem:
        ahead = self._ahead()
        for _ in range(min(self._num_new, _MAX_STEPS - len(self._seen))):
            if self._seen and (ahead is None or ahead.is_full):
                break
            item = next(self._items, None)
            if item is None:
                break
            self._seen.append(item)
            if ahead is not None:
                ahead.want(item)
        self._num_new = _NEW_STEPS
        if not self._seen:
            raise StopIteration
        return self._seen.popleft()


def _work(window: _Window) -> None:
    while window.copy_next():
        pass


def _end(window: _Window) -> None:
    if window.is_inherited:
        return
    with window.changed:
        window.is_closed = True
        window.changed.notify_all()
    deadline = time.monotonic() + _WAIT_SECONDS
    for thread in window.threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
    with window.changed:
        for wanted in window.wanted.values():
            if wanted.held is not None:
                wanted.held.close()
        window.wanted.clear()
