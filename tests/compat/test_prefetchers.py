"""Other people's wrappers that fetch one batch ahead, killed at any step: nothing is lost."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from launching import forget_accelerate, installed

from zephon_torch import DataLoader

TOTAL, STEPS = 22, 6


def images() -> list[tuple[torch.Tensor, int]]:
    return [(torch.full((3, 2, 2), i, dtype=torch.uint8), i) for i in range(TOTAL)]


def make(num_workers: int = 0) -> DataLoader:
    loader = DataLoader(images(), 4, shuffle=True, num_workers=num_workers)
    loader.behind = 1
    return loader


def ids(batch: Any) -> list[int]:
    return batch[1].tolist()


@pytest.fixture
def prefetch_loader(monkeypatch: pytest.MonkeyPatch) -> Any:
    """timm's PrefetchLoader out of its own file.

    The package as a whole imports torchvision, which beside a torch without CUDA often cannot be.
    """
    spec = find_spec("timm")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent
    for name, folder in (("timm", root), ("timm.data", root / "data")):
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        monkeypatch.setitem(sys.modules, name, package)
    for name, wanted in (
        ("dataset", ["IterableImageDataset", "ImageDataset"]),
        ("transforms_factory", ["create_transform"]),
        ("scheduled_sampler", ["ScheduledBatchSampler", "ScheduledTransformDataset"]),
    ):
        module = ModuleType(f"timm.data.{name}")
        vars(module).update(dict.fromkeys(wanted, object))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("constants", "distributed_sampler", "loader", "mixup", "random_erasing"):
        monkeypatch.delitem(sys.modules, f"timm.data.{name}", raising=False)
    wrapper = importlib.import_module("timm.data.loader").PrefetchLoader
    return lambda loader: wrapper(loader, device=torch.device("cpu"))


@pytest.fixture
def data_loader_shard() -> Iterator[Any]:
    """Accelerate's own wrapper, as it would be if it did not take ours as it is."""
    from accelerate.data_loader import DataLoaderShard
    from accelerate.state import PartialState

    PartialState(cpu=True)

    class Shard(DataLoaderShard):  # type: ignore[misc]
        """Iterates our loader where it would iterate a plain one made of its arguments."""

        def __init__(self, loader: DataLoader) -> None:
            super().__init__(images(), batch_size=4)
            self.base_dataloader = loader

    yield Shard
    forget_accelerate()


def used_batches(wrapped: Any, loader: DataLoader) -> Iterator[tuple[list[int], Any]]:
    """What is used, and the state while it is, of two epochs."""
    while loader.epoch < 2:
        for batch in wrapped:
            yield ids(batch), loader.state_dict()


def check_kills(wrap: Any) -> None:
    loader = make()
    whole = [batch for batch, _ in used_batches(wrap(loader), loader)]
    assert len(whole) == 2 * STEPS
    for num_workers, every in ((0, 1), (2, 5)):
        for kill in range(1, 2 * STEPS, every):
            loader = make(num_workers)
            seen, state = [], None
            for batch, saved in used_batches(wrap(loader), loader):
                seen.append(batch)
                state = saved
                if len(seen) == kill:
                    break
            loader.close()
            assert state is not None
            loader = make(num_workers)
            loader.load_state_dict(state)
            assert seen + [batch for batch, _ in used_batches(wrap(loader), loader)] == whole, kill
            loader.close()


@pytest.mark.skipif(not installed("timm"), reason="timm is not installed")
def test_timms_prefetch_loader(prefetch_loader: Any) -> None:
    check_kills(prefetch_loader)


@pytest.mark.skipif(not installed("accelerate"), reason="accelerate is not installed")
def test_accelerates_own_wrapper(data_loader_shard: Any) -> None:
    check_kills(data_loader_shard)
