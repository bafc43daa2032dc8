"""Trains under Accelerate with torch's loader or ours and prints what happened as JSON lines."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from accelerate import Accelerator

import zephon_torch

NUM = 23


def train(
    kind: str, folder: str | None = None, stop: int | None = None, num_workers: int = 0
) -> dict[str, Any]:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    data = [{"x": torch.tensor([float(i)]), "id": i} for i in range(NUM)]
    make = {"torch": torch.utils.data.DataLoader, "zephon": zephon_torch.DataLoader}[kind]
    loader = make(data, batch_size=4 // accelerator.num_processes, num_workers=num_workers)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if folder is not None and stop is None:
        accelerator.load_state(folder)
    steps, seen, devices = 0, [], set()
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch["x"]).sum())
                optimizer.step()
                optimizer.zero_grad()
                steps += int(accelerator.sync_gradients)
            devices.add(str(batch["x"].device))
            seen += accelerator.gather_for_metrics(batch["id"]).tolist()
            if stop is not None and len(seen) >= stop:
                accelerator.save_state(folder)
                return {"seen": seen}
    state = accelerator.gradient_state
    return {
        "steps": steps,
        "seen": seen,
        "devices": sorted(devices),
        "type": type(loader).__module__.split(".")[0],
        "left": [ref is not None for ref in state.dataloader_references],
    }


if __name__ == "__main__":
    for line in sys.argv[1:]:
        result = train(**json.loads(line))
        if Accelerator(cpu=True).is_main_process:
            print("RESULT", json.dumps(result), flush=True)
    # gloo's threads outlive the process group, and may abort a Python that is shutting down
    sys.stdout.flush()
    os._exit(0)
