"""An epoch over shards in a store, under torchrun, through a cache that all ranks share.

Usage: stored.py FOLDER URL OPTIONS

OPTIONS is a JSON object: storage options. Every rank adds the ids of each batch to its notes;
rank 0 saves the state after each step, and a run goes on from there by itself. The first one waits
in the middle of the epoch, to be killed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zephon_torch import DataLoader
from zephon_torch.io import Dataset


def main(folder: Path, url: str, options: dict[str, Any]) -> None:
    dist.init_process_group("gloo")
    rank, checkpoint = dist.get_rank(), folder / "state.json"
    dataset = Dataset.from_path("x", url, storage_options=options)
    list(dataset)  # the client is in use before workers are forked
    loader = DataLoader(
        dataset,
        global_batch_size=12,
        shuffle=True,
        seed=4,
        num_workers=2,
        cache_dir=folder / "cache",
        cache_limit="200kB",
    )
    is_first = not checkpoint.exists()
    if not is_first:
        loader.load_state_dict(json.loads(checkpoint.read_text()))
    with (folder / f"notes.{rank}").open("a") as notes, loader:
        for step, batch in enumerate(loader):
            notes.write(json.dumps([loader.delivered, batch["id"].tolist()]) + "\n")
            notes.flush()
            dist.barrier()  # so that what is in the checkpoint is in all notes
            if rank == 0:
                checkpoint.with_suffix(".tmp").write_text(json.dumps(loader.state_dict()))
                checkpoint.with_suffix(".tmp").replace(checkpoint)
            if is_first and step == 7:
                time.sleep(100)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]))
    # gloo's threads outlive the process group, and may abort a Python that is shutting down
    sys.stdout.flush()
    os._exit(0)
