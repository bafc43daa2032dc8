"""Claims of docs/comparison.md on other loaders, with the versions that are installed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch.utils.data
from torchdata.nodes import IterableWrapper, Loader

pytestmark = pytest.mark.filterwarnings(
    # raised inside torchdata's StatefulDataLoader by torch itself
    "ignore:'set_vital' is deprecated:UserWarning"
)


def stateful(num_workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(list(range(40)), batch_size=4, num_workers=num_workers)


def test_torch_dataloader_has_no_state() -> None:
    assert not hasattr(torch.utils.data.DataLoader([1]), "state_dict")


def test_stateful_dataloader_resumes_only_with_the_same_number_of_workers() -> None:
    loader = stateful(2)
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    state = loader.state_dict()
    same = stateful(2)
    same.load_state_dict(state)
    assert next(iter(same)).tolist() == [12, 13, 14, 15]
    other = stateful(1)
    other.load_state_dict(state)
    with pytest.raises(AssertionError, match=re.compile(r"^$")):
        next(iter(other))
    del iterator


def test_torchdata_loader_repeats_an_epoch_at_the_second_resume() -> None:
    def loader() -> Loader[int]:
        return Loader(IterableWrapper(range(8)))

    first = loader()
    assert list(first) == list(range(8))
    second = loader()
    second.load_state_dict(first.state_dict())
    iterator = iter(second)
    assert [next(iterator) for _ in range(3)] == [0, 1, 2]
    third = loader()
    third.load_state_dict(second.state_dict())
    assert list(third) == list(range(8))  # 3 .. 7 would be right
