"""zephon_torch itself."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.data import Data
from benchmarks.systems.base import System, num_workers, same
from benchmarks.throughput import BATCH_SIZE

ENGINES = ("inline", "thread", "1 worker", "2 workers")


class ZephonTorch(System):
    label = "zephon_torch"
    packages = ("torch", "numpy", "pyarrow", "orjson")
    modules = ("zephon_torch",)
    note = "Global shuffle of the whole dataset; engine thread is the default."
    formats = ("jsonl", "jsonl+orjson", "arrow")
    text_engines = mixture_engines = token_engines = ENGINES

    def prepare(self, data: Data, folder: Path) -> None:
        import pyarrow as pa

        for corpus in ("web", "code"):
            (folder / corpus).mkdir(parents=True)
            for number, path in enumerate(data.shards(corpus)):
                table = pa.Table.from_pylist(list(documents_of(path)))
                with pa.ipc.new_stream(
                    folder / corpus / f"{number:03d}.arrow", table.schema
                ) as out:
                    out.write_table(table, max_chunksize=1000)
        for num_datasets in (1, 2, 20):  # writes indexes
            source_of_text(data, num_datasets, "jsonl")
        source_of_text(data, 2, "arrow", folder)

    def text(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterable[Any]:
        if variant["format"] == "jsonl":
            sys.modules["orjson"] = None  # as if it were not installed
        source = source_of_text(data, variant["datasets"], variant["format"], folder)
        loader = make_loader(source, variant, collate_fn=same)
        if variant["format"] == "jsonl+orjson":
            loader.batch(0)
            if "orjson" not in sys.modules:
                raise RuntimeError("this version does not use orjson")
        return loader

    def tokens(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterable[Any]:
        from zephon_torch.io import Dataset

        rows = Dataset.from_path("rows", data.rows(variant["shards"])[0].parent)
        return make_loader(endless([rows], {"rows": 1.0}), variant)


def documents_of(path: Path) -> Iterable[Any]:
    import json

    with open(path, "rb") as file:
        yield from map(json.loads, file)


def source_of_text(data: Data, num_datasets: int, kind: str, folder: Path = Path()) -> Any:
    """Return the source of a mixture of 1, 2 or 20 corpora."""
    from zephon_torch.io import Dataset

    mixture = data.mixture(num_datasets)
    root = folder if kind == "arrow" else data.folder
    return endless([Dataset.from_path(name, root / name) for name in mixture], mixture)


def endless(datasets: list[Any], mixture: dict[str, float]) -> Any:
    from zephon_torch import StaticMixtureWorkSource

    return StaticMixtureWorkSource(
        datasets, mixture, seed=1, shuffle_block_size="global", exhausted_policy="repeat"
    )


def make_loader(source: Any, variant: dict[str, Any], **options: Any) -> Any:
    from zephon_torch import DataLoader

    if variant["engine"] == "inline":
        options["num_threads"] = 0
    return DataLoader(source, BATCH_SIZE, num_workers=num_workers(variant), **options)


ADAPTER = ZephonTorch()
