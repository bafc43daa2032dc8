"""MosaicML's streaming: MDS shards and StreamingDataset in torch's loader."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.data import ROW_LENGTH, Data
from benchmarks.systems.base import System, num_workers, same
from benchmarks.throughput import BATCH_SIZE

KEPT: list[Any] = []  # a torch library's definitions last as long as it does


class MDS(System):
    label = "MosaicML streaming (MDS)"
    requirement = "mosaicml-streaming"
    packages = ("mosaicml-streaming",)
    modules = ("torch", "streaming")
    note = "Its default shuffle, py1e; mixtures by Stream(proportion=...)."
    formats = ("mds",)
    text_engines = ("inline", "2 workers")
    mixture_engines = ("inline",)

    def before_import(self) -> None:
        """Let torchvision, which streaming imports, be imported beside a torch without CUDA.

        Its wheel's compiled part does not load there; its Python part only wants this to exist.
        """
        import torch

        if torch.version.cuda is None:
            library = torch.library.Library("torchvision", "DEF")
            for name in ("nms", "qnms"):
                library.define(f"{name}(Tensor boxes, Tensor scores, float limit) -> Tensor")
            KEPT.append(library)

    def prepare(self, data: Data, folder: Path) -> None:
        from streaming import MDSWriter

        for corpus in ("web", "code"):
            columns = {"id": "int", "text": "str"}
            with MDSWriter(out=str(folder / corpus), columns=columns, size_limit="16mb") as out:
                for document in data.documents(corpus):
                    out.write(document)
        columns = {"tokens": f"ndarray:uint16:{ROW_LENGTH}"}
        with MDSWriter(out=str(folder / "rows"), columns=columns, size_limit="16mb") as out:
            for row in data.all_rows():
                out.write({"tokens": row})

    def text(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterable[Any]:
        from streaming import Stream

        mixture = data.mixture(variant["datasets"])
        if len(mixture) == 1:
            return loader(same, variant, local=str(folder / "web"))
        streams = [Stream(local=str(folder / k), proportion=v) for k, v in mixture.items()]
        return loader(same, variant, streams=streams)

    def tokens(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterable[Any]:
        return loader(stack, variant, local=str(folder / "rows"))


def loader(collate: Any, variant: dict[str, Any], **where: Any) -> Iterable[Any]:
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    clean_stale_shared_memory()  # of a run that was killed
    dataset = StreamingDataset(**where, shuffle=True, shuffle_seed=1, batch_size=BATCH_SIZE)
    return DataLoader(
        dataset,
        BATCH_SIZE,
        num_workers=num_workers(variant),
        collate_fn=collate,
        drop_last=True,
        persistent_workers=num_workers(variant) > 0,
    )


def stack(samples: list[dict[str, Any]]) -> Any:
    import numpy as np
    import torch

    return torch.from_numpy(np.stack([sample["tokens"] for sample in samples])).long()


ADAPTER = MDS()
