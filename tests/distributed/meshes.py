"""Four ranks whose data-parallel ones are a dimension of a DeviceMesh.

Usage: meshes.py FOLDER

Every rank notes by mesh its steps as (ids, valid); rank 0 saves the state in the middle of the
epoch.
"""

from __future__ import annotations

import json
import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from toys import ids, mixture_of, three_in_memory

from zephon_torch import DataLoader
from zephon_torch.errors import WorldError

SIZE = 12
SAVED_AFTER = 3


def loader_of(mesh: DeviceMesh | None) -> DataLoader:
    source = mixture_of(
        three_in_memory(), shuffle_block_size="global", exhausted_policy="redistribute"
    )
    return DataLoader(source, global_batch_size=SIZE, lanes=2, mesh=mesh)


def steps(loader: DataLoader, most: int | None = None) -> list[Any]:
    noted = []
    for batch in islice(loader, most):
        assert loader.valid is not None
        noted.append((ids(batch), loader.valid.tolist()))
    return noted


def resumed(mesh: DeviceMesh, state: Path) -> list[Any]:
    loader = loader_of(mesh)
    loader.load_state_dict(torch.load(state, weights_only=True))
    return steps(loader)


def refusal(mesh: DeviceMesh) -> str:
    try:
        loader_of(mesh)
    except WorldError as error:
        return str(error)
    return "none"


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, state = dist.get_rank(), folder / "state.pt"
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp"))
    hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = hybrid["replicate", "shard"]._flatten("dp")  # torch has no public way yet

    notes: dict[str, Any] = {"2x2 refused": refusal(square)}
    loader = loader_of(square["dp"])
    notes["2x2 begun"] = steps(loader, SAVED_AFTER)
    if rank == 0:
        torch.save(loader.state_dict(), state)
    dist.barrier()
    notes["2x2 whole"] = steps(loader_of(square["dp"]))
    notes["2x2 resumed"] = resumed(square["dp"], state)
    notes["4x1 resumed"] = resumed(line["dp"], state)
    notes["hybrid whole"] = steps(loader_of(hybrid))
    notes["hybrid resumed"] = resumed(hybrid, state)
    (folder / f"notes.{rank}").write_text(json.dumps(notes))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    # gloo's threads outlive the process group, and may abort a Python that is shutting down
    sys.stdout.flush()
    os._exit(0)
