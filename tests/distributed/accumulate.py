"""A training run on any number of ranks that steps its optimizer after every 12 samples.

Usage: accumulate.py FOLDER

On four ranks: from the start, a checkpoint after 3 steps, then on to the end of the epoch. On two:
from that checkpoint to the end, once for each way to halve a step into two micro-batches. Every
rank notes, for each step of the optimizer, its ids and the sum of all ranks' gradients.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from toys import mixture_of, three_in_memory

from zephon_torch import DataLoader, bind

SIZE = 12
RECIPES: dict[str, dict[str, int]] = {
    "half a global batch": {"global_batch_size": SIZE // 2},
    "half a batch": {"global_batch_size": SIZE, "pieces": 2},
}


class Training:
    """A model that is trained, and the loader bound to it."""

    def __init__(self, *, global_batch_size: int = SIZE, pieces: int = 1) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 1, dtype=torch.float64)
        source = mixture_of(three_in_memory(), shuffle_block_size="global")
        self.loader = DataLoader(source, global_batch_size=global_batch_size)
        self._pieces = pieces
        bind(self.model, self.loader)

    def run(self, checkpoint: Path | None = None) -> list[Any]:
        """Ids and gradient of each step to the end of the epoch; a checkpoint after the third."""
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        steps: list[Any] = []
        ids: list[int] = []
        for batch in self.loader:
            samples = batch[self.loader.valid]
            ids += samples.tolist()
            for piece in samples.tensor_split(self._pieces):
                features = torch.sin(piece[:, None] * torch.tensor([1.0, 2.0, 3.0]).double())
                (self.model(features) - 1).square().sum().div(SIZE).backward()
            if self.loader.delivered % SIZE == 0:  # 0 at the end of an epoch
                steps.append((ids, self._summed_gradient()))
                optimizer.step()
                optimizer.zero_grad()
                ids = []
                if checkpoint is not None and len(steps) == 3 and dist.get_rank() == 0:
                    torch.save(self.model.state_dict(), checkpoint)
        return steps

    def _summed_gradient(self) -> list[float]:
        values = []
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
            values += parameter.grad.flatten().tolist()
        return values


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    notes = {}
    if dist.get_world_size() == 4:
        notes["whole"] = Training().run(folder / "model.pt")
    else:
        for recipe, options in RECIPES.items():
            training = Training(**options)
            training.model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
            notes[recipe] = training.run()
    path = folder / f"world-{dist.get_world_size()}.{dist.get_rank()}"
    path.write_text(json.dumps(notes))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # gloo's threads outlive the process group, and may abort a Python that is shutting down
    sys.stdout.flush()
    os._exit(0)
