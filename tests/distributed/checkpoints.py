"""Saves every kind of checkpoint at some worlds and loads each at another, in new processes.

Usage: checkpoints.py FOLDER PARTS PAIR ..., where a PAIR such as 2-3 says: saved by 2, loaded by 3.

With 1 for PARTS, each pair loads everything. With N, each loads an N-th, another one than the pair
before it: after N pairs, every model has met every way, and every pair all models and all ways.

A checkpoint is `FOLDER/WORLD/MODEL/WAY`: of a model that stands in one of `MODELS`, saved in one of
`WAYS`. What follows a load is written to `FOLDER/PAIR.json`, by rank 0 for all ranks: by model and
by way, how many steps were done at the save, the weights that were loaded, and the global batches
that came next. The weights are all made equal to the number of steps just before the save.

All processes are forked from one that has imported all they need, which takes the longest.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from zephon_torch import DataLoader, PlanMismatch, StaticMixtureWorkSource, bind, strip
from zephon_torch.io import Dataset

GLOBAL_BATCH_SIZE, EPOCH = 12, 53  # the last global batch has 5 samples
FOLLOWING = 7  # steps after a load: more than an epoch has
SHARDS = {"a": [20, 12], "b": [9, 6], "c": [6]}
WEIGHTS = {"a": 0.6, "b": 0.3, "c": 0.1}
NEVER = -1  # weights of a model that was not loaded


def make_source(
    shards: dict[str, list[int]] = SHARDS, weights: dict[str, float] = WEIGHTS, seed: int = 7
) -> StaticMixtureWorkSource:
    datasets = [
        Dataset.from_samples(name, range(start, start + sum(sizes)), shard_sizes=sizes)
        for start, (name, sizes) in zip(range(1000, 9000, 1000), shards.items(), strict=False)
    ]
    return StaticMixtureWorkSource(
        datasets, weights, seed=seed, chunk_size=10, shuffle_block_size="global", max_samples=EPOCH
    )


# --- other plans: what a user may have done between a save and a load ----------------------------

CHANGES: dict[str, Callable[[], StaticMixtureWorkSource]] = {
    "a dataset is added": lambda: make_source(SHARDS | {"d": [5]}, WEIGHTS | {"d": 0.1}),
    "a dataset is removed": lambda: make_source(
        {"a": SHARDS["a"], "b": SHARDS["b"]}, {"a": 0.6, "b": 0.3}
    ),
    "a dataset is renamed": lambda: make_source(
        {"a": SHARDS["a"], "b": SHARDS["b"], "e": SHARDS["c"]}, {"a": 0.6, "b": 0.3, "e": 0.1}
    ),
    "a shard is added": lambda: make_source(SHARDS | {"b": [9, 6, 2]}),
    "a weight is changed": lambda: make_source(weights=WEIGHTS | {"b": 0.2}),
    "the seed is changed": lambda: make_source(seed=8),
}


# --- models --------------------------------------------------------------------------------------


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def compiled_block(model: nn.Module) -> nn.Module:
    model[0] = compiled(model[0])  # type: ignore[operator,index]
    return model


def tensor_parallel(model: nn.Module) -> nn.Module:
    """Over pairs of ranks where their number is even; FSDP2 over the rest."""
    mesh = two_dimensions()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


def two_dimensions() -> Any:
    world = dist.get_world_size()
    tp = 2 if world % 2 == 0 else 1
    return init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))


MODELS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "compiled": compiled,
    "compiled in place": compiled_in_place,
    "compiled block": compiled_block,
    "DDP": DistributedDataParallel,
    "DDP, compiled": lambda model: compiled(DistributedDataParallel(model)),
    "compiled, DDP": lambda model: DistributedDataParallel(compiled(model)),
    "FSDP2": fully_shard,
    "FSDP2, compiled": lambda model: compiled(fully_shard(model)),
    "tensor parallel, FSDP2": tensor_parallel,
}


class Trainer:
    """What a training script holds: a model, its wrapping, an optimizer, a loader."""

    def __init__(
        self, model: str, source: StaticMixtureWorkSource | None = None, *, bound: bool = True
    ) -> None:
        mesh = two_dimensions()["dp"] if model.startswith("tensor parallel") else None
        self.loader = DataLoader(
            source or make_source(), global_batch_size=GLOBAL_BATCH_SIZE, mesh=mesh
        )
        self.model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        if bound:
            bind(self.model, self.loader)
        self.wrapped = MODELS[model](self.model)
        self.optimizer = torch.optim.Adam(self.wrapped.parameters())
        self.data_rank = mesh.get_local_rank() if mesh is not None else dist.get_rank()
        self.steps = 0
        self._batches = self._endless()
        self.fill(NEVER)

    def _endless(self) -> Iterator[torch.Tensor]:
        while True:
            yield from self.loader

    def step(self, *, train: bool = True) -> list[int]:
        """One step; ids of this rank's samples."""
        batch = next(self._batches)
        if train:
            self.wrapped(batch[:1, None] / 1000).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.steps += 1
        return batch[self.loader.valid].tolist()

    def fill(self, value: float) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(value)

    def weights(self) -> list[float]:
        """Distinct values of all weights on all ranks."""
        tensors = (
            weight.full_tensor() if isinstance(weight, DTensor) else weight
            for weight in self.model.parameters()
        )
        return sorted({value for tensor in tensors for value in tensor.flatten().tolist()})


def following(trainer: Trainer) -> list[list[int]]:
    """The next global batches: data-parallel ranks one after the other, whose peers agree."""
    mine = trainer.data_rank, [trainer.step(train=number == 0) for number in range(FOLLOWING)]
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    by_rank = dict(everyones)
    assert all(by_rank[rank] == batches for rank, batches in everyones), "peers disagree"
    steps = zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True)
    return [[i for part in step for i in part] for step in steps]


# --- ways of saving and loading ------------------------------------------------------------------


def save_by_rank_0(state: Callable[[], dict[str, Any]], path: Path) -> None:
    """Nobody else even asks for the state: no collective may be needed for it."""
    if dist.get_rank() == 0:
        torch.save(state(), path / "model.pt")
    dist.barrier()


def read(path: Path) -> dict[str, Any]:
    return torch.load(path / "model.pt", weights_only=True)


def save_torch(trainer: Trainer, path: Path) -> None:
    save_by_rank_0(trainer.model.state_dict, path)


def load_torch(trainer: Trainer, path: Path) -> None:
    trainer.model.load_state_dict(read(path))


def save_wrapped(trainer: Trainer, path: Path) -> None:
    save_by_rank_0(trainer.wrapped.state_dict, path)


def load_wrapped(trainer: Trainer, path: Path) -> None:
    trainer.wrapped.load_state_dict(read(path))


def save_full(trainer: Trainer, path: Path) -> None:
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(trainer.wrapped, options=options)
    save_by_rank_0(lambda: state, path)


def load_full(trainer: Trainer, path: Path) -> None:
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(trainer.wrapped, read(path), options=options)


def load_broadcast(trainer: Trainer, path: Path) -> None:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = read(path) if dist.get_rank() == 0 else {}
    set_model_state_dict(trainer.wrapped, state, options=options)


def save_sharded(trainer: Trainer, path: Path) -> None:
    dcp.save({"model": get_model_state_dict(trainer.wrapped)}, checkpoint_id=path)


def load_sharded(trainer: Trainer, path: Path) -> None:
    state = {"model": get_model_state_dict(trainer.wrapped)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(trainer.wrapped, state["model"])


def save_with_optimizer(trainer: Trainer, path: Path) -> None:
    options = StateDictOptions(cpu_offload=True)
    model, optimizer = get_state_dict(trainer.wrapped, trainer.optimizer, options=options)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)


def load_with_optimizer(trainer: Trainer, path: Path) -> None:
    model, optimizer = get_state_dict(trainer.wrapped, trainer.optimizer)
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    set_state_dict(
        trainer.wrapped,
        trainer.optimizer,
        model_state_dict=model,
        optim_state_dict=optimizer,
    )


def save_stateful(trainer: Trainer, path: Path) -> None:
    dcp.save({"model": trainer.wrapped, "loader": trainer.loader}, checkpoint_id=path)


def load_stateful(trainer: Trainer, path: Path) -> None:
    dcp.load({"model": trainer.wrapped, "loader": trainer.loader}, checkpoint_id=path)


def save_beside(trainer: Trainer, path: Path) -> None:
    """The loader alone carries the progress, as in trainers that know nothing of `bind`."""
    state = strip(get_model_state_dict(trainer.wrapped))
    dcp.save({"model": state, "loader": trainer.loader}, checkpoint_id=path)


def load_beside(trainer: Trainer, path: Path) -> None:
    state = strip(get_model_state_dict(trainer.wrapped))
    dcp.load({"model": state, "loader": trainer.loader}, checkpoint_id=path)
    set_model_state_dict(trainer.wrapped, state)


def load_beside_bound(trainer: Trainer, path: Path) -> None:
    """The same checkpoint, into a model that carries the progress by now."""
    state = strip(get_model_state_dict(trainer.wrapped))
    dcp.load({"model": state, "loader": trainer.loader}, checkpoint_id=path)
    set_model_state_dict(trainer.wrapped, state, options=StateDictOptions(strict=False))


def save_async(trainer: Trainer, path: Path) -> None:
    """The loop goes on while it is written: what counts is the moment of the call."""
    state = {"model": get_model_state_dict(trainer.wrapped), "loader": trainer.loader}
    # a group of its own: collectives of the writing thread must not meet those of the loop
    written = dcp.async_save(state, checkpoint_id=path, process_group=dist.new_group())
    for _ in range(2):
        trainer.step()
    trainer.fill(trainer.steps)
    written.result()


def load_async(trainer: Trainer, path: Path) -> None:
    state = {"model": get_model_state_dict(trainer.wrapped), "loader": trainer.loader}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(trainer.wrapped, state["model"])


How = Callable[[Trainer, Path], None]


@dataclass(frozen=True)
class Way:
    """How to save, and how to load into a model that carries the progress or has none."""

    save: How
    load: How
    bound: bool = True


WAYS: dict[str, Way] = {
    "torch.save of the model": Way(save_torch, load_torch),
    "torch.save of the wrapped model": Way(save_wrapped, load_wrapped),
    "full state dict": Way(save_full, load_full),
    "full state dict, broadcast": Way(save_full, load_broadcast),
    "DCP": Way(save_sharded, load_sharded),
    "DCP with the optimizer": Way(save_with_optimizer, load_with_optimizer),
    "DCP of model and loader": Way(save_stateful, load_stateful),
    "DCP of the loader beside a model": Way(save_beside, load_beside, bound=False),
    "DCP while the loop goes on": Way(save_async, load_async),
}


def ways_of(model: str) -> list[str]:
    """Where weights are sharded, no rank has the whole model to save."""
    return [way for way in WAYS if "FSDP2" not in model or not way.startswith("torch.save")]


# --- checkpoints that do not fit as they are -----------------------------------------------------


def load_stripped(trainer: Trainer, path: Path) -> None:
    state = strip(get_model_state_dict(trainer.wrapped))
    dcp.load({"model": state}, checkpoint_id=path)
    set_model_state_dict(trainer.wrapped, state, options=StateDictOptions(strict=False))


def load_loosely(trainer: Trainer, path: Path) -> None:
    """Where DDP or torch.compile wrap the model, torch refuses missing keys unless told not to."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    state = read(path) if dist.get_rank() == 0 else {}
    set_model_state_dict(trainer.wrapped, state, options=options)


def load_partially(trainer: Trainer, path: Path) -> None:
    state = {"model": trainer.wrapped, "loader": trainer.loader}
    dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))


def load_torch_stripped(trainer: Trainer, path: Path) -> None:
    trainer.model.load_state_dict(strip(read(path)))


def load_full_stripped(trainer: Trainer, path: Path) -> None:
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(trainer.wrapped, strip(read(path)), options=options)


def save_model_only(trainer: Trainer, path: Path) -> None:
    dcp.save({"model": trainer.wrapped}, checkpoint_id=path)


# by model and way of saving: a checkpoint from before bind, loaded by a bound model
BEFORE_BIND: list[tuple[str, str, Way]] = [
    ("plain", "torch.save of the model", Way(save_torch, load_torch)),
    ("DDP", "torch.save of the wrapped model", Way(save_wrapped, load_wrapped)),
    ("FSDP2", "full state dict", Way(save_full, load_full)),
    ("FSDP2", "full state dict, broadcast", Way(save_full, load_broadcast)),
    ("FSDP2, compiled", "full state dict, not strict", Way(save_full, load_loosely)),
    ("DDP, compiled", "full state dict, not strict", Way(save_full, load_loosely)),
    ("FSDP2", "DCP, stripped", Way(save_sharded, load_stripped)),
    ("FSDP2", "DCP, partially", Way(save_model_only, load_partially)),
    ("DDP", "DCP, stripped", Way(save_sharded, load_stripped)),
    ("DDP", "DCP, partially", Way(save_model_only, load_partially)),
]
# the other way round: a bound model's checkpoint, loaded by a model that has no progress
WITHOUT_BIND: list[tuple[str, str, Way]] = [
    ("plain", "torch.save of the model", Way(save_torch, load_torch_stripped, bound=False)),
    ("FSDP2", "full state dict", Way(save_full, load_full_stripped, bound=False)),
    ("FSDP2", "DCP", Way(save_sharded, load_sharded, bound=False)),
]
# saved from one model, loaded into another: the keys are those of the model itself
ACROSS: list[tuple[str, str, str, Way]] = [
    ("FSDP2, compiled", "full state dict", "plain", Way(save_full, load_torch)),
    ("plain", "torch.save of the model", "FSDP2", Way(save_torch, load_broadcast)),
    ("DDP, compiled", "DCP", "FSDP2", Way(save_sharded, load_sharded)),
    ("FSDP2", "DCP with the optimizer", "compiled", Way(save_sharded, load_with_optimizer)),
    ("tensor parallel, FSDP2", "DCP", "DDP", Way(save_sharded, load_sharded)),
    (
        "FSDP2",
        "DCP of the loader beside a model",
        "DDP",
        Way(save_beside, load_beside_bound),
    ),
]
# ways through which another plan has to be noticed
NOTICED: list[tuple[str, str]] = [
    ("plain", "torch.save of the model"),
    ("FSDP2", "full state dict, broadcast"),
    ("FSDP2", "DCP"),
    ("FSDP2", "DCP of model and loader"),
    ("FSDP2", "DCP of the loader beside a model"),
]


# --- what the processes do-----------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Which of the checkpoints to load: those whose indices sum to `number` modulo `of`."""

    number: int
    of: int

    def has(self, *indices: int) -> bool:
        return sum(indices) % self.of == self.number % self.of

    @property
    def checkpoints(self) -> set[tuple[str, str]]:
        """Models and ways of the checkpoints of bound models that it loads."""
        return (
            {
                (model, way)
                for row, model in enumerate(MODELS)
                for column, way in enumerate(ways_of(model))
                if self.has(row, column)
            }
            | {(model, way) for i, (model, way, _) in enumerate(WITHOUT_BIND) if self.has(i)}
            | {(model, way) for i, (model, way, *_) in enumerate(ACROSS) if self.has(i)}
            | {
                (model, way)
                for row in range(len(CHANGES))
                for column, (model, way) in enumerate(NOTICED)
                if self.has(row, column)
            }
        )


def save_all(folder: Path, parts: list[Part]) -> None:
    """All that some parts load."""
    wanted = set[tuple[str, str]]().union(*(part.checkpoints for part in parts))
    for model in MODELS:
        trainer = Trainer(model)
        for way in ways_of(model):
            if (model, way) in wanted:
                save(trainer, WAYS[way], folder / model / way)
            trainer.step()
    for index, (model, name, way) in enumerate(BEFORE_BIND):
        if any(part.has(index) for part in parts):
            trainer = Trainer(model, bound=False)
            trainer.step()
            save(trainer, way, folder / "before bind" / model / name)


def save(trainer: Trainer, way: Way, path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    trainer.fill(trainer.steps)
    (path / "steps.json").write_text(json.dumps(trainer.steps))
    way.save(trainer, path)


def load_all(folder: Path, part: Part) -> dict[str, Any]:
    return {
        model: {
            way: load(model, WAYS[way], folder / model / way)
            for column, way in enumerate(ways_of(model))
            if part.has(row, column)
        }
        for row, model in enumerate(MODELS)
    } | {
        "before bind": {
            f"{model}, {name}": load(model, way, folder / "before bind" / model / name)
            for index, (model, name, way) in enumerate(BEFORE_BIND)
            if part.has(index)
        },
        "without bind": {
            f"{model}, {name}": load(model, way, folder / model / name)
            for index, (model, name, way) in enumerate(WITHOUT_BIND)
            if part.has(index)
        },
        "across": {
            f"{model}, {name}, {other}": load(other, way, folder / model / name)
            for index, (model, name, other, way) in enumerate(ACROSS)
            if part.has(index)
        },
        "another plan": {
            change: {
                f"{model}, {name}": refusals(model, change, WAYS[name], folder / model / name)
                for column, (model, name) in enumerate(NOTICED)
                if part.has(row, column)
            }
            for row, change in enumerate(CHANGES)
        },
    }


def load(model: str, way: Way, path: Path) -> dict[str, Any]:
    trainer = Trainer(model, bound=way.bound)
    way.load(trainer, path)
    return {
        "saved after": json.loads((path / "steps.json").read_text()),
        "weights": trainer.weights(),
        "following": following(trainer),
    }


def refusals(model: str, change: str, way: Way, path: Path) -> list[str]:
    """What the uses of the loader say after a load, one after the other."""
    trainer = Trainer(model, CHANGES[change](), bound=way.bound)
    way.load(trainer, path)
    loader, said = trainer.loader, []
    uses: list[Callable[[], Any]] = [
        lambda: iter(loader), lambda: len(loader), lambda: loader.batch(0),
        lambda: loader.remaining, lambda: iter(loader),
    ]  # fmt: skip
    for use in uses:
        try:
            use()
        except PlanMismatch as mismatch:
            said.append(str(mismatch))
        else:
            said.append("accepted")
    return said


def process(rank: int, world: int, meeting: Path, job: Callable[[], None]) -> None:
    """One rank of a job."""
    store = dist.FileStore(str(meeting), world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=200)
    )
    torch.manual_seed(rank)
    job()
    dist.destroy_process_group()
    # gloo's threads outlive the process group, and may abort a Python that is shutting down
    sys.stdout.flush()
    os._exit(0)


def load_part(folder: Path, saved_by: int, part: Part) -> None:
    found = load_all(folder / str(saved_by), part)
    if dist.get_rank() == 0:
        path = folder / f"{saved_by}-{dist.get_world_size()}.json"
        path.write_text(json.dumps(found))


def launch(world: int, *args: Any) -> None:
    """`process` on every rank; raises if one fails, with its traceback, and ends the others."""
    mp.start_processes(process, (world, *args), nprocs=world, start_method="fork")


def main(folder: Path, num_parts: int, pairs: list[tuple[int, int]]) -> None:
    compiled(nn.Linear(1, 1))(torch.ones(1, 1))  # imports what it needs, before the first fork
    parts = {pair: Part(number, num_parts) for number, pair in enumerate(pairs)}
    for saved_by in sorted({saved_by for saved_by, _ in pairs}):
        wanted = [part for pair, part in parts.items() if pair[0] == saved_by]
        job = partial(save_all, folder / str(saved_by), wanted)
        launch(saved_by, folder / f"saving-{saved_by}", job)
    for (saved_by, loaded_by), part in parts.items():
        job = partial(load_part, folder, saved_by, part)
        launch(loaded_by, folder / f"loading-{saved_by}-{loaded_by}", job)


if __name__ == "__main__":
    folder, parts, *pairs = sys.argv[1:]
    main(Path(folder), int(parts), [(int(pair[0]), int(pair[2])) for pair in pairs])
