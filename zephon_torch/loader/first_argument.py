"""The first argument of a DataLoader, made into a work source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.utils.data

from zephon_torch.errors import ConfigurationError
from zephon_torch.io.datasets.dataset import Dataset
from zephon_torch.nodes.map_style_view import PointedSamples
from zephon_torch.work.order.mixture import MixtureSpec
from zephon_torch.work.sources.static_mixture import StaticMixtureWorkSource, WorkSource

_SINGLE = "dataset"  # name of a torch dataset that is given alone


def as_source(
    dataset: Any,
    *,
    mixture: MixtureSpec | Mapping[str, float] | None,
    seed: int | None,
    shuffle: bool | None,
) -> WorkSource:
    """A work source from a work source, a dataset, a map-style torch dataset or several of these.

    Several come as a mapping by name, or as a list of :class:`~zephon_torch.io.Dataset`. A dict
    with the keys 0, 1, 2 ... and a TensorDict are map-style datasets, as for torch.

    Raises:
        ConfigurationError: options that a work source has of its own, several datasets without a
            mixture, an iterable-style dataset, or a loader.
    """
    if isinstance(dataset, WorkSource):
        _refuse_own_options(mixture=mixture, seed=seed, shuffle=shuffle)
        return dataset
    if (
        isinstance(dataset, list | tuple)
        and dataset
        and all(isinstance(one, Dataset) for one in dataset)
    ):
        dataset = {one.name: one for one in _differing(dataset)}
    if isinstance(dataset, Mapping) and (mixture is not None or _is_by_name(dataset)):
        if mixture is None:
            raise ConfigurationError(
                f"several datasets ({sorted(map(str, dataset))}) need mixture=, the weight of each "
                "by name"
            )
        datasets = [_as_dataset(name, value) for name, value in dataset.items()]
    else:
        datasets = [_as_dataset(None, dataset)]
        mixture = {datasets[0].name: 1} if mixture is None else mixture
    return StaticMixtureWorkSource(
        datasets,
        mixture,
        seed=0 if seed is None else seed,
        shuffle_shards=False,
        shuffle_block_size="global" if shuffle else None,
    )


def _is_by_name(dataset: Mapping[Any, Any]) -> bool:
    """Whether a mapping holds several datasets by name; else it is one, as torch takes it.

    Raises:
        ConfigurationError: a dict whose keys are neither names nor the numbers of its samples.
    """
    first = next(iter(dataset), "")  # of a TensorDict, a row
    if isinstance(first, str):
        return True
    if isinstance(dataset, dict):
        absent = [number for number in range(len(dataset)) if number not in dataset]
        if absent:
            raise ConfigurationError(
                f"a dict of {len(dataset)} entries has the key {first!r} but not {absent[0]}: as a "
                f"dataset it needs the keys 0 to {len(dataset) - 1} (list(samples.values()) is one "
                "in any case); several datasets need names that are strings, and mixture="
            )
    return False


def _differing(datasets: Sequence[Dataset]) -> Sequence[Dataset]:
    names = [dataset.name for dataset in datasets]
    if len(set(names)) < len(names):
        raise ConfigurationError(f"two datasets of a mixture have one name: {sorted(names)}")
    return datasets


def _refuse_own_options(**options: object) -> None:
    for option, value in options.items():
        if value is not None:
            raise ConfigurationError(
                f"{option}={value!r} was given with a work source, which has it already: set it "
                "where the source is made"
                + (" (shuffle_shards=, shuffle_block_size=)" if option == "shuffle" else "")
            )


def _as_dataset(name: str | None, value: Any) -> Dataset:
    if isinstance(value, Dataset):
        if name is not None and value.name != name:
            raise ConfigurationError(
                f"the mapping calls a dataset {name!r} whose own name is {value.name!r}: use "
                "its own name as key (also in mixture=), or give a list of datasets"
            )
        return value
    if isinstance(value, PointedSamples):
        raise ConfigurationError(
            "this is the dataset of another loader, which knows samples by pointer: give that "
            "loader's source, for the same plan, or one of its datasets (loader.datasets[i])"
        )
    if isinstance(value, torch.utils.data.IterableDataset):
        raise ConfigurationError(
            f"{type(value).__name__} is an IterableDataset: it can only be read from the start, so "
            "it cannot be resumed at a sample. Give a map-style dataset (with __len__ and "
            "__getitem__), or files with zephon_torch.io.Dataset.from_path"
        )
    if isinstance(value, str | bytes):
        raise ConfigurationError(
            f"{value!r} is text, not a dataset: read files with zephon_torch.io.Dataset.from_path"
        )
    return Dataset.from_torch(_SINGLE if name is None else name, value)
