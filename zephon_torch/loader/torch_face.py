"""The loader as code that knows torch's finds it: its attributes, and setting and indexing it."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any, NoReturn

import torch
import torch.utils.data

from zephon_torch.bridges.accelerate import Preparable
from zephon_torch.engines.messages import PrivateGenerator
from zephon_torch.loader.settings import check_setting, engine_of, with_collate_fn
from zephon_torch.nodes.map_style_view import PointedSamples
from zephon_torch.nodes.pipeline import Pipeline
from zephon_torch.work.sharing.splitter import ChunkSplitter


class TorchFace(Preparable, torch.utils.data.DataLoader[Any]):
    """torch's loader, with attributes that are true and do something when they are set.

    Args:
        dataset: what torch code finds as ``loader.dataset``.
        splitter: what it finds as batch sampler and as sampler.
        batch_size: of a rank; None where only the global one is known yet.
        num_workers, num_threads, collate_fn, pin_memory, timeout, worker_init_fn,
        multiprocessing_context, prefetch_factor, persistent_workers: as the loader's.
    """

    _is_made = False
    _pipeline: Pipeline

    def __init__(
        self,
        dataset: PointedSamples,
        splitter: ChunkSplitter,
        *,
        batch_size: int | None,
        num_workers: int,
        num_threads: int | None,
        collate_fn: Callable[[list[Any]], Any] | None,
        pin_memory: bool,
        timeout: float,
        worker_init_fn: Callable[[int], None] | None,
        multiprocessing_context: str | BaseContext | None,
        prefetch_factor: int | None,
        persistent_workers: bool,
    ) -> None:
        super().__init__(
            dataset,
            batch_sampler=splitter,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor if num_workers else None,
            persistent_workers=persistent_workers,
            # iter() of torch's loader draws from the global generator otherwise
            generator=PrivateGenerator(),
        )
        for name, value in (
            ("sampler", splitter),
            ("drop_last", splitter.drop_last),
            ("batch_size", batch_size),
        ):
            object.__setattr__(self, name, value)  # torch forbids plain assignment
        self.prefetch_factor = prefetch_factor
        self.pin_memory_device = ""
        self._num_threads = num_threads
        self._num_set = 0  # settings since the loader was made
        self._engine_has = self._settings
        self._engine = engine_of(self, persistent_workers=persistent_workers)

    def _finish_init(self) -> None:
        """From here on attributes are set by others, and checked."""
        self._is_made = True

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; the next loop follows it, as with torch's loader.

        Raises:
            ConfigurationError: setting it would do nothing, or its value cannot work.
        """
        matters = self._is_made and check_setting(self, name, value)
        super().__setattr__(name, value)
        if matters:
            self._num_set += 1
        if matters and name == "collate_fn":
            self._pipeline = with_collate_fn(self._pipeline, value)

    @property
    def _settings(self) -> tuple[int, int]:
        """How often something was set that an engine depends on: here, and on the dataset."""
        return self._num_set, self.dataset.num_set  # type: ignore[attr-defined]

    def _renew_engine(self) -> None:
        """Before a loop begins: another engine, where anything was set since the last was made."""
        if self._engine_has == self._settings:
            return
        self._engine.close()
        self._engine_has = self._settings
        self._engine = engine_of(self, persistent_workers=self.persistent_workers)

    def __getitem__(self, step: object) -> NoReturn:
        raise TypeError(
            "a loader is no dataset, and has no numbered samples: loader.batch(step) is the batch "
            "of a step, loader.datasets[i][n] a sample; where a dataset is wanted, give the one "
            "that the loader was made of"
        )
