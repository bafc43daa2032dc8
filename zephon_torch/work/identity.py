"""What makes two plans the same plan: fingerprint, description, and their differences in words.

A state carries the fingerprint, so that it is never continued on another plan by accident, and the
description, so that a mismatch can be told in words. Both cover what the order depends on: order
version, seed, options, exact weights, and per dataset name, format and the shards' relative paths,
samples and bytes. Roots, URLs, credentials and modification times are not part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zephon_torch.io.dataset import Dataset

ORDER_VERSION = 1
"""Raised whenever the same arguments would give another order of samples."""

DESCRIPTION_LIMIT = 64 * 1024
_NAMED_IN_OPTIONS = 100
PARTS = ("seed", "options", "mixture", "datasets")


@dataclass(frozen=True, slots=True)
class PlanIdentity:
    """Identity of one plan.

    Attributes:
        fingerprint: 64 hexadecimal digits (sha256).
        description: JSON text of at most 64 KiB.
        digests: one signed 64-bit integer for each of seed, options, mixture, datasets: lets a
            state without a description still name the part that differs.
        sizes: number of datasets, of their shards and of their samples.
    """

    fingerprint: str
    description: str
    digests: tuple[int, int, int, int]
    sizes: tuple[int, int, int]


def identify(
    *,
    seed: int,
    options: Mapping[str, Any],
    datasets: Sequence[Dataset],
    weights: Sequence[int],
) -> PlanIdentity:
    """Identity of a plan over the datasets that take part, with their integer weights."""
    names = [dataset.name for dataset in datasets]
    parts = {
        "seed": [ORDER_VERSION, str(seed)],
        "options": dict(options),
        "mixture": dict(zip(names, weights, strict=True)),
        "datasets": {dataset.name: dataset.fingerprint for dataset in datasets},
    }
    digests = [hashlib.sha256(_dump(parts[part]).encode()).digest() for part in PARTS]
    return PlanIdentity(
        fingerprint=hashlib.sha256(b"".join(digests)).hexdigest(),
        description=_describe(seed, options, datasets, weights),
        sizes=(
            len(datasets),
            sum(dataset.num_shards for dataset in datasets),
            sum(dataset.num_samples for dataset in datasets),
        ),
        digests=tuple(int.from_bytes(d[:8], "little", signed=True) for d in digests),  # type: ignore[arg-type]
    )


def difference(then: str, now: str) -> str | None:
    """First difference between two descriptions in words, None where they show none."""
    try:
        old, new = json.loads(then), json.loads(now)
        return _first_difference(old, new)
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError):
        return None


def _describe(
    seed: int, options: Mapping[str, Any], datasets: Sequence[Dataset], weights: Sequence[int]
) -> str:
    shown = {name: _shortened(value) for name, value in options.items()}
    head = {"order_version": ORDER_VERSION, "seed": seed, "options": shown}
    entries = {
        dataset.name: {
            "weight": weight,
            "format": dataset.format,
            "shards": dataset.num_shards,
            "samples": dataset.num_samples,
            "bytes": int(dataset.shard_num_bytes.sum()),
            "digest": dataset.fingerprint[:16],
        }
        for dataset, weight in zip(datasets, weights, strict=True)
    }
    full = _dump(head | {"datasets": entries})
    if len(full) <= DESCRIPTION_LIMIT:
        return full
    by_name = {
        name: {"weight": entry["weight"], "digest": entry["digest"]}
        for name, entry in entries.items()
    }
    shorter = _dump(head | {"datasets": by_name})
    return (
        shorter
        if len(shorter) <= DESCRIPTION_LIMIT
        else _dump(head | {"num_datasets": len(entries)})
    )


def _shortened(option: object) -> object:
    """An option; one that names very many datasets by its digest."""
    if not isinstance(option, Mapping) or len(option) <= _NAMED_IN_OPTIONS:
        return option
    digest = hashlib.sha256(_dump(option).encode()).hexdigest()[:16]
    return {"datasets": len(option), "digest": digest}


def _dump(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _first_difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    if old["order_version"] != new["order_version"]:
        return _then_now("order version", old["order_version"], new["order_version"])
    if old["seed"] != new["seed"]:
        return _then_now("seed", old["seed"], new["seed"])
    for option in sorted(old["options"] | new["options"]):
        a, b = old["options"].get(option), new["options"].get(option)
        if a != b:
            return _then_now(f"option {option}", a, b)
    if "datasets" in old and "datasets" in new:
        return _dataset_difference(old["datasets"], new["datasets"])
    if old.get("num_datasets") != new.get("num_datasets"):
        return _then_now("number of datasets", old.get("num_datasets"), new.get("num_datasets"))
    return None


def _dataset_difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    gone, added = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
    if gone and added:
        return f"dataset {gone[0]!r} was there at the checkpoint, {added[0]!r} is there now"
    if gone or added:
        if gone:
            return f"dataset {gone[0]!r} took part at the checkpoint, it does not now"
        return f"dataset {added[0]!r} takes part now, it did not at the checkpoint"
    for name in sorted(old):
        for part in ("format", "shards", "samples", "bytes"):
            a, b = old[name].get(part), new[name].get(part)
            if a != b:
                what = f"format {a} at the checkpoint, {b} now"
                counted = f"{_count(a)} {part} at the checkpoint, {_count(b)} now"
                return f"dataset {name!r}: {what if part == 'format' else counted}"
        if old[name].get("digest") != new[name].get("digest"):
            return f"dataset {name!r}: its shards have other names or sizes than at the checkpoint"
    return _weight_difference(old, new)


def _weight_difference(old: dict[str, Any], new: dict[str, Any]) -> str | None:
    def shares(entries: dict[str, Any]) -> dict[str, float]:
        total = sum(entry["weight"] for entry in entries.values())
        return {name: entry["weight"] / total for name, entry in entries.items()}

    then, now = shares(old), shares(new)
    moved = {name: abs(then[name] - now[name]) for name in then}
    name = max(sorted(moved), key=moved.__getitem__)
    if old[name]["weight"] == new[name]["weight"] and moved[name] == 0:
        return None
    return (
        f"weight of dataset {name!r}: {then[name]:.6g} of the mixture at the checkpoint, "
        f"{now[name]:.6g} now"
    )


def _then_now(what: str, then: object, now: object) -> str:
    return f"{what}: {then} at the checkpoint, {now} now"


def _count(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
