"""zephon 0.2 over JSON lines and, for token rows, Parquet."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.data import Data
from benchmarks.systems.base import System
from benchmarks.throughput import BATCH_SIZE


class Zephon(System):
    label = "zephon 0.2"
    requirement = "zephon[parquet]==0.2.0"
    packages = ("zephon", "pyarrow")
    modules = ("torch", "zephon")
    note = (
        "Shuffles shards and inside each (its global shuffle is some ten times slower here); its "
        "threads, or its pipeline in one process of its own (mtp_mode)."
    )
    text_engines = ("thread", "1 worker")
    mixture_engines = token_engines = ("thread",)

    def prepare(self, data: Data, folder: Path) -> None:
        import numpy as np
        import pyarrow as pa
        import pyarrow.parquet

        for corpus in ("web", "code"):  # links, for it writes indexes of its own beside
            (folder / corpus).mkdir(parents=True)
            for path in data.shards(corpus):
                os.link(path, folder / corpus / path.name)
        (folder / "rows").mkdir()
        for path in data.rows(24):
            rows = np.load(path)
            column = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
            table = pa.table({"tokens": column})
            pa.parquet.write_table(table, folder / "rows" / f"{path.stem}.parquet")

    def text(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterable[Any]:
        for batch in pipeline(folder, data.mixture(variant["datasets"]), variant):
            yield [record.payload for record in batch.records]

    def tokens(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterator[Any]:
        import numpy as np
        import torch

        for batch in pipeline(folder, {"rows": 1.0}, variant):
            rows = [np.asarray(record.payload["tokens"]) for record in batch.records]
            yield torch.from_numpy(np.stack(rows).astype(np.int64))


def pipeline(folder: Path, mixture: dict[str, float], variant: dict[str, Any]) -> Iterable[Any]:
    from zephon import Dataset, MixtureSpec, Pipeline, StaticMixtureWorkSource

    source = StaticMixtureWorkSource(
        datasets=[Dataset.from_path(name, str(folder / name)) for name in mixture],
        mixture=MixtureSpec(mixture),
        seed=1,
        shuffle_within_shard=True,
        chunk_size=1024,  # its repeat policy wants datasets of at least a chunk
        exhausted_policy="repeat",
    )
    made: Any = Pipeline(source).batch(microbatch_size=BATCH_SIZE)
    if variant["engine"] == "1 worker":
        made = made.options(mtp_mode=True)
    found: Iterable[Any] = made
    return found


ADAPTER = Zephon()
