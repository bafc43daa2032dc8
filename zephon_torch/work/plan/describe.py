"""A plan in words: who is drawn how often, and what is never seen."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zephon_torch.work.order.phases import Course
from zephon_torch.work.plan.plan import Plan

_HEADINGS = ("dataset", "weight", "samples", "drawn", "passes", "share", "unseen", "never seen")


@dataclass(frozen=True, slots=True)
class DatasetSummary:
    """Draws of one epoch from one dataset.

    Attributes:
        weight: share of the mixture in force, 0 .. 1: of the datasets that have samples, in units
            of 2**-46 where the weights as given are finer. Where the mixture changes, the mean over
            all positions; of an endless plan that of the last phase.
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
    shares, drawn = _shares(plan), _drawn(plan)
    return [
        _summary(plan, d.name, len(d), shares.get(d.name, 0), drawn[d.name]) for d in plan.datasets
    ]


def _shares(plan: Plan) -> dict[str, float]:
    """Share of each dataset in the mixture; the mean over all segments, if they have an end."""
    if plan.course is None:
        return _share_of_each(plan.weights)
    starts = plan.starts
    if plan.length is None:
        return _share_of_each(plan.weights_at(starts[-1]))
    mean = {d.name: 0.0 for d in plan.datasets}
    for start, stop in itertools.pairwise([*starts, plan.length]):
        for name, share in _share_of_each(plan.weights_at(start)).items():
            mean[name] += share * (stop - start) / plan.length
    return mean


def _share_of_each(weights: Mapping[str, int]) -> dict[str, float]:
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def _drawn(plan: Plan) -> dict[str, int | None]:
    """Samples that an epoch draws of each dataset; None where it draws without end."""
    if plan.length is not None:
        return dict(plan.counts(plan.length))
    if plan.course is None:
        return dict.fromkeys(d.name for d in plan.datasets)
    start = plan.starts[-1]
    return plan.counts(start) | dict.fromkeys(plan.weights_at(start))


def _summary(plan: Plan, name: str, size: int, weight: float, drawn: int | None) -> DatasetSummary:
    endless = drawn is None and weight > 0
    unseen = 0 if endless else max(0, size - (drawn or 0))
    never = 0 if plan.varies(name) and drawn else unseen
    return DatasetSummary(name, weight, size, drawn, unseen, never)


def describe(plan: Plan) -> str:
    """A table of the datasets, and a warning for each that has samples no epoch ever reaches."""
    summaries = summarize(plan)
    rows = [_HEADINGS, *(_cells(summary, plan.length) for summary in summaries)]
    lines = _table(rows)
    if plan.length is None:
        lines.append("endless: no epoch ever ends")
    else:
        chunks = "1 chunk" if plan.num_chunks == 1 else f"{plan.num_chunks:,} chunks"
        lines.append(f"{plan.length:,} samples in {chunks} an epoch")
    if plan.course is not None:
        lines += ["", *_table(_phase_rows(plan, plan.course)), ""]
    return "\n".join(lines + [_warning(s) for s in summaries if s.never_seen and s.weight > 0])


def _phase_rows(plan: Plan, course: Course) -> list[tuple[str, ...]]:
    """A row for each phase: where it begins, its samples, and each dataset's share of them."""
    names = [d.name for d in plan.datasets]
    rows: list[tuple[str, ...]] = [("phase", "from", "samples", *names)]
    start = 0
    for number, stop in enumerate(course.ends(plan.chunk_size)):
        shares = _share_of_each(plan.weights_at(start))
        samples = "endless" if stop is None else f"{stop - start:,}"
        cells = (f"{shares.get(name, 0):.6g}" for name in names)
        rows.append((str(number), f"{start:,}", samples, *cells))
        start = stop or start
    return rows


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(_aligned(row, widths)).rstrip() for row in rows]


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
