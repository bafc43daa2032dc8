"""The cache that a loader's arguments ask for."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from zephon_torch.errors import ConfigurationError
from zephon_torch.io.cache.copies import ShardCopies
from zephon_torch.io.cache.shard_cache import ShardCache
from zephon_torch.io.datasets.dataset import Dataset
from zephon_torch.support import checks

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kKMGTP])(i?))?B?")
_POWERS = "KMGTP"


def make_copies(
    cache_dir: str | os.PathLike[str] | None,
    cache_limit: int | str | None,
    datasets: Sequence[Dataset],
    num_readers: int,
) -> ShardCopies | None:
    """Make the copier of remote shards; None where no cache is wanted.

    Args:
        cache_dir: its folder.
        cache_limit: its limit.
        datasets: all that will be read.
        num_readers: processes or threads that read at once, each from a shard of its own.

    Raises:
        ConfigurationError: one without the other, no size, or a limit below what the readers have
            open.
    """
    if cache_dir is None and cache_limit is None:
        return None
    if cache_dir is None or cache_limit is None:
        raise ConfigurationError(
            f"cache_dir={cache_dir!r} and cache_limit={cache_limit!r}: give both, a folder and the "
            'most that it may take, such as "200GB"'
        )
    limit = parse_size("cache_limit", cache_limit)
    for dataset in datasets:
        _check_limit(dataset, limit, num_readers)
    return ShardCopies(ShardCache(cache_dir, limit))


def parse_size(name: str, size: int | str) -> int:
    """Bytes of a size: a number, or a text like "20GB" (powers of 1000) or "20GiB" (of 1024).

    Raises:
        ConfigurationError: neither, or below 1.
    """
    number: object = size
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        if match is None:
            raise ConfigurationError(
                f'{name} is {size!r}: expected bytes, as a number or like "20GB" or "500MiB"'
            )
        digits, prefix, binary = match.groups()
        power = _POWERS.index(prefix.upper()) + 1 if prefix else 0
        number = int(float(digits) * (1024 if binary else 1000) ** power)
    return checks.integer(name, number, minimum=1)


def _check_limit(dataset: Dataset, limit: int, num_readers: int) -> None:
    if not dataset.num_shards:
        return
    largest = int(dataset.shard_num_bytes.argmax())
    file = dataset.remote_file(largest)
    if file is None:
        return
    if file.num_bytes * num_readers > limit:
        at_once = f", and {num_readers} readers have one open each" if num_readers > 1 else ""
        raise ConfigurationError(
            f"cache_limit is {limit:,} bytes, but shard {file.url!r} of dataset {dataset.name!r} "
            f"has {file.num_bytes:,}{at_once}: raise the limit to some times that, or leave "
            "cache_dir out"
        )
