"""Google's Grain over ArrayRecord files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import Data
from benchmarks.systems.base import System, num_workers, same
from benchmarks.throughput import BATCH_SIZE


class Grain(System):
    label = "Grain (ArrayRecord)"
    requirement = "grain array-record"
    packages = ("grain", "array-record")
    modules = ("torch", "grain")
    note = "Global shuffle; reads in its 16 threads, then its own worker processes."
    formats = ("arrayrecord",)
    text_engines = ("inline", "2 workers")
    mixture_engines = ("inline",)

    def prepare(self, data: Data, folder: Path) -> None:
        for corpus in ("web", "code"):
            (folder / corpus).mkdir(parents=True)
            for path in data.shards(corpus):
                write(folder / corpus / path.stem, path.read_bytes().splitlines())
        (folder / "rows").mkdir()
        for path in data.rows(24):
            write(folder / "rows" / path.stem, [row.tobytes() for row in np.load(path)])

    def text(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterable[Any]:
        import grain

        mixture = data.mixture(variant["datasets"])
        found = [source(folder / name).map(json.loads) for name in mixture]
        dataset = found[0]
        if len(found) > 1:
            dataset = grain.MapDataset.mix(found, list(mixture.values()))
        return batches(dataset, same, variant)

    def tokens(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterable[Any]:
        return batches(source(folder / "rows"), rows_of, variant)


def write(path: Path, records: list[bytes]) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(f"{path}.array_record", "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()


def source(folder: Path) -> Any:
    import grain

    paths = sorted(map(str, folder.glob("*.array_record")))
    found = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(paths))
    return found.seed(1).shuffle().repeat(None)


def batches(dataset: Any, collate: Any, variant: dict[str, Any]) -> Iterable[Any]:
    import grain

    made = dataset.batch(BATCH_SIZE, drop_remainder=True, batch_fn=collate).to_iter_dataset()
    workers = num_workers(variant)
    if workers:
        made = made.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return iter(made) if collate is same else map(long, made)


def rows_of(records: Any) -> Any:
    return np.stack([np.frombuffer(record, np.uint16) for record in records])


def long(rows: Any) -> Any:
    import torch

    return torch.from_numpy(rows).long()


ADAPTER = Grain()
