"""A plan in words: who is drawn how often, and what is never seen."""

from __future__ import annotations

from dataclasses import dataclass

from zephon_torch.work.plan.plan import Plan

_HEADINGS = ("dataset", "weight", "samples", "drawn", "passes", "share", "unseen", "never seen")


@dataclass(frozen=True, slots=True)
class DatasetSummary:
    """What an epoch draws from one dataset.

    Attributes:
        weight: share of the mixture in force, 0 .. 1: of the datasets that have samples, in units
            of 2**-46 where the weights as given are finer.
        num_samples: samples it has.
        drawn: positions of an epoch it fills; None for an endless plan.
        unseen: samples that one epoch does not reach.
        never_seen: samples that no epoch ever reaches, because every epoch repeats the same order.
    """

    name: str
    weight: float
    num_samples: int
    drawn: int | None
    unseen: int
    never_seen: int


def summarize(plan: Plan) -> list[DatasetSummary]:
    """One summary per dataset, in canonical order."""
    drawn = None if plan.length is None else plan.counts(plan.length)
    total = sum(plan.weights.values())
    return [
        _summary(plan, d.name, len(d), plan.weights.get(d.name, 0) / total, drawn)
        for d in plan.datasets
    ]


def _summary(
    plan: Plan, name: str, size: int, weight: float, counts: dict[str, int] | None
) -> DatasetSummary:
    drawn = None if counts is None else counts[name]
    endless = drawn is None and weight > 0
    unseen = 0 if endless else max(0, size - (drawn or 0))
    never = 0 if plan.varies(name) and drawn else unseen
    return DatasetSummary(name, weight, size, drawn, unseen, never)


def describe(plan: Plan) -> str:
    """A table of the datasets, and a warning for each that has samples no epoch ever reaches."""
    summaries = summarize(plan)
    rows = [_HEADINGS, *(_cells(summary, plan.length) for summary in summaries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = ["  ".join(_aligned(row, widths)).rstrip() for row in rows]
    if plan.length is None:
        lines.append("endless: no epoch ever ends")
    else:
        chunks = "1 chunk" if plan.num_chunks == 1 else f"{plan.num_chunks:,} chunks"
        lines.append(f"{plan.length:,} samples in {chunks} an epoch")
    return "\n".join(lines + [_warning(s) for s in summaries if s.never_seen and s.weight > 0])


def _cells(summary: DatasetSummary, length: int | None) -> tuple[str, ...]:
    drawn = summary.drawn
    return (
        summary.name,
        f"{summary.weight:.6g}",
        f"{summary.num_samples:,}",
        "endless" if drawn is None else f"{drawn:,}",
        "-" if drawn is None or not summary.num_samples else f"{drawn / summary.num_samples:.4g}",
        "-" if drawn is None or length is None else f"{drawn / length:.6g}",
        f"{summary.unseen:,}",
        f"{summary.never_seen:,}",
    )


def _aligned(row: tuple[str, ...], widths: list[int]) -> list[str]:
    return [row[0].ljust(widths[0])] + [
        cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)
    ]


def _warning(summary: DatasetSummary) -> str:
    return (
        f"warning: {summary.never_seen:,} of {summary.num_samples:,} samples of "
        f"{summary.name!r} are never seen: each epoch ends inside a pass and begins it anew in "
        "the same order. Let it reshuffle, or let the epoch be longer"
    )
