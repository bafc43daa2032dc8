"""Trains on a mixture of code and prose with Lightning Fabric; run it again to go on.

    python examples/lightning_fabric.py [--devices 2]

Kill it at any moment and give the command again, also with another number of devices: it goes on
from its last checkpoint at the very next sample. The digest at the end is of the ids of all samples
that were trained on, in order: one run gives the same as many.
"""

import argparse
import hashlib
import inspect
import os
from pathlib import Path
from pydoc_data.topics import topics

import torch
from lightning.fabric import Fabric
from torch import nn

from zephon_torch import DataLoader
from zephon_torch.io import Dataset
from zephon_torch.work import MixtureSpec, StaticMixtureWorkSource

CODE, PROSE = inspect.getsource(inspect).split("\n\n"), [topics[name] for name in sorted(topics)]


def tokens(record):
    data = record["text"].encode()[:65].ljust(65)
    return {"id": record["id"], "tokens": torch.tensor(list(data))}


def make_loader():
    datasets = [
        Dataset.from_samples(name, [{"id": i, "text": text} for i, text in enumerate(texts, start)])
        for name, texts, start in [("code", CODE, 0), ("prose", PROSE, 1_000_000)]
    ]
    mixture = MixtureSpec({"code": 0.7, "prose": 0.3})
    source = StaticMixtureWorkSource(datasets, mixture, shuffle_block_size=256)
    return DataLoader(source, global_batch_size=8, drop_last=True, transform=tokens)


def train(fabric, checkpoint):
    data = make_loader()
    model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = fabric.setup(model, optimizer)
    # Fabric's wrapper moves batches to the device; where the run stands is asked of the loader
    loader = fabric.setup_dataloaders(data)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "step": 0, "digest": ""}
    if checkpoint.exists():
        fabric.load(checkpoint, state)
    while data.epoch < 2:
        for batch in loader:
            ids = fabric.all_gather(batch["id"]).flatten().tolist()  # one rank after the other
            state["digest"] = hashlib.sha256(f"{state['digest']}{ids}".encode()).hexdigest()
            logits = model(batch["tokens"][:, :-1]).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, batch["tokens"][:, 1:].flatten())
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            if state["step"] % 7 == 0 or data.delivered == 0:  # so at the end of an epoch
                fabric.save(checkpoint, state)
                fabric.print(f"step {state['step']} loss {loss.item():.2f}", flush=True)
    fabric.print(f"digest: {state['digest']}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--folder", default="runs/lightning_fabric")
    options = parser.parse_args()
    fabric = Fabric(accelerator="cpu", devices=options.devices)
    fabric.launch()
    train(fabric, Path(options.folder, "last.ckpt"))
    os._exit(0)  # gloo's threads may abort a Python that is shutting down
