"""Small datasets of distinct ids, and how tests look at batches."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from zephon_torch.io import Dataset
from zephon_torch.work import StaticMixtureWorkSource

SIZES = {"a": 40, "b": 25, "c": 12}
STARTS = {"a": 1000, "b": 2000, "c": 3000}
WEIGHTS = {"a": 0.5, "b": 0.3, "c": 0.2}
ENGINES: dict[str, dict[str, Any]] = {
    "inline": {"num_threads": 0},
    "one reading thread": {},
    "one thread": {"num_threads": 1},
    "three threads": {"num_threads": 3},
    "two workers": {"num_workers": 2},
    "two persistent workers": {"num_workers": 2, "persistent_workers": True},
}


def memory(
    name: str, size: int, start: int = 0, shard_sizes: Sequence[int] | None = None
) -> Dataset:
    return Dataset.from_samples(name, range(start, start + size), shard_sizes=shard_sizes)


def write_shards(root: Path, sizes: Sequence[int], start: int = 0) -> Path:
    """Files 00.jsonl, 01.jsonl, ... of records {"id": n} with consecutive n."""
    root.mkdir(parents=True, exist_ok=True)
    for shard, size in enumerate(sizes):
        lines = (json.dumps({"id": start + i}) + "\n" for i in range(size))
        (root / f"{shard:02d}.jsonl").write_text("".join(lines))
        start += size
    return root


def three_in_memory() -> list[Dataset]:
    return [memory(name, size, STARTS[name]) for name, size in SIZES.items()]


def three_in_files(root: Path) -> list[Dataset]:
    return [
        Dataset.from_path(
            name, write_shards(root / name, [size // 3, size - size // 3], STARTS[name])
        )
        for name, size in SIZES.items()
    ]


def mixture_of(datasets: Sequence[Dataset], **options: Any) -> StaticMixtureWorkSource:
    return StaticMixtureWorkSource(datasets, WEIGHTS, **({"seed": 3, "chunk_size": 6} | options))


def one(dataset: Dataset, **options: Any) -> StaticMixtureWorkSource:
    return StaticMixtureWorkSource([dataset], {dataset.name: 1}, **options)


def ids(batch: Any) -> list[int]:
    """Ids of a batch, whatever it is made of."""
    if isinstance(batch, Mapping):
        batch = batch["id"]
    if isinstance(batch, torch.Tensor):
        return [int(i) for i in batch.tolist()]
    return [int(sample["id"]) if isinstance(sample, Mapping) else int(sample) for sample in batch]


def batches(loop: Iterable[Any]) -> list[list[int]]:
    """Ids of all batches of one loop."""
    return [ids(batch) for batch in loop]


def patiently(loop: Iterator[Any]) -> Any:
    """The next batch of a loop with a short time-out: on a busy machine it may come later."""
    while True:
        try:
            return next(loop)
        except RuntimeError as error:
            if not re.search("timed out|did not come", str(error)):
                raise


def flat(lists: Iterable[Iterable[int]]) -> list[int]:
    return [i for part in lists for i in part]


def as_list(samples: list[Any]) -> list[Any]:
    """A collate_fn that leaves the samples alone."""
    return samples
