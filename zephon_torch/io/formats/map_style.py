"""Checks of objects in memory that are to serve as datasets."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import ConfigurationError
from zephon_torch.support import checks


def length_of(name: str, samples: Any) -> int:
    """Ask something map-style for its length, without iterating it.

    Raises:
        ConfigurationError: It can only be iterated, or does not know its length; or it is a loader,
            whose items would be batches.
    """
    torch_data = sys.modules.get("torch.utils.data")  # not imported: not one of its objects
    if isinstance(samples, getattr(torch_data, "DataLoader", ())):
        raise ConfigurationError(
            f"dataset {name!r} is a {type(samples).__name__}, whose items would be batches: give "
            "the dataset that it was made of"
        )
    iterable = getattr(torch_data, "IterableDataset", ())
    if hasattr(samples, "__getitem__") and not isinstance(samples, iterable):
        try:
            length = _said_length(samples)
        except (TypeError, NotImplementedError) as error:
            reason = f"its length is not known ({error})"
        else:
            return checks.integer(
                f"length of dataset {name!r}", length, minimum=0, maximum=checks.MAX_SAMPLES
            )
    else:
        reason = "it can only be iterated"
    raise ConfigurationError(
        f"dataset {name!r} must have __len__ and __getitem__, got {type(samples).__name__}: "
        f"{reason}. Exact order and resume need random access: put the samples into a list or into "
        "files (Dataset.from_path)"
    )


def _said_length(samples: Any) -> Any:
    """Call ``__len__`` directly: ``len()`` refuses some values with messages of its own."""
    ask = getattr(type(samples), "__len__", None)
    return len(samples) if ask is None else ask(samples)


def check_sizes(name: str, shard_sizes: Any, length: int) -> npt.NDArray[np.int64]:
    """Return shard sizes as int64[num_shards] of their own.

    Raises:
        ConfigurationError: Not integers, negative, or their sum is not `length`.
    """
    sizes = np.asarray(shard_sizes)
    if sizes.ndim != 1 or (sizes.size and sizes.dtype.kind not in "iu"):
        raise ConfigurationError(
            f"shard_sizes of dataset {name!r} must be one integer a shard, got {sizes.dtype} of "
            f"shape {sizes.shape}"
        )
    if sizes.size and sizes.max() > checks.MAX_SAMPLES:  # unsigned ones would turn negative
        raise ConfigurationError(
            f"shard_sizes of dataset {name!r} has {sizes.max()}, {checks.MAX_SAMPLES} at most"
        )
    sizes = sizes.astype(np.int64)
    if (total := checks.total(f"shard_sizes of dataset {name!r}", sizes)) != length:
        raise ConfigurationError(
            f"shard_sizes of dataset {name!r} sum to {total:,}, but there are {length:,} samples"
        )
    return sizes


def came_as_one(samples: Any) -> bool:
    """Whether samples came as one TensorDict or tensorclass, as their own ``__getitems__`` does."""
    tensordict = sys.modules.get("tensordict")  # not imported: not one of its objects
    return tensordict is not None and bool(tensordict.is_tensor_collection(samples))
