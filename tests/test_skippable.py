"""Trainers that skip the first batches of an epoch: read at once, counted, and never twice."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from toys import batches, ids, mixture_of, three_in_memory

from zephon_torch import ConfigurationError, DataLoader, Skippable, StateError, bind


def make(**options: Any) -> DataLoader:
    source = mixture_of(three_in_memory(), shuffle_block_size="global")
    return DataLoader(source, **({"batch_size": 4} | options))


EPOCH = batches(make())


class SkippingSampler:
    """A batch sampler that passes by the first items of another."""

    def __init__(self, batch_sampler: Any, num_skipped: int) -> None:
        self.batch_sampler, self.num_skipped = batch_sampler, num_skipped

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self.batch_sampler):
            if number >= self.num_skipped:
                yield item

    def __len__(self) -> int:
        return len(self.batch_sampler) - self.num_skipped


def rest_of(loader: Any, num_skipped: int) -> torch.utils.data.DataLoader[Any]:
    """What accelerate.skip_first_batches makes of a loader."""
    return torch.utils.data.DataLoader(
        loader.dataset,
        batch_sampler=SkippingSampler(loader.batch_sampler, num_skipped),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        generator=loader.generator,
    )


@pytest.mark.parametrize("num_skipped", [0, 1, len(EPOCH) - 1, len(EPOCH), len(EPOCH) + 1])
def test_the_rest_of_an_epoch_comes_and_the_next_one_follows(num_skipped: int) -> None:
    loader = make()
    rest = rest_of(Skippable(loader), num_skipped)
    if num_skipped <= len(EPOCH):
        assert len(rest) == len(EPOCH) - num_skipped
    assert batches(rest) == EPOCH[num_skipped:]
    if num_skipped < len(EPOCH):
        assert (loader.epoch, loader.delivered) == (1, 0)
    reference = make()
    reference.set_epoch(loader.epoch)
    assert batches(Skippable(loader)) == batches(reference)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_batch_counts_when_it_is_handed_over(num_workers: int) -> None:
    loader = make(num_workers=num_workers)
    for number, batch in enumerate(rest_of(Skippable(loader), 3), 4):
        assert ids(batch) == EPOCH[number - 1]
        if number == 6:
            break
    assert loader.stats.batches == 3
    assert loader.delivered == 24
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert batches(resumed) == EPOCH[6:]
    loader.close()


def test_nothing_is_read_of_what_is_skipped() -> None:
    read: list[int] = []
    loader = make(transform=lambda sample: read.append(sample) or sample)
    assert ids(next(iter(rest_of(Skippable(loader), 15)))) == EPOCH[15]
    assert read == EPOCH[15]


def test_an_epoch_that_never_ends_can_be_skipped_into() -> None:
    source = mixture_of(three_in_memory(), exhausted_policy="repeat")
    assert source.total_samples == math.inf
    loader = DataLoader(source, batch_size=4)
    rest = iter(rest_of(Skippable(loader), 10_000))
    assert ids(next(rest)) == ids(DataLoader(source, batch_size=4).batch(10_000))


def test_the_epoch_is_the_one_that_was_set() -> None:
    loader, reference = make(), make()
    rest = rest_of(Skippable(loader), 2)
    rest.batch_sampler.batch_sampler.set_epoch(5)  # type: ignore[union-attr]
    reference.set_epoch(5)
    assert batches(rest) == batches(reference)[2:]
    assert loader.epoch == 6


def test_an_epoch_that_was_broken_off_is_begun_anew_behind_what_is_skipped() -> None:
    loader, reference = make(), make()
    next(iter(loader))
    loader.set_epoch(5)
    reference.set_epoch(5)
    assert batches(rest_of(Skippable(loader), 2)) == batches(reference)[2:]


def test_two_ranks_share_what_is_left() -> None:
    found = [
        batches(rest_of(Skippable(make(batch_size=2, rank=rank, num_replicas=2)), 7))
        for rank in range(2)
    ]
    assert [one + two for one, two in zip(*found, strict=True)][:-1] == EPOCH[7:-1]


def restored(delivered: int, route: str = "loader") -> DataLoader:
    saved, loader = make(), make()
    saved.load_state_dict(saved.state_dict() | {"delivered": delivered})
    if route == "loader":
        loader.load_state_dict(saved.state_dict())
    else:
        model, source = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        bind(source, saved)
        bind(model, loader)
        model.load_state_dict(source.state_dict())
    return loader


@pytest.mark.parametrize("route", ["loader", "model"])
def test_what_a_restored_state_has_left_behind_is_not_skipped_again(route: str) -> None:
    loader = restored(12, route)
    assert batches(rest_of(Skippable(loader), 3)) == EPOCH[3:]
    assert (loader.epoch, loader.delivered) == (1, 0)


@pytest.mark.parametrize("route", ["loader", "model"])
def test_a_restored_state_that_stands_elsewhere_raises_and_stays(route: str) -> None:
    loader = restored(12, route)
    with pytest.raises(StateError, match="after 12 samples of epoch 0, the trainer skips 4 batch"):
        next(iter(rest_of(Skippable(loader), 4)))
    with pytest.raises(StateError, match="the trainer begins in epoch 2"):
        Skippable(loader).batch_sampler.set_epoch(2)  # type: ignore[union-attr]
    assert batches(loader) == EPOCH[3:]


def test_a_restored_epoch_that_nobody_skips_into_goes_on_with_a_warning() -> None:
    skippable = Skippable(restored(12))
    with pytest.warns(UserWarning, match="leave ignore_data_skip=False"):
        iteration = iter(skippable)
    assert batches(iteration) == EPOCH[3:]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(batches(skippable)) == len(batches(Skippable(restored(0)))) == len(skippable)


def test_it_stands_for_its_loader() -> None:
    loader = make()
    skippable = Skippable(loader)
    assert isinstance(skippable, torch.utils.data.DataLoader)
    assert len(skippable.dataset) == len(loader.dataset)  # type: ignore[arg-type]
    skippable.set_epoch(3)
    assert loader.epoch == 3
    skippable.load_state_dict(loader.state_dict() | {"delivered": 8})
    assert skippable.state_dict()["delivered"] == loader.delivered == 8
    assert repr(loader) in repr(skippable)


def test_copies_and_pickles_share_nothing() -> None:
    skippable = Skippable(restored(12))
    for other in (copy.deepcopy(skippable), pickle.loads(pickle.dumps(skippable))):
        assert batches(rest_of(other, 3)) == EPOCH[3:]
    assert skippable.loader.delivered == 12


def test_skipping_draws_no_random_numbers() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    batches(rest_of(Skippable(make()), 3))
    batches(Skippable(make()))
    assert torch.equal(torch.get_rng_state(), before)


# --- without Skippable ---------------------------------------------------------------------------


def test_a_loader_with_no_progress_can_be_read_through_its_batch_sampler() -> None:
    assert batches(rest_of(make(), 3)) == EPOCH[3:]


@pytest.mark.parametrize("route", ["loader", "model"])
def test_a_restored_state_is_not_passed_by(route: str) -> None:
    loader = restored(12, route)
    with pytest.raises(ConfigurationError, match=r"use zephon_torch.Skippable\(loader\)"):
        next(iter(rest_of(loader, 3)))
    assert batches(loader) == EPOCH[3:]
    assert ids(next(iter(rest_of(loader, 3)))) == ids(loader.batch(3))  # epoch 1: nothing is lost


def test_a_loader_that_a_trainer_prepared_is_read_by_itself() -> None:
    loader = make()
    # what Accelerator.prepare does
    loader._is_accelerate_prepared = True
    with pytest.raises(ConfigurationError, match="iterate the loader itself"):
        next(iter(loader.batch_sampler))  # type: ignore[arg-type]


def test_an_epoch_set_during_another_is_the_one_that_is_skipped_into() -> None:
    loader, reference = make(), make()
    reference.set_epoch(2)
    loop = iter(Skippable(loader))
    next(loop)
    loader.set_epoch(2)
    next(loop)
    assert batches(rest_of(Skippable(loader), 3)) == batches(reference)[3:]


def test_after_a_whole_epoch_was_skipped_the_next_one_comes() -> None:
    loader, reference = make(), make()
    assert batches(rest_of(Skippable(loader), len(EPOCH))) == []
    assert (loader.epoch, loader.delivered) == (1, 0)
    reference.set_epoch(1)
    assert batches(loader) == batches(reference)


def test_skipping_beyond_the_epoch_of_a_restored_state_raises() -> None:
    loader = make()
    loader.load_state_dict(loader.state_dict() | {"delivered": 8})
    with pytest.raises(StateError, match=f"skips {len(EPOCH)} batches of 4"):
        batches(rest_of(Skippable(loader), len(EPOCH)))


def test_to_skip_nothing_of_a_restored_epoch_warns_as_not_to_skip() -> None:
    loader = make()
    loader.load_state_dict(loader.state_dict() | {"delivered": 8})
    with pytest.warns(UserWarning, match="nobody skipped them"):
        assert batches(rest_of(Skippable(loader), 0)) == EPOCH[2:]


def test_what_is_set_on_it_is_set_on_the_loader() -> None:
    class Scaled:
        scale = 1

        def __len__(self) -> int:
            return 8

        def __getitem__(self, number: int) -> int:
            return number * self.scale

    skippable: Any = Skippable(DataLoader(Scaled(), 4))
    skippable.dataset.scale = 10
    assert skippable.dataset.scale == 10
    skippable.collate_fn = sum
    assert list(skippable) == list(rest_of(skippable, 0)) == [60, 220]
    with pytest.raises(ConfigurationError, match="batch_size cannot be set"):
        skippable.batch_size = 2
