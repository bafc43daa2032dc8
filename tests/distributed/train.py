"""A training run under torchrun: steps, checkpoints by rank 0, and a note of what was trained on.

Usage: train.py FOLDER NOTES GLOBAL_BATCH_SIZE EPOCHS ENGINE

ENGINE is a JSON object: options of the loader, such as {"num_workers": 2}.

Every rank notes each batch after the step on it: the epoch and the samples delivered that a state
says then, and the ids of the real samples. The checkpoint of rank 0 is the model's state dict
alone, written atomically after each step. A run finds it by itself and goes on.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from zephon_torch import DataLoader, StaticMixtureWorkSource, bind
from zephon_torch.io import Dataset

SIZES = {"a": 150, "b": 70, "c": 20}
STARTS = {"a": 1000, "b": 2000, "c": 3000}
LANES = 4


def make_source() -> StaticMixtureWorkSource:
    datasets = [
        Dataset.from_samples(name, range(STARTS[name], STARTS[name] + size))
        for name, size in SIZES.items()
    ]
    return StaticMixtureWorkSource(
        datasets,
        {"a": 0.6, "b": 0.3, "c": 0.1},
        seed=11,
        chunk_size=20,
        shuffle_block_size="global",
        max_samples=250,
    )


def save(model: torch.nn.Module, path: Path) -> None:
    torch.save(model.state_dict(), path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def note(log: TextIO, **line: Any) -> None:
    log.write(json.dumps(line) + "\n")
    log.flush()


def main(
    folder: Path, notes: Path, global_batch_size: int, num_epochs: int, engine: dict[str, int]
) -> None:
    dist.init_process_group("gloo")
    rank, checkpoint = dist.get_rank(), folder / "model.pt"
    log = (notes / f"log.{rank}").open("a")
    note(log, pid=os.getpid(), world=dist.get_world_size())

    loader = DataLoader(make_source(), global_batch_size=global_batch_size, lanes=LANES, **engine)
    model = torch.nn.Linear(1, 1)
    bind(model, loader)
    if checkpoint.exists():
        model.load_state_dict(torch.load(checkpoint, weights_only=True))
    trained = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    while loader.epoch < num_epochs:
        for batch in loader:
            # delivered already counts this batch; at the end of an epoch it is 0 again
            epoch, stop = loader.epoch, loader.delivered
            trained(batch[:, None].float()).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            note(log, epoch=epoch, stop=stop, ids=batch[loader.valid].tolist())
            dist.barrier()  # so that what is in the checkpoint is in all notes
            if rank == 0:
                save(model, checkpoint)
    note(log, done=True)
    loader.close()


if __name__ == "__main__":
    folder, notes, batch, epochs, engine = sys.argv[1:]
    main(Path(folder), Path(notes), int(batch), int(epochs), json.loads(engine))
    # gloo's threads outlive the process group, and may abort a Python that is shutting down
    sys.stdout.flush()
    os._exit(0)
