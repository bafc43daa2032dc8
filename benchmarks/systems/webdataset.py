"""webdataset: tar shards, read in order, shuffled in a buffer."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data import Data
from benchmarks.systems.base import System, num_workers, same
from benchmarks.throughput import BATCH_SIZE

BUFFER = 1000


class WebDataset(System):
    label = "webdataset"
    packages = ("webdataset",)
    modules = ("torch", "webdataset")
    note = "Shuffles shards and, in a buffer, 1,000 samples; mixtures by RandomMix."
    formats = ("tar",)
    text_engines = ("inline", "2 workers")
    mixture_engines = ("inline",)

    def prepare(self, data: Data, folder: Path) -> None:
        for corpus in ("web", "code"):
            (folder / corpus).mkdir(parents=True)
            for path in data.shards(corpus):
                write(folder / corpus / path.stem, "json", path.read_bytes().splitlines())
        (folder / "rows").mkdir()
        for path in data.rows(24):
            write(folder / "rows" / path.stem, "bin", [row.tobytes() for row in np.load(path)])

    def text(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterable[Any]:
        import webdataset

        mixture = data.mixture(variant["datasets"])
        found = [samples(folder / name, document) for name in mixture]
        if len(found) == 1:
            dataset = found[0]
        else:
            mixed = webdataset.RandomMix(found, list(mixture.values()))
            dataset = webdataset.DataPipeline(mixed)
        return loader(dataset, same, variant)

    def tokens(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterable[Any]:
        return loader(samples(folder / "rows", row), stack, variant)


def write(path: Path, extension: str, records: list[bytes]) -> None:
    with tarfile.open(f"{path}.tar", "w") as tar:
        for number, record in enumerate(records):
            info = tarfile.TarInfo(f"{number:06d}.{extension}")
            info.size = len(record)
            tar.addfile(info, io.BytesIO(record))


def samples(folder: Path, decode: Any) -> Any:
    import webdataset

    urls = sorted(map(str, folder.glob("*.tar")))
    options: dict[str, Any] = {"shardshuffle": len(urls), "seed": 1, "empty_check": False}
    return webdataset.WebDataset(urls, **options).repeat().shuffle(BUFFER).map(decode)


def document(sample: dict[str, bytes]) -> Any:
    return json.loads(sample["json"])


def row(sample: dict[str, bytes]) -> Any:
    return np.frombuffer(sample["bin"], np.uint16).astype(np.int64)


def stack(rows: list[Any]) -> Any:
    import torch

    return torch.from_numpy(np.stack(rows))


def loader(dataset: Any, collate: Any, variant: dict[str, Any]) -> Iterable[Any]:
    import webdataset

    batched = dataset.compose(webdataset.batched(BATCH_SIZE, collation_fn=collate))
    return webdataset.WebLoader(batched, batch_size=None, num_workers=num_workers(variant))


ADAPTER = WebDataset()
