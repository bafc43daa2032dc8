"""Errors for keywords that a class does not have: where they belong, or what was meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from typing import Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
Constructor = Callable[Concatenate[T, P], None]


def explains_keywords(
    owner: str, elsewhere: Mapping[str, str] | None = None
) -> Callable[[Constructor[T, P]], Constructor[T, P]]:
    """Decorate a constructor, whose signature stays, so that unknown keywords are explained.

    Args:
        owner: Name of the class, for messages.
        elsewhere: For keywords of another class how to give them there, with ``{}`` for the
            keyword and its value.
    """
    others = {} if elsewhere is None else elsewhere

    def decorate(init: Constructor[T, P]) -> Constructor[T, P]:
        known = frozenset(list(inspect.signature(init).parameters)[1:])

        @functools.wraps(init)
        def explained(self: T, /, *args: P.args, **kwargs: P.kwargs) -> None:
            if not kwargs.keys() <= known:
                unknown = sorted(kwargs.keys() - known)
                told = (_explanation(owner, name, known, others) for name in unknown)
                raise TypeError("; ".join(told))
            init(self, *args, **kwargs)

        return explained

    return decorate


def _explanation(
    owner: str, name: str, known: Collection[str], elsewhere: Mapping[str, str]
) -> str:
    """Say what to do about one unknown keyword. Pure."""
    if name in elsewhere:
        return f"{owner} takes no {name}=: {elsewhere[name].format(f'{name}=...')}"
    near = get_close_matches(name, sorted({*known, *elsewhere}), n=1)
    if not near:
        return f"{owner} has no argument {name!r}"
    if near[0] in known:
        return f"{owner} has no argument {name!r}: did you mean {near[0]!r}?"
    way = elsewhere[near[0]].format(f"{near[0]}=...")
    return f"{owner} has no argument {name!r}: did you mean {near[0]!r}? ({way})"
