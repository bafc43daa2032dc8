"""Trains under TorchTitan's own Trainer on the CPU, in several worlds one after the other.

Usage: torchtitan_run.py FOLDER INTERVAL WORLD STEPS [WORLD STEPS ...]

A world is so many rank processes. They go on from the latest checkpoint, save one every INTERVAL
steps, note the ids they train on in ``FOLDER/LAUNCH.RANK``, and die right after step STEPS: what
they trained on since the last checkpoint is lost. Ranks are forked, to import torchtitan once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from toys import mixture_of, three_in_memory

# What torchtitan 0.3 needs to run on torch 2.13 without a GPU: it takes "cuda" for granted, imports
# triton for the kernels of expert parallelism, asks the device for its memory, and shortens its
# timeouts after the first step with a function that torch 2.13 has not.
torch._utils._get_available_device_type = lambda: "cpu"
kernels = types.ModuleType("torchtitan.distributed.minimal_async_ep.kernels")
kernels.__getattr__ = lambda name: None  # type: ignore[method-assign]
sys.modules[kernels.__name__] = kernels

from torchtitan.components import metrics  # noqa: E402
from torchtitan.distributed import utils as distributed_utils  # noqa: E402

memory = SimpleNamespace(
    device_name="cpu",
    get_peak_stats=lambda: metrics.DeviceMemStats(*[0] * 6),
    reset_peak_stats=lambda: None,
)
metrics.build_device_memory_monitor = lambda: memory
distributed_utils.set_pg_timeouts = lambda **_: None

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models.common import Embedding, Linear  # noqa: E402
from torchtitan.protocols.model import BaseModel  # noqa: E402
from torchtitan.protocols.model_spec import ModelSpec  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

from zephon_torch.trainers.torchtitan import TitanDataLoader  # noqa: E402

SEQ_LEN, LOCAL_BATCH, GLOBAL_BATCH, VOCABULARY = 4, 2, 8, 4096


def row_of(sample: int, tokenizer: BaseTokenizer) -> list[int]:
    return tokenizer.encode(sample)


class Repeat(BaseTokenizer):
    """Makes a row of a number."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, sample: int) -> list[int]:
        return [sample] * (SEQ_LEN + 1)

    def decode(self, ids: list[int]) -> str:
        return str(ids[0])

    def get_vocab_size(self) -> int:
        return VOCABULARY


class Bigrams(BaseModel):
    """The smallest language model."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        def update_from_config(self, **_: Any) -> None:
            pass

        def get_nparams_and_flops(self, model: torch.nn.Module, seq_len: int) -> tuple[int, int]:
            return 1, 1

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=4).build()
        self.head = Linear.Config(in_features=4, out_features=VOCABULARY).build()

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        assert positions.tolist() == [list(range(SEQ_LEN))] * LOCAL_BATCH
        return self.head(self.embedding(tokens))


def parallelize(model: torch.nn.Module, *, parallel_dims: Any, **_: Any) -> torch.nn.Module:
    if parallel_dims.fsdp_enabled:
        fully_shard(model, mesh=parallel_dims.get_mesh("fsdp"))
    return model


class NotingTrainer(Trainer):
    """Notes the ids of each batch it trains on; dies at the start of a step."""

    notes: TextIO
    last_step: int

    def train_step(self, data_iterator: Any) -> None:
        if self.step > self.last_step:
            dist.barrier()
            os._exit(0)
        super().train_step(data_iterator)

    def post_dataloading_process(self, inputs: dict[str, Any], labels: torch.Tensor) -> Any:
        real = (labels != IGNORE_INDEX).all(1)
        ids = inputs["input"][real, 0].tolist()
        self.notes.write(json.dumps({"step": self.step, "ids": ids}) + "\n")
        self.notes.flush()
        return super().post_dataloading_process(inputs, labels)


def run_rank(
    folder: Path, interval: int, launch: int, rank: int, world: int, last_step: int
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    meeting = f"file://{folder}/meeting-{launch}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    model = ModelSpec(
        name="bigrams",
        flavor="small",
        model=Bigrams.Config(),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
    config = Trainer.Config(
        model_spec=model,
        loss=CrossEntropyLoss.Config(),
        tokenizer=Repeat.Config(),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=1),
        training=TrainingConfig(
            local_batch_size=LOCAL_BATCH,
            global_batch_size=GLOBAL_BATCH,
            seq_len=SEQ_LEN,
            steps=1000,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        dataloader=TitanDataLoader.Config(
            dataset=mixture_of(three_in_memory(), exhausted_policy="redistribute"),
            transform=row_of,
            takes_tokenizer=True,
        ),
        checkpoint=CheckpointManager.Config(enable=True, interval=interval),
        dump_folder=str(folder),
    )
    trainer = NotingTrainer(config)
    trainer.last_step = last_step
    trainer.notes = (folder / f"{launch}.{rank}").open("w")
    trainer.train()


def fork_rank(*args: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        run_rank(*args)
    finally:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.stderr.flush()
        os._exit(1)


def run_world(folder: Path, interval: int, launch: int, world: int, last_step: int) -> None:
    left = {fork_rank(folder, interval, launch, rank, world, last_step) for rank in range(world)}
    while left:
        pid, status = os.wait()
        left.discard(pid)
        if status:
            for other in left:
                os.kill(other, signal.SIGKILL)
            sys.exit(f"a rank of launch {launch} ended with status {status}")


if __name__ == "__main__":
    folder, interval, *words = sys.argv[1:]
    numbers = [int(word) for word in words]
    for launch, (world, last_step) in enumerate(zip(numbers[::2], numbers[1::2], strict=True)):
        run_world(Path(folder), int(interval), launch, world, last_step)
