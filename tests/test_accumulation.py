"""Half the ranks with twice the micro-batches: the same run, step by step of the optimizer."""

from __future__ import annotations

import json
import sys
from itertools import islice
from typing import Any

import pytest
import torch
from launch import SCRIPTS, Launch
from toys import flat, ids, mixture_of, three_in_memory

from zephon_torch import DataLoader

sys.path.insert(0, str(SCRIPTS))

from accumulate import RECIPES, SIZE

Steps = list[list[Any]]  # of each rank: ids and summed gradient of each step


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Steps]:
    """What four ranks noted, and then two, by recipe."""
    folder = tmp_path_factory.mktemp("accumulate")
    notes: dict[str, Steps] = {}
    for world in (4, 2):
        launch = Launch("accumulate.py", folder, world=world, output=folder / f"output-{world}")
        try:
            launch.wait()
        finally:
            launch.kill()
        ranks = [json.loads((folder / f"world-{world}.{r}").read_text()) for r in range(world)]
        notes |= {recipe: [rank[recipe] for rank in ranks] for recipe in ranks[0]}
    return notes


def ids_of(ranks: Steps) -> list[list[int]]:
    """Ids of each step, ranks one after the other."""
    return [flat(ids for ids, _ in step) for step in zip(*ranks, strict=True)]


def gradients_of(ranks: Steps) -> torch.Tensor:
    return torch.tensor([gradient for _, gradient in ranks[0]], dtype=torch.float64)


def test_four_ranks_train_on_the_epoch(noted: dict[str, Steps]) -> None:
    loader = DataLoader(mixture_of(three_in_memory(), shuffle_block_size="global"), SIZE)
    assert ids_of(noted["whole"]) == [ids(batch) for batch in loader]


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_ranks_make_the_same_steps(noted: dict[str, Steps], recipe: str) -> None:
    """The last step of the epoch has 9 samples."""
    four, two = noted["whole"], noted[recipe]
    assert [len(step) for step in ids_of(two)] == [12, 12, 12, 9]
    expected = list(islice(ids_of(four), 3, None))
    assert [sorted(step) for step in ids_of(two)] == [sorted(step) for step in expected]
    if recipe == "half a batch":
        assert ids_of(two) == expected
    torch.testing.assert_close(gradients_of(two), gradients_of(four)[3:])
