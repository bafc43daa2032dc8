"""torchdata's StatefulDataLoader over the same datasets as torch's own loader."""

from __future__ import annotations

from typing import Any

from benchmarks.systems.base import num_workers
from benchmarks.systems.torch import Torch
from benchmarks.throughput import BATCH_SIZE


class Stateful(Torch):
    label = "StatefulDataLoader"
    packages = ("torch", "torchdata")
    modules = ("torch", "torchdata.stateful_dataloader")
    text_engines = token_engines = ("inline", "2 workers")
    mixture_engines = ()

    def make(self, dataset: Any, sampler: Any, variant: dict[str, Any], **options: Any) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(
            dataset, BATCH_SIZE, sampler=sampler, num_workers=num_workers(variant), **options
        )


ADAPTER = Stateful()
