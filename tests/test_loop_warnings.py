"""Loops that would go wrong without a word are told, others are not (warnings are errors here)."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toys import ENGINES, batches, memory, one

from zephon_torch import DataLoader, SameOrderWarning
from zephon_torch.io import Dataset

AGAIN = r"next\(iter\(loader\)\) gave the same batch again"
LEFT = "the loop before this one was left after"


def shuffled(data: Any = range(100), **options: Any) -> DataLoader:
    return DataLoader(data, 4, shuffle=True, **options)


# --- the same batch again ------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))
def test_the_second_look_at_the_same_batch_is_told_once(engine: dict[str, Any]) -> None:
    """Public report: pytorch/pytorch#1917."""
    with shuffled(**engine) as loader:
        first = next(iter(loader)).tolist()
        with pytest.warns(UserWarning, match=AGAIN) as told:
            assert next(iter(loader)).tolist() == first
        assert told[0].filename == __file__, "it points at the line of the user"
        assert next(iter(loader)).tolist() == first


def test_a_break_after_one_batch_is_a_look_too() -> None:
    loader = shuffled()
    for _ in loader:
        break
    with pytest.warns(UserWarning, match=AGAIN):
        for _ in loader:
            break


def a_look_and_then_the_training(loader: DataLoader) -> None:
    next(iter(loader))
    assert len(list(loader)) == 25


def looks_in_new_orders(loader: DataLoader) -> None:
    for epoch in range(3):
        loader.set_epoch(epoch)
        next(iter(loader))


def looks_that_go_on(loader: DataLoader) -> None:
    seen = []
    for _ in range(3):
        loader.load_state_dict(loader.state_dict())
        seen.append(next(iter(loader)).tolist())
    assert len({str(batch) for batch in seen}) == 3


def looks_by_peek(loader: DataLoader) -> None:
    for _ in range(3):
        next(iter(loader.peek(1)))
        next(iter(loader.uncounted()))


def one_iterator(loader: DataLoader) -> None:
    loop = iter(loader)
    for _ in range(3):
        next(loop)


def evaluations_that_run_whole(loader: DataLoader) -> None:
    for _ in range(3):
        list(loader)


def iterators_that_nobody_asks(loader: DataLoader) -> None:
    for _ in range(3):
        iter(loader)


@pytest.mark.parametrize(
    "use",
    [
        a_look_and_then_the_training, looks_in_new_orders, looks_that_go_on, looks_by_peek,
        one_iterator, evaluations_that_run_whole, iterators_that_nobody_asks,
    ],
)  # fmt: skip
def test_other_looks_are_not(use: Callable[[DataLoader], None]) -> None:
    use(shuffled())
    gc.collect()


def test_epochs_of_one_batch_and_orders_of_files_are_not() -> None:
    for loader in (DataLoader(range(100), 4), DataLoader(range(4), 4, shuffle=True)):
        for _ in range(3):
            next(iter(loader))


def test_an_epoch_that_began_anew_is_told_at_the_line_of_the_loop() -> None:
    loader = shuffled()
    list(itertools.islice(loader, 5))
    with pytest.warns(UserWarning, match=LEFT) as told:
        list(itertools.islice(loader, 5))
    assert told[0].filename == __file__
    list(itertools.islice(loader, 5))


# --- two loaders in one order --------------------------------------------------------------------

PHOTOS, SKETCHES = [f"p{i}" for i in range(16)], [f"s{i}" for i in range(16)]


@pytest.mark.parametrize("engine", ENGINES.values(), ids=list(ENGINES))
def test_two_loaders_whose_samples_are_paired_by_accident_are_told(engine: dict[str, Any]) -> None:
    """Public report: DeepRegNet/DeepReg#159."""
    with shuffled(PHOTOS, **engine) as a, shuffled(SKETCHES, **engine) as b:
        with pytest.warns(SameOrderWarning, match="different data but in the same order") as told:
            pairs = [
                (p[1:], s[1:])
                for photos, sketches in zip(a, b, strict=True)
                for p, s in zip(photos, sketches, strict=True)
            ]
        assert [p for p, _ in pairs] == [s for _, s in pairs]
        assert len(told) == 1 and told[0].filename == __file__
        for _ in zip(a, b, strict=True):  # once is enough
            pass


def test_other_seeds_or_names_are_another_order(tmp_path: Path) -> None:
    """What the warning says to do helps."""
    others = [
        shuffled(SKETCHES, seed=1),
        shuffled(Dataset.from_torch("sketches", SKETCHES)),
    ]
    for other in others:
        pairs = [
            (p[1:], s[1:])
            for photos, sketches in zip(shuffled(PHOTOS), other, strict=True)
            for p, s in zip(photos, sketches, strict=True)
        ]
        assert [p for p, _ in pairs] != [s for _, s in pairs]


def test_files_of_equal_sizes_in_two_folders_are_told_too(tmp_path: Path) -> None:
    sources = []
    for folder in ("photos", "sketches"):
        (tmp_path / folder).mkdir()
        np.save(tmp_path / folder / "rows.npy", np.zeros((16, 2), np.int64))
        dataset = Dataset.from_path("data", tmp_path / folder)
        sources.append(one(dataset, shuffle_block_size="global"))
    with pytest.warns(SameOrderWarning):
        list(zip(*(DataLoader(source, batch_size=4) for source in sources), strict=True))
    same = (DataLoader(sources[0], batch_size=4) for _ in range(2))
    list(zip(*same, strict=True))


def one_dataset_in_two_loaders() -> None:
    data = list(range(40))
    list(zip(shuffled(data), shuffled(data), strict=True))


def a_loader_and_its_copy() -> None:
    import copy

    loader = shuffled(list(range(40)))
    list(zip(loader, copy.copy(loader), strict=True))


def a_training_and_a_validation_one_after_the_other() -> None:
    train, val = shuffled(PHOTOS), shuffled(SKETCHES)
    for _ in range(3):
        list(train)
        list(val)


def a_validation_within_a_training() -> None:
    train, val = shuffled(PHOTOS), shuffled(SKETCHES)
    for _ in train:
        list(DataLoader(SKETCHES, 4, shuffle=True))
    for _ in train:
        list(val)
        val.set_epoch(1)


def an_iterator_that_stands_still() -> None:
    train, val = shuffled(PHOTOS), shuffled(SKETCHES)
    held = iter(train)
    next(held), next(held)
    list(val)


def other_lengths() -> None:
    list(zip(shuffled(range(40)), shuffled(range(41)), strict=False))


def orders_of_files() -> None:
    list(zip(DataLoader(PHOTOS, 4), DataLoader(SKETCHES, 4), strict=True))


def ranks_in_one_process() -> None:
    ranks = [shuffled(list(range(40)), rank=rank, num_replicas=2) for rank in range(2)]
    list(zip(*ranks, strict=True))


def other_epochs() -> None:
    a, b = shuffled(PHOTOS), shuffled(SKETCHES)
    b.set_epoch(1)
    list(zip(a, b, strict=True))


def a_look_beside() -> None:
    train, val = shuffled(PHOTOS), shuffled(SKETCHES)
    for _ in train:
        list(val.peek(2))


@pytest.mark.parametrize(
    "use",
    [
        one_dataset_in_two_loaders, a_loader_and_its_copy, other_lengths, orders_of_files,
        a_training_and_a_validation_one_after_the_other, a_validation_within_a_training,
        an_iterator_that_stands_still, ranks_in_one_process, other_epochs, a_look_beside,
    ],
)  # fmt: skip
def test_other_loops_side_by_side_are_not(use: Callable[[], None]) -> None:
    use()


def test_it_is_a_warning_of_its_own_that_can_be_filtered() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", SameOrderWarning)
        list(zip(shuffled(PHOTOS), shuffled(SKETCHES), strict=True))


def test_checks_keep_no_loop_alive() -> None:
    loader = shuffled(torch.arange(40))
    loop = iter(loader)
    next(loop), next(loop)
    gc.collect()
    gc.disable()
    try:
        live = loader._live
        assert live is not None and live() is loop
        del loop
        assert live() is None
    finally:
        gc.enable()
    assert batches(DataLoader(memory("a", 4), 2)) == [[0, 1], [2, 3]]
