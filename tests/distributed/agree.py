"""What two ranks are told where they do not begin alike.

Usage: agree.py FOLDER

Each rank writes, for each case, the ids it got, and what was raised, to FOLDER/<rank>.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zephon_torch import DataLoader, ZephonError

STEPS = 4


def make(seed: int = 3, **options: Any) -> DataLoader:
    return DataLoader(range(64), 4, shuffle=True, seed=seed, **options)


def train(loader: DataLoader, num_steps: int = STEPS) -> dict[str, Any]:
    """Some steps of a loop, as far as they go."""
    seen: list[list[int]] = []
    errors: list[str] = []
    loop = iter(loader)
    while len(seen) + len(errors) < num_steps:
        try:
            seen.append(next(loop).tolist())
        except ZephonError as error:
            errors.append(f"{type(error).__name__}: {error}")
    assert len(set(errors)) <= 1, "each call says the same"
    return {"seen": seen, "error": errors[0] if errors else ""}


def all_alike(rank: int) -> dict[str, Any]:
    return train(loaded(make()))


def loaded_on_one(rank: int) -> dict[str, Any]:
    return train(make() if rank else loaded(make()))


def a_seed_of_its_own(rank: int) -> dict[str, Any]:
    return train(make(seed=rank))


def other_batches_on_one(rank: int) -> dict[str, Any]:
    return train(DataLoader(range(64), 4 + rank, shuffle=True, seed=3))


def looked_at_on_one(rank: int) -> dict[str, Any]:
    loader = make()
    if rank == 0:
        train(loader, 1)
    return train(loaded(loader))


def evaluated_on_one(rank: int) -> dict[str, Any]:
    if rank == 0:
        train(make(rank=0, num_replicas=1))
    return train(loaded(make()))


def loaded(loader: DataLoader) -> DataLoader:
    loader.load_state_dict(loader.state_dict() | {"delivered": 16})
    return loader


CASES = [
    all_alike,
    loaded_on_one,
    a_seed_of_its_own,
    looked_at_on_one,
    evaluated_on_one,
    other_batches_on_one,
    all_alike,
]

if __name__ == "__main__":
    dist.init_process_group("gloo")
    told = {}
    for number, case in enumerate(CASES):
        told[f"{number} {case.__name__}"] = case(dist.get_rank())
        dist.barrier()
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(told))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a Python that is shutting down
