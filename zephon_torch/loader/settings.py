"""Settings of a loader that is made, and the engine that its attributes ask for.

As with torch's loader, how batches are made may change between two loops: the loop that runs goes
on as it began, the next one is as was set. Which samples come, and in which batches, belongs to the
plan: setting that raises, for it would otherwise do nothing.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import default_collate

from zephon_torch.engines.engine import Engine, make_engine
from zephon_torch.engines.processes import WorkerOptions
from zephon_torch.errors import ConfigurationError
from zephon_torch.loader.arguments import check_engine, check_functions, refuse_torch_arguments
from zephon_torch.nodes.pipeline import Pipeline

if TYPE_CHECKING:
    from zephon_torch.loader.torch_face import TorchFace

_OF_THE_ENGINE = {
    "collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn",
    "multiprocessing_context", "prefetch_factor",
}  # fmt: skip
_NEVER_TAKEN = {"generator", "in_order", "pin_memory_device"}
_FIXED_BY_TORCH = {
    "dataset", "batch_size", "sampler", "batch_sampler", "drop_last", "persistent_workers",
}  # fmt: skip
_FIXED = _FIXED_BY_TORCH | {
    "shuffle", "mixture", "seed", "lanes", "global_batch_size", "transform", "takes_rng",
    "on_error", "provenance", "num_threads", "cache_dir", "cache_limit", "rank", "num_replicas",
    "mesh", "source", "datasets",
}  # fmt: skip


def is_setting(name: str) -> bool:
    """Whether an attribute says how or which batches are made: setting it must not be lost."""
    return name in _OF_THE_ENGINE or name in _FIXED or name in _NEVER_TAKEN


def check_setting(loader: TorchFace, name: str, value: Any) -> bool:
    """Whether an attribute that is about to be set changes how the next loop makes its batches.

    A user's subclass may have attributes of its own under names that only our constructor knows.

    Args:
        loader: a loader that is made.
        name: the attribute.
        value: its new value.

    Raises:
        ConfigurationError: setting it would do nothing, or its value cannot work.
    """
    is_ours = type(loader).__module__.split(".")[0] == "zephon_torch"
    if name in (_FIXED if is_ours else _FIXED_BY_TORCH):
        raise ConfigurationError(
            f"{name} cannot be set on a loader that is made: give {name}= to a new one. Of the "
            "same plan, it goes on at the same sample after "
            "new.load_state_dict(loader.state_dict())"
        )
    if name in _NEVER_TAKEN:
        refuse_torch_arguments(**{name: value})
    if name == "collate_fn":
        check_functions(transform=None, takes_rng=False, collate_fn=value)
    elif name in ("num_workers", "prefetch_factor", "timeout"):
        asked = {"num_workers": loader.num_workers, "prefetch_factor": None, "timeout": 0}
        check_engine(num_threads=loader._num_threads, **(asked | {name: value}))
    return name in _OF_THE_ENGINE


def with_collate_fn(pipeline: Pipeline, collate_fn: Any) -> Pipeline:
    """A pipeline with another collate_fn; None and torch's default are the default."""
    function = None if collate_fn is default_collate else collate_fn
    return replace(pipeline, collate=replace(pipeline.collate, function=function))


def engine_of(loader: TorchFace, *, persistent_workers: bool) -> Engine:
    """The engine that a loader's attributes ask for."""
    return make_engine(
        loader._pipeline,
        num_threads=loader._num_threads,
        depth=loader.prefetch_factor,
        workers=WorkerOptions(
            num_workers=loader.num_workers,
            prefetch_factor=loader.prefetch_factor,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            persistent_workers=persistent_workers,
        ),
    )


def pins_here(loader: TorchFace, stacklevel: int) -> bool:
    """Whether batches are pinned in this process: those of workers torch's own loader pins.

    Warns where they were to be and cannot.
    """
    if not loader.pin_memory or loader.num_workers:
        return False
    if not torch.cuda.is_available():
        warnings.warn(
            "pin_memory=True has no effect: no accelerator is found",
            UserWarning,
            stacklevel=stacklevel + 1,
        )
    return torch.cuda.is_available()
