"""Loaders and bound models on their way to a process that is started without a fork.

Public report: pytorch/pytorch#146828. Usage as a script: tests/test_spawned.py METHOD FOLDER.
"""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from processes import environment

from zephon_torch import DataLoader, Skippable, bind
from zephon_torch.engines.messages import PrivateGenerator
from zephon_torch.io import Dataset

pytestmark = pytest.mark.timeout(400)  # each process imports torch
KEY = "data_progress._extra_state"
TOTAL, SIZE = 40, 4
ENGINES: dict[str, dict[str, Any]] = {
    "inline": {},
    "two workers": {"num_workers": 2, "multiprocessing_context": "fork"},
    "two threads": {"num_threads": 2},
}
Result = dict[str, Any]


def make(data: Any, **options: Any) -> DataLoader:
    return DataLoader(data, SIZE, shuffle=True, **options)


def ids_of(batch: Any) -> list[int]:
    return (batch["id"] if isinstance(batch, dict) else batch).tolist()


def train_all(folder: str, cases: list[tuple[str, Any, Any]]) -> None:
    """In the child: what comes, and what the model says after three batches."""
    found = {}
    for name, loader, model in cases:
        seen, saved = [], None
        for batch in loader:
            seen.append(ids_of(batch))
            if len(seen) == 3 and model is not None:
                saved = int(model.state_dict()[KEY][2])
        found[name] = {"seen": seen, "saved": saved}
    Path(folder, "found.json").write_text(json.dumps(found))


def share(rank: int, folder: str, loader: DataLoader, model: torch.nn.Module) -> None:
    """One of two ranks, started by mp.spawn from a parent that had used the loader alone."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    seen = [ids_of(batch) for batch in loader]
    state = model.state_dict()[KEY][1:3].tolist()
    Path(folder, f"{rank}.json").write_text(json.dumps({"seen": seen, "state": state}))
    dist.barrier()
    dist.destroy_process_group()


def main(method: str, folder: Path) -> None:
    lines = "".join(json.dumps({"id": i}) + "\n" for i in range(TOTAL))
    (folder / "data").mkdir()
    (folder / "data" / "0.jsonl").write_text(lines)
    datasets = {"list": list(range(TOTAL)), "files": Dataset.from_path("a", folder / "data")}
    cases, loops = [], []
    for kind, data in datasets.items():
        for name, options in ENGINES.items():
            for when in ("before", "in the middle"):
                loader, model = make(data, **options), torch.nn.Linear(1, 1)
                if when == "in the middle":
                    loops.append(iter(loader))
                    next(loops[-1]), next(loops[-1])
                label = f"{kind}, {name}, {when}"
                cases.append((f"{label}, Skippable", Skippable(copy.deepcopy(loader)), None))
                bind(model, loader)
                cases.append((label, loader, model))
    child = mp.get_context(method).Process(target=train_all, args=(str(folder), cases))
    child.start()
    child.join()
    for _, loader, _ in cases:
        getattr(loader, "loader", loader).close()
    if method == "spawn":
        loader, model = make(datasets["list"]), torch.nn.Linear(1, 1)
        bind(model, loader)
        len(loader)  # as rank 0 of 1
        mp.spawn(share, args=(str(folder), loader, model), nprocs=2)
    sys.exit(child.exitcode)


@pytest.fixture(scope="module", params=["spawn", "forkserver"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    command = [sys.executable, __file__, request.param, str(folder)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=380, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def epoch() -> list[list[int]]:
    return [ids_of(batch) for batch in make(list(range(TOTAL)))]


def test_they_deliver_there_what_they_deliver_here(found: Path) -> None:
    results = json.loads((found / "found.json").read_text())
    assert len(results) == 2 * len(ENGINES) * 2 * 2
    for name, result in results.items():
        assert sorted(chain(*result["seen"])) == list(range(TOTAL)), name
        if name.startswith("list"):
            assert result["seen"] == epoch(), name


def test_a_model_follows_the_loader_that_came_with_it(found: Path) -> None:
    results = json.loads((found / "found.json").read_text())
    saved = {name: r["saved"] for name, r in results.items() if "Skippable" not in name}
    assert len(saved) == len(results) // 2 and set(saved.values()) == {3 * SIZE}


def test_ranks_share_what_their_parent_made_alone(found: Path) -> None:
    if found.name.startswith("forkserver"):
        return  # mp.spawn only spawns
    ranks = [json.loads((found / f"{rank}.json").read_text()) for rank in range(2)]
    seen = [rank["seen"] for rank in ranks]
    assert [len(batches) for batches in seen] == [TOTAL // SIZE // 2] * 2
    assert sorted(chain(*seen[0], *seen[1])) == list(range(TOTAL))
    assert [rank["state"] for rank in ranks] == [[1, 0], [1, 0]]


def test_a_copy_that_is_no_start_of_a_process_follows_no_loader() -> None:
    loader, model = make(list(range(TOTAL))), torch.nn.Linear(1, 1)
    bind(model, loader)
    for how in (copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))):
        other, twin = how((loader, model))
        next(iter(other))
        assert twin.state_dict()[KEY][2] == 0


def test_the_private_generator_is_one_for_each() -> None:
    generator = PrivateGenerator()
    generator.manual_seed(3)
    for other in (copy.deepcopy(generator), pickle.loads(pickle.dumps(generator))):
        assert isinstance(other, PrivateGenerator) and other is not generator


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
