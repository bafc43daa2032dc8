"""Many runs one after the other in the same ranks: each resumes, takes some steps and is saved.

Usage: elastic.py JOBS SAVED NOTES

JOBS is a JSON file: "data", the folder of the datasets; "states", files of states that were saved
before; "jobs", a list of

    {"name": ..., "resume": name of a state or null, "plan": options of the work source,
     "loader": options of the loader, "route": "loader" or "model", "until": see walk()}

Every rank notes one line a job: its steps as [epoch, delivered, ids, valid]. Rank 0 saves the
states of all jobs in one file.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from toys import SIZES, ids, mixture_of

from zephon_torch import DataLoader, bind
from zephon_torch.io import Dataset

Step = tuple[int, int, list[int], list[bool]]


def walk(loader: DataLoader, until: int | str) -> list[Step]:
    """Steps until there are so many; "edge": until the end of the epoch; "past": one beyond it."""
    steps: list[Step] = []
    first = loader.epoch
    while True:
        for batch in loader:
            assert loader.valid is not None
            steps.append((loader.epoch, loader.delivered, ids(batch), loader.valid.tolist()))
            is_over = loader.epoch > first
            if len(steps) == until or (
                is_over and (until == "edge" or (until == "past" and loader.delivered > 0))
            ):
                return steps


def run(job: dict[str, Any], datasets: list[Dataset], state: Any) -> tuple[list[Step], Any]:
    """The steps of a job, and its state after them: in the middle of things."""
    with DataLoader(mixture_of(datasets, **job["plan"]), **job["loader"]) as loader:
        load, save = loader.load_state_dict, loader.state_dict
        if job["route"] == "model":
            model = torch.nn.Linear(1, 1)
            bind(model, loader)
            load, save = partial(model.load_state_dict, strict=True), model.state_dict
        if state is not None:
            load(state)
        return walk(loader, job["until"]), save()


def main(jobs: Path, saved: Path, notes: Path) -> None:
    dist.init_process_group("gloo")
    given = json.loads(jobs.read_text())
    datasets = [Dataset.from_path(name, Path(given["data"], name)) for name in SIZES]
    states: dict[str | None, Any] = {None: None}
    for path in given["states"]:
        states |= torch.load(path, weights_only=True)
    reached = {}
    with Path(f"{notes}.{dist.get_rank()}").open("w") as lines:
        for job in given["jobs"]:
            steps, reached[job["name"]] = run(job, datasets, states[job["resume"]])
            lines.write(json.dumps({"name": job["name"], "steps": steps}) + "\n")
    if dist.get_rank() == 0:
        torch.save(reached, saved)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
    # gloo's threads outlive the process group, and may abort a Python that is shutting down
    sys.stdout.flush()
    os._exit(0)
