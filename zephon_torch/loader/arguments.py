"""Checks of DataLoader's arguments that concern no other part."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, get_args

from zephon_torch.errors import ConfigurationError
from zephon_torch.nodes.tolerate import OnError
from zephon_torch.support import checks
from zephon_torch.work.sources.static_mixture import StaticMixtureWorkSource

OF_A_SOURCE = {
    name: "a work source has it, DataLoader(StaticMixtureWorkSource(datasets, mixture, {}), ...)"
    for name in inspect.signature(StaticMixtureWorkSource).parameters
    if name not in ("datasets", "mixture")
}
_MOST = 1024  # workers or threads: more is a slip, and would take the machine down


def refuse_torch_arguments(
    sampler: Any = None,
    batch_sampler: Any = None,
    generator: Any = None,
    in_order: bool = True,
    pin_memory_device: str = "",
) -> None:
    """Refuse what the plan decides, and what torch itself ignores by now.

    Raises:
        ConfigurationError: one was given; the message says what to use instead.
    """
    for name, value, instead in (
        (
            "sampler",
            sampler,
            "the plan is the sampler, and shares itself out to the ranks: without a "
            "DistributedSampler use shuffle=, and without others mixture= or a work source",
        ),
        ("batch_sampler", batch_sampler, "batches are cut from the plan: use batch_size="),
        ("generator", generator, "order depends on the seed alone: use seed="),
    ):
        if value is not None:
            raise ConfigurationError(f"{name}= is not taken: {instead}")
    if not in_order:
        raise ConfigurationError(
            "in_order=False is not taken: the order would depend on the speed of the workers and "
            "could not be resumed"
        )
    if pin_memory_device:
        raise ConfigurationError(
            f"pin_memory_device={pin_memory_device!r} is not taken: memory is pinned for the "
            "current accelerator, so leave it out"
        )


def check_engine(
    num_workers: int, num_threads: int | None, prefetch_factor: int | None, timeout: float
) -> None:
    """Refuse numbers of workers, threads and batches ahead that cannot work."""
    for name, value, minimum, maximum in (
        ("num_workers", num_workers, 0, _MOST),
        ("num_threads", num_threads, 0, _MOST),
        ("prefetch_factor", prefetch_factor, 1, None),
    ):
        if value is not None or name == "num_workers":
            checks.integer(name, value, minimum=minimum, maximum=maximum)
    if num_workers and num_threads is not None:
        raise ConfigurationError(
            f"num_workers={num_workers} and num_threads={num_threads}: use processes or threads"
        )
    if timeout and not num_workers:
        raise ConfigurationError(
            f"timeout={timeout} without worker processes: only these can be timed out, give "
            "num_workers="
        )


def check_functions(*, transform: Any, takes_rng: bool, collate_fn: Any) -> None:
    """Refuse what cannot be called."""
    named = {"transform": transform, "collate_fn": collate_fn}
    if isinstance(transform, Mapping):
        named |= {f"transform of {name!r}": value for name, value in transform.items()}
        del named["transform"]
    for name, value in named.items():
        if value is not None and not callable(value):
            raise ConfigurationError(f"{name} is {value!r}: expected a function")
    if takes_rng and transform is None:
        raise ConfigurationError("takes_rng=True without a transform: give transform=")


def check_on_error(on_error: object) -> None:
    """Refuse what is none of the ways to treat bad records."""
    if on_error not in get_args(OnError):
        raise ConfigurationError(
            f'on_error is {on_error!r}: expected "raise", "skip" or "substitute"'
        )


def per_rank_batch_size(batch_size: int | None, global_batch_size: int | None) -> int | None:
    """The batch size of a rank; None where the global one was given."""
    if global_batch_size is not None:
        if batch_size not in (None, 1):  # 1 is torch's default, so it counts as not given
            raise ConfigurationError(
                f"give one of batch_size and global_batch_size, got {batch_size} and "
                f"{global_batch_size}"
            )
        return None
    if batch_size is None:
        raise ConfigurationError(
            "batch_size=None (samples one by one) is not taken: use batch_size=1 and "
            "collate_fn=lambda samples: samples[0]"
        )
    return batch_size
