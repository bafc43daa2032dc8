"""litData: its chunks, StreamingDataset and StreamingDataLoader."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.data import ROW_LENGTH, Data
from benchmarks.systems.base import System, num_workers, same
from benchmarks.throughput import BATCH_SIZE


class LitData(System):
    label = "litData"
    requirement = "litdata"
    packages = ("litdata",)
    modules = ("torch", "litdata")
    note = "Shuffles chunks of 16 MB and inside each; mixtures by CombinedStreamingDataset."
    formats = ("litdata",)

    def prepare(self, data: Data, folder: Path) -> None:
        from litdata import TokensLoader, optimize

        options = {"chunk_bytes": "16MB", "num_workers": 1, "start_method": "fork"}
        for corpus in ("web", "code"):
            documents = list(data.documents(corpus))
            optimize(same, documents, str(folder / corpus), **options)
        numbers = list(range(len(data.all_rows())))
        loader = TokensLoader(block_size=ROW_LENGTH)
        optimize(Row(data), numbers, str(folder / "rows"), item_loader=loader, **options)

    def text(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterable[Any]:
        from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset

        mixture = data.mixture(variant["datasets"])
        found = [StreamingDataset(str(folder / name), shuffle=True, seed=1) for name in mixture]
        dataset = found[0]
        if len(found) > 1:
            weights = list(mixture.values())
            dataset = CombinedStreamingDataset(
                found, seed=1, weights=weights, iterate_over_all=False
            )
        return StreamingDataLoader(
            dataset,
            batch_size=BATCH_SIZE,
            num_workers=num_workers(variant),
            collate_fn=same,
            drop_last=True,
        )

    def tokens(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterable[Any]:
        from litdata import StreamingDataLoader, StreamingDataset, TokensLoader

        loader = TokensLoader(block_size=ROW_LENGTH)
        rows = StreamingDataset(str(folder / "rows"), item_loader=loader, shuffle=True, seed=1)
        return Long(
            StreamingDataLoader(
                rows, batch_size=BATCH_SIZE, num_workers=num_workers(variant), drop_last=True
            )
        )


class Row:
    """The row of a number as a tensor, to be written."""

    def __init__(self, data: Data) -> None:
        self._data = data

    def __call__(self, number: int) -> Any:
        import torch

        return torch.from_numpy(self._data.all_rows()[number].copy())


class Long:
    """Batches, widened by the consumer."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader

    def __iter__(self) -> Any:
        return (batch.long() for batch in self._loader)


ADAPTER = LitData()
