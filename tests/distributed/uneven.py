"""One of several gloo processes over 1003 ids: every step is an all-reduce, so ranks must agree.

Usage: uneven.py FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from zephon_torch import DataLoader, StaticMixtureWorkSource
from zephon_torch.io import Dataset

NUM_IDS = 1003


def run(*, drop_last: bool) -> tuple[list[list[list[tuple[int, bool]]]], list[int]]:
    """Two epochs: for each step the ids with their validity; and the sum over the real ones."""
    source = StaticMixtureWorkSource(
        [Dataset.from_samples("a", range(NUM_IDS))],
        {"a": 1},
        chunk_size=10,
        shuffle_block_size="global",
    )
    loader = DataLoader(source, batch_size=4, drop_last=drop_last)
    epochs, sums = [], []
    for _ in range(2):
        steps, total = [], torch.zeros((), dtype=torch.int64)
        for batch in loader:
            assert loader.valid is not None
            part = batch[loader.valid].sum()
            dist.all_reduce(part)  # hangs if another rank has no batch
            total += part
            steps.append(list(zip(batch.tolist(), loader.valid.tolist(), strict=True)))
        epochs.append(steps)
        sums.append(int(total))
    return epochs, sums


def main(folder: Path) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=200))
    dropped, _ = run(drop_last=True)
    padded, sums = run(drop_last=False)
    report = {"drop": dropped, "pad": padded, "sums": sums}
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # gloo's threads outlive the process group, and may abort a Python that is shutting down
    sys.stdout.flush()
    os._exit(0)
