"""Hugging Face datasets, map-style over Arrow files, in torch's loader."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.data import ROW_LENGTH, Data
from benchmarks.systems.base import System, num_workers, same
from benchmarks.systems.torch import MANY
from benchmarks.throughput import BATCH_SIZE


class HF(System):
    label = "HF datasets (Arrow)"
    requirement = "datasets"
    packages = ("datasets", "pyarrow")
    modules = ("torch", "datasets")
    note = "Global shuffle by RandomSampler; mixtures by interleave_datasets."
    formats = ("arrow",)

    def prepare(self, data: Data, folder: Path) -> None:
        import datasets
        import pyarrow as pa

        for corpus in ("web", "code"):
            made = datasets.Dataset.from_list(list(data.documents(corpus)))
            made.save_to_disk(folder / corpus, num_shards=len(data.shards(corpus)))
        rows = data.all_rows()
        column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), ROW_LENGTH)
        table = pa.table({"tokens": column})
        made = datasets.Dataset(datasets.table.InMemoryTable(table))
        made.save_to_disk(folder / "rows", num_shards=24)

    def text(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterable[Any]:
        import datasets
        from torch.utils.data import DataLoader

        mixture = data.mixture(variant["datasets"])
        found = [datasets.load_from_disk(folder / name) for name in mixture]
        if len(found) == 1:
            (dataset,) = found
        else:
            dataset = datasets.interleave_datasets(
                found, list(mixture.values()), seed=1, stopping_strategy="all_exhausted"
            )
        return DataLoader(
            dataset,
            BATCH_SIZE,
            sampler=sampler(dataset),
            num_workers=num_workers(variant),
            collate_fn=same,
        )

    def tokens(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterable[Any]:
        import datasets
        from torch.utils.data import BatchSampler, DataLoader

        rows = datasets.load_from_disk(folder / "rows").with_format("torch")
        # indices of a whole batch at once, as the documentation of datasets advises
        batches = BatchSampler(sampler(rows), BATCH_SIZE, drop_last=True)
        return DataLoader(
            rows,
            batch_size=None,
            sampler=batches,
            num_workers=num_workers(variant),
            collate_fn=tokens_of,
        )


def sampler(dataset: Any) -> Any:
    import torch
    from torch.utils.data import RandomSampler

    generator = torch.Generator().manual_seed(1)
    return RandomSampler(dataset, num_samples=MANY, generator=generator)


def tokens_of(batch: dict[str, Any]) -> Any:
    return batch["tokens"]


ADAPTER = HF()
