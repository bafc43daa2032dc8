"""The readers that a thread has open.

Readers are opened by the process and thread that uses them: nothing open crosses a fork, and two
threads never share a handle. Those whose records can be read together are kept in groups. A reader
of a copy holds its place in the cache, so it is closed as soon as some calls came without it.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable, Collection
from typing import TypeAlias
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from zephon_torch.arithmetic.permutation import Int64Array
from zephon_torch.io.cache.copies import CopyReader
from zephon_torch.io.storage.reader import GroupKind, Reader, ShardGroup

_DESCRIPTORS = 3  # that a reader takes, about
_MAPS = 4  # and maps, at most, of the 65,530 that Linux grants a process
_MIN_OPEN = 8  # kept open by each thread, however many threads there are
_MAX_IDLE_CALLS = 8  # through which a reader holds its copy unused

OpenReader: TypeAlias = Callable[[int, Callable[[], bool]], Reader]

_NOT_OPEN, _ALONE = 0, 1  # in place of the number of a group


def _max_open() -> int:
    """Readers that all threads of a process keep open together."""
    soft_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft_limit == resource.RLIM_INFINITY:
        soft_limit = 1 << 20
    return max(_MIN_OPEN, min((soft_limit - 200) // _DESCRIPTORS, 65_530 // _MAPS))


_MAX_OPEN = _max_open()


class OpenReaders:
    """Readers by number of shard.

    Args:
        num_shards: of all datasets together.
        open_reader: opens a shard by its number; may ask to close another reader of a copy.

    Attributes:
        together: the group of all shards, while all are open and in one; None otherwise.
    """

    def __init__(self, num_shards: int, open_reader: OpenReader) -> None:
        self._num_shards, self._open_reader = num_shards, open_reader
        self._readers: dict[int, Reader] = {}
        self._copies: set[int] = set()  # which of them are of copies
        self._numbers_of: dict[GroupKind, int] = {}
        self._groups: list[ShardGroup] = []
        self._group_of = np.zeros(num_shards, np.int32)
        self._last_used = np.zeros(num_shards, np.int64)
        self._call = 0
        self.together: ShardGroup | None = None
        _of_all_threads[id(self)] = self

    def begin(self) -> None:
        """Begin another call; close readers of copies that the last ones did not use."""
        self._call += 1
        if self._copies:
            self._close(self._idle_copies(_MAX_IDLE_CALLS))

    def make_way(self) -> bool:
        """Close a reader of a copy that neither this call nor the one before it used."""
        idle = self._idle_copies(1)[:1]
        self._close(idle)
        return bool(idle)

    def get(self, number: int) -> Reader:
        """The reader of one shard, to be used before the next is asked for."""
        reader = self._readers.get(number)
        self._last_used[number] = self._call
        return self._open(number, (number,)) if reader is None else reader

    def groups_of(self, numbers: Int64Array) -> npt.NDArray[np.int32] | None:
        """Number of the group of each shard, -1 where it is in none; int32[n].

        Opens what is not open. None where these are more shards than can be open at once.
        """
        found = self._group_of[numbers]
        if not found.all():
            wanted = np.unique(numbers)
            if len(wanted) > max(_MIN_OPEN, _MAX_OPEN // len(_of_all_threads)):
                return None
            self._last_used[wanted] = self._call
            for number in wanted[self._group_of[wanted] == _NOT_OPEN].tolist():
                self._open(number, wanted)
            found = self._group_of[numbers]
        self._last_used[numbers] = self._call
        return found - (_ALONE + 1)

    def group(self, number: int) -> ShardGroup | None:
        """A group by number, None for -1."""
        return self._groups[number] if number >= 0 else None

    def close(self) -> None:
        """Close all."""
        self._close(list(self._readers))

    def __len__(self) -> int:
        return len(self._readers)

    def _open(self, number: int, keep: Collection[int] | Int64Array) -> Reader:
        reader = self._open_reader(number, self.make_way)
        self._readers[number] = reader
        of_file = reader
        if isinstance(reader, CopyReader):
            self._copies.add(number)
            of_file = reader.reader
        kind = getattr(of_file, "group_kind", None)
        if kind is None:
            self._group_of[number] = _ALONE
        else:
            if kind not in self._numbers_of:
                self._numbers_of[kind] = len(self._groups)
                self._groups.append(kind.make(self._num_shards))
            group = self._numbers_of[kind]
            self._groups[group].add(number, of_file)
            self._group_of[number] = group + _ALONE + 1
        if len(self) > _MIN_OPEN and _num_open() > _MAX_OPEN:
            self._close_old(keep)
        is_all = len(self) == self._num_shards and len(self._groups) == 1 and not self._copies
        self.together = self._groups[0] if is_all and self._group_of.min() > _ALONE else None
        return reader

    def _close_old(self, keep: Collection[int] | Int64Array) -> None:
        """Close an eighth, at least one, of those that need not be kept."""
        numbers = np.setdiff1d(np.fromiter(self._readers, np.int64), np.array(keep))
        oldest = numbers[np.argsort(self._last_used[numbers], kind="stable")]
        self._close(oldest[: max(1, len(self) // 8)].tolist())

    def _idle_copies(self, num_calls: int) -> list[int]:
        """Copies idle for more than `num_calls` calls, least recently used first."""
        last = {number: self._call - int(self._last_used[number]) for number in self._copies}
        return sorted((n for n in last if last[n] > num_calls), key=lambda n: (-last[n], n))

    def _close(self, numbers: list[int]) -> None:
        if numbers:
            self.together = None
        for number in numbers:
            reader = self._readers.pop(number)
            self._copies.discard(number)
            group = int(self._group_of[number]) - (_ALONE + 1)
            self._group_of[number] = _NOT_OPEN
            if group >= 0:
                self._groups[group].remove(number)
            reader.close()


_of_all_threads: WeakValueDictionary[int, OpenReaders] = WeakValueDictionary()


def _num_open() -> int:
    """Readers that this process has open, in whatever thread and for whatever fetcher."""
    tables = [reference() for reference in _of_all_threads.valuerefs()]
    return sum(len(readers) for readers in tables if readers is not None)


class ThreadReaders(threading.local):
    """The open readers of the thread that asks. Empty again after a fork.

    Args:
        make: makes them.
    """

    def __init__(self, make: Callable[[], OpenReaders]) -> None:
        self._make = make
        self._pid, self._held = os.getpid(), make()

    def get(self) -> OpenReaders:
        """Readers that this thread of this process may use."""
        if self._pid != os.getpid():
            self._pid, self._held = os.getpid(), self._make()
        return self._held
