"""Differences between the plan of a state and the plan at hand, in words.

The description in a state tells them best. Its digests still name the parts that differ where it is
missing (a model's state has no room for one) or too short for all datasets.

An option is told only if it makes a difference: both spellings are read as they would act on the
datasets at hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import Any, TypeAlias

from zephon_torch.work.identity.identity import (
    PARTS,
    PlanIdentity,
    hash_of,
    mixture_in_force,
    signed,
)
from zephon_torch.work.identity.spellings import has_options, plainly, spelled_in
from zephon_torch.work.order.mixture import TOTAL_LIMIT
from zephon_torch.work.order.options import GROUPS

_LINES = 5  # of each kind
_LONGEST_RATIO = 40
_NEAR = Fraction(1, 1 << 40)
_TOLD = {
    "seed": "its seed",
    "options": "its options (shuffling, stop rules, max_samples, chunk_size and so on)",
    "mixture": "its weights",
    "datasets": "its datasets (their names, shards or sizes)",
}
_Acting: TypeAlias = tuple[dict[str, Any], dict[str, Any]]


def differences(
    identity: PlanIdentity, description: str, digests: Sequence[int], sizes: Sequence[int]
) -> list[str]:
    """All that differs, one line each; none where nothing is known but that something does.

    Args:
        identity: of the plan at hand.
        description, digests, sizes: what the state says of its own plan; empty where it does not.
    """
    then = _read(description)
    try:
        told = _told(then, _read(identity.description), _acting(identity, description))
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError):
        told = {}
    lines = [line for part in PARTS for line in told.get(part, [])]
    digests, sizes = (
        own or _integers(then.get(name)) for own, name in ((digests, "digests"), (sizes, "sizes"))
    )
    parts = [part for part in _parts_apart(identity, digests) if part not in told]
    if parts:
        lines.append(_in_short(parts, sizes, identity.sizes, bool(description)))
    return lines


def _read(description: str) -> dict[str, Any]:
    try:
        read = json.loads(description)
    except (ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _integers(value: object) -> list[int]:
    is_list = isinstance(value, list) and all(isinstance(one, int) for one in value)
    return list(value) if is_list else []  # type: ignore[call-overload]


def _parts_apart(identity: PlanIdentity, digests: Sequence[int]) -> Iterator[str]:
    """Parts whose digests differ, whatever the spelling. A digest of 0 says nothing."""
    for part, then, now in zip(PARTS, digests, identity.digests, strict=False):
        if then in (0, now):
            continue
        if part == "options" and has_options(identity, then):
            continue
        if part == "mixture" and then in _digests_of_mixture(identity):
            continue
        yield part


def _digests_of_mixture(identity: PlanIdentity) -> list[int]:
    given = identity.given
    if given is None:
        return []
    return [signed(hash_of(mixture_in_force(given, exact))[:8]) for exact in (False, True)]


def _in_short(
    parts: Sequence[str], then: Sequence[int], now: Sequence[int], has_description: bool
) -> str:
    words_then, words_now = _sizes_in_words(then), _sizes_in_words(now)
    is_resized = "datasets" in parts and then and words_then != words_now
    sizes = f" ({words_then} then, {words_now} now)" if is_resized else ""
    differ = "differ" if list(parts) != ["seed"] else "differs"
    more = (
        "The description of so many datasets has no room to say more"
        if has_description
        else "A model's state has no room to say more; loader.state_dict(), saved beside it, does"
    )
    *before, last = [_TOLD[part] for part in parts]
    listed = f"{', '.join(before)} and {last}" if before else last
    return f"{listed} {differ}{sizes}. {more}"


def _sizes_in_words(sizes: Sequence[int]) -> str:
    return ", ".join(
        f"{size:,} {what if size != 1 else what.removesuffix('s')}"
        for size, what in zip(sizes, ("datasets", "shards", "samples"), strict=False)
    )


def _told(
    then: dict[str, Any], now: dict[str, Any], acting: _Acting | None
) -> dict[str, list[str]]:
    """Lines about each part of the plan that both descriptions are complete in."""
    if not then:
        return {}
    told = {
        "seed": [
            _then_now(what, then[key], now[key])
            for what, key in (("order version", "order_version"), ("seed", "seed"))
            if then[key] != now[key]
        ],
        "options": _of_options(then, now, acting),
    }
    if "datasets" in then and "datasets" in now:
        told["datasets"] = _of_datasets(then["datasets"], now["datasets"])
        told |= _of_mixture(then, now)
        return told
    counts = [one.get("num_datasets", len(one.get("datasets", ()))) for one in (then, now)]
    if counts[0] != counts[1]:
        told["datasets"] = [_then_now("number of datasets", *counts)]
    return told


# --- options -------------------------------------------------------------------------------------


def _acting(identity: PlanIdentity, description: str) -> _Acting | None:
    """Both plainest spellings over the datasets at hand; None where the old one is not known."""
    spelled = spelled_in(description)
    acts = None if spelled is None else plainly(identity, spelled)
    if acts is None or identity.plain is None:
        return None
    return acts.as_dict(), identity.plain.as_dict()


def _of_options(then: dict[str, Any], now: dict[str, Any], acting: _Acting | None) -> list[str]:
    old, new = (one["options"] | one.get("given", {}) for one in (then, now))
    unknown = (old.keys() | new.keys()) - {name for group in GROUPS for name in group}
    lines = []
    for group in (*GROUPS, sorted(unknown)):
        if acting is not None and all(acting[0].get(n) == acting[1].get(n) for n in group):
            continue
        lines += [
            _then_now(f"option {name}", old.get(name), new.get(name))
            for name in group
            if old.get(name) != new.get(name)
        ]
    return lines


# --- datasets ------------------------------------------------------------------------------------


def _of_datasets(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    gone, added = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
    if len(gone) == len(added) == 1:
        lines = [f"dataset {gone[0]!r} was there at the checkpoint, {added[0]!r} is there now"]
    else:
        lines = [f"dataset {n!r} took part at the checkpoint, it does not now" for n in gone]
        lines += [f"dataset {n!r} takes part now, it did not at the checkpoint" for n in added]
    for name in sorted(old.keys() & new.keys()):
        changes = _changes(old[name], new[name])
        if changes:
            lines.append(f"dataset {name!r}: {changes}")
    return _bounded(lines, "datasets")


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """All that differs in one dataset, in one line; empty if nothing does."""
    told = [
        (part, old[part], new[part])
        for part in ("format", "shards", "samples", "bytes")
        if part in old and part in new and old[part] != new[part]
    ]
    if told:
        (first, a, b), *rest = told
        beside = "; ".join(f"{_count(part, a)} then, {_count(part, b)} now" for part, a, b in rest)
        return f"{_count(first, a)} at the checkpoint, {_value(first, b)} now" + (
            f" ({beside})" if beside else ""
        )
    if old.get("digest") == new.get("digest"):
        return ""
    if "shards" in old and "shards" in new:
        return "its shards have other names or sizes than at the checkpoint"
    return "its format or its shards' names, number or sizes differ from the checkpoint's"


def _count(part: str, value: object) -> str:
    return f"format {value}" if part == "format" else f"{_value(part, value)} {part}"


def _value(part: str, value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


# --- mixture -----------------------------------------------------------------------------------


def _of_mixture(then: dict[str, Any], now: dict[str, Any]) -> dict[str, list[str]]:
    """Lines about the mixture; nothing where a course is told by its digest alone."""
    if "course" not in then and "course" not in now:
        return {"mixture": _of_weights(then["datasets"], now["datasets"])}
    old, new = (_course(one) for one in (then, now))
    if old.keys() != new.keys():
        return {}
    lines = []
    for a, b in zip(old["segments"], new["segments"], strict=False):
        if a != b:
            lines = [_then_now("mixture", _segment(a), _segment(b))]
            break
    else:
        changes = [len(one["segments"]) - 1 for one in (old, new)]
        lines = [_then_now("changes of the mixture", *changes)] if len(set(changes)) > 1 else []
    if "course" in then and "course" in now and old["length"] != new["length"]:
        ends = (one["length"] or "none" for one in (old, new))
        lines.append(_then_now("end of the last phase", *ends))
    return {"mixture": lines}


def _course(description: dict[str, Any]) -> dict[str, Any]:
    """A course, that of one mixture with one segment; its end is told among the options."""
    if "course" in description:
        course: dict[str, Any] = description["course"]
        return course
    weights = {name: entry["weight"] for name, entry in description["datasets"].items()}
    return {"length": None, "segments": [[0, weights]]}


def _segment(segment: Sequence[Any]) -> str:
    start, weights = segment
    total = sum(weights.values())
    shares = [f"{name!r} {weight / total:.6g}" for name, weight in weights.items()]
    return f"{', '.join(_bounded(shares, 'datasets'))} from position {start:,} on"


# --- weights -------------------------------------------------------------------------------------


def _of_weights(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    common = sorted(old.keys() & new.keys())
    if not common:
        return []
    (then, then_exact), (now, now_exact) = _shares(old), _shares(new)
    # a dataset more or less changes the share of every other one, but not their ratios
    of_then, of_now = (sum(shares[name] for name in common) for shares in (then, now))
    moved = {name: abs(then[name] / of_then - now[name] / of_now) for name in common}
    is_exact = then_exact and now_exact
    least = 0 if is_exact or old.keys() == new.keys() else _NEAR
    lines = []
    for name in sorted(common, key=lambda name: (-moved[name], name)):
        if moved[name] > least and then[name] != now[name]:
            a, b = _apart(then[name], now[name], is_exact)
            told = f"{a} of the mixture at the checkpoint, {b} now"
            lines.append(f"weight of dataset {name!r}: {told}")
    return _bounded(lines, "weights")


def _shares(entries: dict[str, Any]) -> tuple[dict[str, Fraction], bool]:
    """Share of each dataset, and whether it is exact rather than rounded to 46 bits."""
    if all("share" in entry for entry in entries.values()):
        return {name: Fraction(entry["share"]) for name, entry in entries.items()}, True
    total = sum(entry["weight"] for entry in entries.values())
    shares = {name: Fraction(entry["weight"], total) for name, entry in entries.items()}
    return shares, total != TOTAL_LIMIT


def _apart(a: Fraction, b: Fraction, is_exact: bool) -> tuple[str, str]:
    """Two numbers that differ, as texts that do."""
    texts = f"{float(a):.6g}", f"{float(b):.6g}"
    if is_exact and texts[0] == texts[1] and max(len(str(a)), len(str(b))) <= _LONGEST_RATIO:
        return str(a), str(b)
    digits = 6
    while Decimal(texts[0]) == Decimal(texts[1]) and digits < 5000:
        digits += 3
        with localcontext() as context:
            context.prec = digits
            texts = tuple(  # type: ignore[assignment]
                str((Decimal(one.numerator) / Decimal(one.denominator)).normalize())
                for one in (a, b)
            )
    return texts


def _then_now(what: str, then: object, now: object) -> str:
    return f"{what}: {then} at the checkpoint, {now} now"


def _bounded(lines: list[str], kind: str) -> list[str]:
    if len(lines) <= _LINES + 1:
        return lines
    return [*lines[:_LINES], f"and {len(lines) - _LINES:,} more {kind}"]
