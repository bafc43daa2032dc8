"""Trains under Accelerate with torch's loader or ours and prints what happened as JSON lines.

Usage: accelerate_run.py REQUEST ..., each the JSON of the keyword arguments of ``train``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, broadcast_object_list

import zephon_torch

NUM = 23


def make_accelerator(settings: dict[str, Any]) -> Accelerator:
    return Accelerator(
        cpu=True,
        gradient_accumulation_steps=3,
        dataloader_config=DataLoaderConfiguration(**settings),
    )


def make_loader(kind: str, num_workers: int) -> Any:
    data = [{"x": torch.tensor([float(i)]), "id": i} for i in range(NUM)]
    batch_size = 4 // int(os.environ.get("WORLD_SIZE", "1"))
    if kind == "torch":
        return torch.utils.data.DataLoader(data, batch_size, num_workers=num_workers)
    loader = zephon_torch.DataLoader(data, batch_size, num_workers=num_workers)
    return zephon_torch.Skippable(loader) if kind == "skippable" else loader


def train(
    kind: str = "zephon",
    folder: str | None = None,
    stop: int | None = None,
    num_workers: int = 0,
    skip: int = 0,
    is_loader_first: bool = False,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    if is_loader_first:
        loader = make_loader(kind, num_workers)
        accelerator = make_accelerator(settings or {})
    else:
        accelerator = make_accelerator(settings or {})
        loader = make_loader(kind, num_workers)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if folder is not None and stop is None:
        accelerator.load_state(folder)
        # a process that the saved run did not have finds no count of its own
        accelerator.step = broadcast_object_list([accelerator.step])[0]
    steps, seen, devices = 0, [], set()
    for epoch in range(2):
        batches = accelerator.skip_first_batches(loader, skip) if skip and not epoch else loader
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch["x"]).sum())
                optimizer.step()
                optimizer.zero_grad()
                steps += int(accelerator.sync_gradients)
            devices.add(str(batch["x"].device))
            seen += accelerator.gather_for_metrics(batch["id"]).tolist()
            if stop is not None and len(seen) >= stop:
                accelerator.save_state(folder)
                return {"seen": seen, "steps": steps}
    state = accelerator.gradient_state
    return {
        "steps": steps,
        "seen": seen,
        "devices": sorted(devices),
        "type": type(loader).__module__.split(".")[0],
        "left": sum(ref is not None for ref in state.dataloader_references),
    }


if __name__ == "__main__":
    for line in sys.argv[1:]:
        try:
            result = train(**json.loads(line))
        except zephon_torch.ZephonError as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        if int(os.environ.get("RANK", "0")) == 0:
            print("RESULT", json.dumps(result), flush=True)
    # gloo's threads outlive the process group, and may abort a Python that is shutting down
    sys.stdout.flush()
    os._exit(0)
