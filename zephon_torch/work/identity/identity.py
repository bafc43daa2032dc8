"""Identity of a plan: fingerprint and description.

A state carries the fingerprint, so that it is never continued on another plan by accident, and the
description, so that a mismatch can be described in words (``mismatch.py``). Both cover what the
order depends on: order version, seed, options, exact weights, and per dataset name, format and the
shards' relative paths, samples and bytes. Roots, URLs, credentials and modification times
are not part of it.

The fingerprint is that of the order, not of its spelling: it hashes the plainest options that make
the same plan (``plainest`` in ``given.py``). Earlier states hashed the options as spelled;
``spellings.py`` recognises them.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from zephon_torch.work.identity.given import Given
from zephon_torch.work.order.mixture import TOTAL_LIMIT, integer_weights
from zephon_torch.work.order.options import PlanOptions

ORDER_VERSION = 1
"""Raised whenever the same arguments would give another order of samples."""

DESCRIPTION_LIMIT = 64 * 1024
PARTS = ("seed", "options", "mixture", "datasets")
_NAMED_IN_OPTIONS = 100
_LONGEST_SHARE = 80

PartHashes = tuple[bytes, bytes, bytes, bytes]


@dataclass(frozen=True, slots=True)
class PlanIdentity:
    """Identity of one plan.

    Attributes:
        fingerprint: 64 hexadecimal digits (sha256), equal for plans of equal order.
        description: JSON text of at most 64 KiB.
        digests: one signed 64-bit integer for each of seed, options (as spelled), mixture,
            datasets: lets a state without a full description still name the part that differs.
        sizes: number of datasets, of their shards and of their samples.
        given: what the plan is made of, to recognise states of other spellings; None where only
            the fingerprint counts.
        plain: the plainest spelling of its options; None likewise.
    """

    fingerprint: str
    description: str
    digests: tuple[int, int, int, int]
    sizes: tuple[int, int, int]
    given: Given | None = field(default=None, compare=False, repr=False)
    plain: PlanOptions | None = field(default=None, compare=False, repr=False)


def identify(given: Given, plain: PlanOptions) -> PlanIdentity:
    """Identity of a plan.

    Args:
        given: what it is made of.
        plain: the plainest spelling of its options.
    """
    spelled, plainly = part_hashes(given, [given.options.as_dict(), plain.as_dict()])
    digests = tuple(signed(part[:8]) for part in spelled)
    sizes = (
        len(given.datasets),
        sum(dataset.num_shards for dataset in given.datasets),
        sum(dataset.num_samples for dataset in given.datasets),
    )
    return PlanIdentity(
        fingerprint=fingerprint_of(plainly),
        description=_describe(given, plain, digests, sizes),
        digests=digests,  # type: ignore[arg-type]
        sizes=sizes,
        given=given,
        plain=plain,
    )


def part_hashes(given: Given, spellings: Iterable[Mapping[str, Any]]) -> Iterator[PartHashes]:
    """Hashes of seed, options, mixture and datasets, under each spelling of the options."""
    seed = hash_of([ORDER_VERSION, str(given.options.seed)])
    datasets = hash_of({dataset.name: dataset.fingerprint for dataset in given.datasets})
    mixtures: dict[bool, bytes] = {}
    for spelling in spellings:
        is_exact = spelling["exhausted_policy"] == "redistribute"
        if is_exact not in mixtures:
            mixtures[is_exact] = hash_of(mixture_in_force(given, is_exact))
        yield seed, hash_of(spelling), mixtures[is_exact], datasets


def mixture_in_force(given: Given, is_exact: bool) -> dict[str, Any]:
    """The mixture as the order depends on it, in JSON values: weights by name, or a course."""
    return weights_in_force(given, is_exact) if given.course is None else course_in_force(given)


def course_in_force(given: Given) -> dict[str, Any]:
    """First position and integer weights by name of each segment, and where the last one ends."""
    course, names = given.course, given.names
    if course is None:
        return {}
    segments = [
        [start, dict(zip((names[i] for i in m.live.tolist()), m.integers(), strict=True))]
        for start, m in zip(course.start, course.mixtures, strict=True)
    ]
    return {"length": course.length, "segments": segments}


def weights_in_force(given: Given, is_exact: bool) -> dict[str, int]:
    """Integer weights by name.

    Where datasets leave, the segments behind are apportioned anew from the exact weights; else
    integers with a sum of at most 2**46 decide. Empty for a course, which has weights of its own.
    """
    if not given.weights:
        return {}
    weights = integer_weights(given.weights, None if is_exact else TOTAL_LIMIT)
    return dict(zip(given.names, weights, strict=True))


def fingerprint_of(parts: PartHashes) -> str:
    """The fingerprint that hashes of the four parts make: 64 hexadecimal digits."""
    return hashlib.sha256(b"".join(parts)).hexdigest()


def hash_of(part: object) -> bytes:
    """Sha256 of JSON values: 32 bytes."""
    return hashlib.sha256(_dump(part).encode()).digest()


def signed(data: bytes) -> int:
    """The signed integer in bytes, the lowest first."""
    return int.from_bytes(data, "little", signed=True)


def _describe(
    given: Given, plain: PlanOptions, digests: Sequence[int], sizes: Sequence[int]
) -> str:
    """JSON text: the plainest options, those that the user spelled otherwise, and the datasets.

    Earlier releases compare ``options`` with the options they are given. So one that refuses the
    fingerprint names a difference, and accepts the state once it is given the plainest spelling.
    """
    plainly, spelled = plain.as_dict(), given.options.as_dict()
    otherwise = {name: value for name, value in spelled.items() if value != plainly[name]}
    head = {
        "order_version": ORDER_VERSION,
        "seed": given.options.seed,
        "options": {name: _shortened(value) for name, value in plainly.items()},
        "given": {name: _shortened(value) for name, value in otherwise.items()},
        "digests": list(digests),
        "sizes": list(sizes),
    }
    weights = weights_in_force(given, plain.rules.redistributes)
    for course, entries in itertools.product(_courses(given), _entries(given, weights)):
        text = _dump(head | course | {"datasets": entries})
        if len(text) <= DESCRIPTION_LIMIT:
            return text
    return _dump(head | {"num_datasets": len(given.datasets)})


def _courses(given: Given) -> Iterator[dict[str, Any]]:
    """How the mixture changes, from full to short; nothing for one mixture."""
    if given.course is None:
        yield {}
        return
    course = course_in_force(given)
    yield {"course": course}
    yield {"course": {"digest": hash_of(course).hex()[:16]}}


def _entries(given: Given, weights: Mapping[str, int]) -> Iterator[dict[str, dict[str, Any]]]:
    """Entries of the datasets by name, from full to short."""
    full = {
        dataset.name: {
            **_weight(weights, dataset.name),
            "format": dataset.format,
            "shards": dataset.num_shards,
            "samples": dataset.num_samples,
            "bytes": int(dataset.shard_num_bytes.sum()),
            "digest": dataset.fingerprint[:16],
        }
        for dataset in given.datasets
    }
    shares = _shares(given, weights)
    if shares:
        yield {name: entry | {"share": shares[name]} for name, entry in full.items()}
    yield full
    yield {
        name: _weight(weights, name) | {"digest": entry["digest"]} for name, entry in full.items()
    }


def _weight(weights: Mapping[str, int], name: str) -> dict[str, int]:
    return {"weight": weights[name]} if weights else {}


def _shares(given: Given, weights: Mapping[str, int]) -> dict[str, str]:
    """Exact shares of the mixture, where the integer weights are rounded and texts stay short."""
    if sum(weights.values()) != TOTAL_LIMIT:
        return {}
    exact = weights_in_force(given, is_exact=True)
    total = sum(exact.values())
    if total.bit_length() > _LONGEST_SHARE:
        return {}
    return {name: str(Fraction(weight, total)) for name, weight in exact.items()}


def _shortened(option: object) -> object:
    """An option; one that names very many datasets by its digest."""
    if not isinstance(option, Mapping) or len(option) <= _NAMED_IN_OPTIONS:
        return option
    return {"datasets": len(option), "digest": hash_of(option).hex()[:16]}


def _dump(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
