"""One check of saving and resuming, for everything that has a state.

A thing under test is described by a :class:`Subject`. The check knows nothing of how it works: it
looks at the items that come out, loop after loop, and compares them with those of one run that was
never interrupted.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from toys import ids

Seen = Any  # what `look` makes of an item
NUM_EPOCHS = 4


def _nothing(*_: object) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Something that can be iterated in loops, saved and restored.

    Attributes:
        make: a fresh one, as a restarted process would build it.
        look: what tells items apart.
        save, load, loop: how it is done, by default as for a loader.
        close: ends what `make` began.
        before_loop: called with the thing and the number of the epoch before each loop.
        identity: whether a load followed by a save must give back the same state.
        fresh: whether every state must be an object of its own.
        max_bytes: bound of the state's size as JSON.
    """

    make: Callable[[], Any]
    look: Callable[[Any], Seen] = ids
    save: Callable[[Any], Any] = lambda thing: thing.state_dict()
    load: Callable[[Any, Any], None] = lambda thing, state: thing.load_state_dict(state)
    loop: Callable[[Any], Iterator[Any]] = iter
    close: Callable[[Any], None] = _nothing
    before_loop: Callable[[Any, int], None] = _nothing
    identity: bool = True
    fresh: bool = True
    max_bytes: int = 1 << 14


def check_resume(
    subject: Subject, *, points: Sequence[int] | None = None, product: bool = False
) -> None:
    """Save at several points, restore, save again, restore: the stream goes on as if never stopped.

    Args:
        subject: what to check.
        points: numbers of items after which to save, -1 for "after the loop has ended". By default
            0, 1, the middle, the last but one, the last, and after the end.
        product: every first save point with every distance to the second.
    """
    reference = _uninterrupted(subject)
    n = len(reference[0])
    assert n >= 4 and all(len(epoch) == n for epoch in reference), "too small to tell"
    stream = [item for epoch in reference for item in epoch]
    chosen = (0, 1, n // 2, n - 1, n, -1) if points is None else points
    distances = (1, 0, n + 1, 2, n, n - 2)
    keys = set()
    for number, point in enumerate(chosen):
        state = _saved_at(subject, point)
        keys.add(frozenset(state))
        start = n if point == -1 else point
        for distance in distances if product else (distances[number % len(distances)],):
            _check_two_resumes(subject, state, stream, n, start, distance)
    assert len(keys) == 1, f"the keys of the state change: {keys}"


def check_state(subject: Subject, thing: Any) -> Any:
    """The state, after checking that it is plain, small and a fresh object."""
    state = subject.save(thing)
    text = json.dumps(state)
    assert json.loads(text) == state
    assert len(text) <= subject.max_bytes
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state
    assert state, "a state that is false is taken for none"
    if subject.fresh:
        _spoil(subject.save(thing))
    assert subject.save(thing) == state, "the state is not a copy, or saving changes it"
    return state


class _Walk:
    """Walks along loops and remembers where they ended."""

    def __init__(self, subject: Subject, thing: Any, start: int, length: int) -> None:
        self._subject, self._thing, self._at, self._length = subject, thing, start, length
        self._loop: Iterator[Any] | None = None

    def take(self, count: int) -> list[Seen]:
        """The next items, across the ends of loops; never asks for one item more."""
        taken: list[Seen] = []
        while len(taken) < count:
            if self._loop is None:
                self._subject.before_loop(self._thing, self._at // self._length)
                self._loop, ended_at = self._subject.loop(self._thing), self._at
            try:
                taken.append(self._subject.look(next(self._loop)))
                self._at += 1
            except StopIteration:
                self.check_end()
                assert self._at > ended_at, "an empty loop"
        return taken

    def end(self) -> None:
        """Ask for one more item where the loop must end."""
        assert self._loop is not None
        assert next(self._loop, None) is None, "the loop goes on after the end of the epoch"
        self.check_end()

    def check_end(self) -> None:
        assert self._at % self._length == 0, f"a loop ended at item {self._at} of {self._length}"
        self._loop = None


def _uninterrupted(subject: Subject) -> list[list[Seen]]:
    thing = subject.make()
    epochs = []
    for epoch in range(NUM_EPOCHS):
        subject.before_loop(thing, epoch)
        epochs.append([subject.look(item) for item in subject.loop(thing)])
    subject.close(thing)
    return epochs


def _saved_at(subject: Subject, point: int) -> Any:
    thing = subject.make()
    check_state(subject, thing)
    if point == -1:
        subject.before_loop(thing, 0)
        for _ in subject.loop(thing):
            pass
    else:
        walk = _Walk(subject, thing, 0, 1 << 40)
        walk.take(point)
    state = check_state(subject, thing)
    subject.close(thing)
    return state


def _check_two_resumes(
    subject: Subject, state: Any, stream: list[Seen], n: int, start: int, distance: int
) -> None:
    where = f"saved after {start} of {n} items, and again {distance} later"
    before = json.dumps(state)
    second = subject.make()
    subject.load(second, state)
    if subject.identity:
        assert check_state(subject, second) == state, f"{where}: load, then save"
    taken = _Walk(subject, second, start, n).take(distance)
    assert taken == stream[start : start + distance], f"{where}: after the first resume"
    again = check_state(subject, second)
    subject.close(second)
    assert json.dumps(state) == before, "the loaded state was changed"

    third = subject.make()
    subject.load(third, again)
    start += distance
    walk = _Walk(subject, third, start, n)
    left = NUM_EPOCHS * n - start
    if left > 2 * n:
        left -= n
    assert walk.take(left) == stream[start : start + left], f"{where}: after the second resume"
    walk.end()
    subject.close(third)


def _spoil(state: dict[str, Any]) -> None:
    """Change everything in a state; nobody else may notice."""
    for key, value in list(state.items()):
        if isinstance(value, dict):
            _spoil(value)
        elif isinstance(value, list):
            value.clear()
        else:
            state[key] = None
