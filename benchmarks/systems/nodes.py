"""torchdata.nodes: a sampler, a parallel mapper of batches of indices, a prefetcher."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.data import Data
from benchmarks.systems.base import System, num_workers
from benchmarks.systems.torch import Lines, Rows, mixed
from benchmarks.throughput import BATCH_SIZE


class Nodes(System):
    label = "torchdata.nodes"
    packages = ("torch", "torchdata")
    modules = ("torch", "torchdata.nodes")
    note = "Global shuffle; batches of indices go to ParallelMapper(method='process')."
    text_engines = token_engines = ("inline", "2 workers")
    mixture_engines = ()

    def text(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterable[Any]:
        mixture = data.mixture(variant["datasets"])
        dataset, sampler = mixed({name: Lines(data, name) for name in mixture}, mixture)
        return self._loader(sampler, Fetch(dataset, list), variant)

    def tokens(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterable[Any]:
        from torch.utils.data import default_collate

        dataset, sampler = mixed({"rows": Rows(data.rows(variant["shards"]))}, {"rows": 1.0})
        return self._loader(sampler, Fetch(dataset, default_collate), variant)

    def _loader(self, sampler: Any, fetch: Any, variant: dict[str, Any]) -> Iterable[Any]:
        from torchdata.nodes import Batcher, Loader, ParallelMapper, SamplerWrapper

        batches = Batcher(SamplerWrapper(sampler), BATCH_SIZE)
        workers = num_workers(variant)
        # with num_workers=0 the mapper maps in the caller's thread
        return Loader(ParallelMapper(batches, fetch, num_workers=workers, method="process"))


class Fetch:
    """A function of a batch of indices that worker processes can unpickle."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __call__(self, indices: list[int]) -> Any:
        return self._collate([self._dataset[index] for index in indices])


ADAPTER = Nodes()
