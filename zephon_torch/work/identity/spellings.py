"""Other spellings of a plan: states that earlier releases wrote under them are recognised.

Those releases hashed the options as spelled. A hash cannot be turned back, but one that a spelling
makes proves that spelling: so spellings are tried, and one that fits counts if its plainest
spelling is the plan's. Tried are the one in the state's description (complete but for options that
name more than 100 datasets), the plan's own, and the usual ones beside it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zephon_torch.errors import ConfigurationError
from zephon_torch.work.identity.given import plainest
from zephon_torch.work.identity.identity import (
    PlanIdentity,
    fingerprint_of,
    hash_of,
    part_hashes,
    signed,
)
from zephon_torch.work.order.options import GROUPS, RULES, PlanOptions
from zephon_torch.work.order.stopping import StopRules

_USUAL: dict[str, tuple[Any, ...]] = {
    "shuffle_shards": (True, False),
    "shuffle_within_shard": (False, True),
    "shuffle_block_size": ("auto",),
    "stop_after_passes": (None, 1),
    "exhausted_policy": (None, "repeat", "stop", "redistribute"),
    "max_repeats": (None,),
    "max_samples": (None,),
    "reshuffle_on_repeat": (True, False),
    "interleave": ("balanced", "shuffle"),
}
_UNREADABLE = (
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ArithmeticError,
    RecursionError,
)


def is_same_plan(identity: PlanIdentity, fingerprint: str, description: str = "") -> bool:
    """Whether a fingerprint is that of a plan, under any spelling that can be recognised. Pure.

    Args:
        identity: of the plan.
        fingerprint: of the state.
        description: of the state; empty where it has none.
    """
    if fingerprint == identity.fingerprint:
        return True
    if identity.given is None:
        return False
    described = spelled_in(description)
    spellings = [] if described is None else [described]
    spellings += _alternatives(identity)
    for spelling, parts in zip(spellings, part_hashes(identity.given, spellings), strict=True):
        if fingerprint_of(parts) == fingerprint:
            return plainly(identity, spelling) == identity.plain
    return False


def has_options(identity: PlanIdentity, digest: int) -> bool:
    """Whether a digest of options is that of a spelling of the plan's own."""
    if digest == identity.digests[1]:
        return True
    return any(
        plainly(identity, spelling) == identity.plain
        for spelling in _alternatives(identity)
        if signed(hash_of(spelling)[:8]) == digest
    )


def plainly(identity: PlanIdentity, spelling: Mapping[str, Any]) -> PlanOptions | None:
    """The plainest spelling of options over a plan's datasets and weights; None: they make none."""
    given = identity.given
    if given is None:
        return None
    try:
        other = given.respelled(PlanOptions.from_dict(given.options.seed, spelling))
        return plainest(other, other.segments(), other.order())
    except (ConfigurationError, *_UNREADABLE):
        return None


def spelled_in(description: str) -> dict[str, Any] | None:
    """The options that a description says were given; None where it does not say them all."""
    try:
        read = json.loads(description)
        return PlanOptions.from_dict(0, read["options"] | read.get("given", {})).as_dict()
    except (ConfigurationError, *_UNREADABLE):
        return None


def _alternatives(identity: PlanIdentity) -> Iterator[dict[str, Any]]:
    """Spellings that take each option from the plan's own, its plainest or a usual one."""
    if identity.given is None or identity.plain is None:
        return
    own, plain = identity.given.options.as_dict(), identity.plain.as_dict()
    choices = [
        [
            dict(zip(group, values, strict=True))
            for values in itertools.product(
                *(_distinct(own[name], plain[name], *_USUAL.get(name, ())) for name in group)
            )
            if group != RULES or _is_allowed(values)
        ]
        for group in GROUPS
    ]
    for chosen in itertools.product(*choices):
        yield {name: value for group in chosen for name, value in group.items()}


def _distinct(*values: Any) -> list[Any]:
    return [value for at, value in enumerate(values) if value not in values[:at]]


def _is_allowed(rules: Sequence[Any]) -> bool:
    try:
        StopRules(*rules)
    except ConfigurationError:
        return False
    return True
