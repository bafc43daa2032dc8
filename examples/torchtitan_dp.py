"""A run made of TorchTitan's parts that goes on, exactly, with another data-parallel degree.

    torchrun --nproc-per-node 2 examples/torchtitan_dp.py titan-run 6
    torchrun --nproc-per-node 4 examples/torchtitan_dp.py titan-run 12

The second command goes on from the checkpoint of the first. The samples printed for each step are
those of a run that was never stopped, on any number of processes. For TorchTitan's own trainer, put
the same ``TitanDataLoader.Config`` into ``Trainer.Config(dataloader=)``.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

from zephon_torch import StaticMixtureWorkSource
from zephon_torch.io import Dataset
from zephon_torch.trainers.torchtitan import TitanDataLoader

SEQ_LEN, GLOBAL_BATCH_SIZE, VOCABULARY = 16, 8, 1024


def make_source() -> StaticMixtureWorkSource:
    web = Dataset.from_samples("web", range(600))
    code = Dataset.from_samples("code", range(600, 900))
    return StaticMixtureWorkSource([web, code], {"web": 7, "code": 3}, shuffle_block_size="global")


def row(sample: int) -> list[int]:
    return [sample] * (SEQ_LEN + 1)  # yours gives seq_len + 1 tokens of a sample


def main(folder: str, num_steps: int) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    batch = GLOBAL_BATCH_SIZE // world
    loader = TitanDataLoader.Config(dataset=make_source(), transform=row).build(
        dp_world_size=world, dp_rank=rank, tokenizer=None, seq_len=SEQ_LEN, local_batch_size=batch
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))
    optimizers = default_adamw(lr=1e-3).build(model_parts=[model])
    schedule = LRSchedulersContainer.Config()
    done = {"step": torch.tensor(0)}
    checkpoints = CheckpointManager.Config(enable=True, last_save_model_only=False).build(
        dataloader=loader,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedule.build(optimizers=optimizers, training_steps=num_steps),
        states={"train_state": done},
        sd_adapter=None,
        base_folder=folder,
    )
    checkpoints.load()
    batches = iter(loader)
    for step in range(int(done["step"]) + 1, num_steps + 1):
        inputs, labels = next(batches)
        scores = model(inputs["input"])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        (loss / world).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizers.step()
        optimizers.zero_grad()
        samples = torch.empty(GLOBAL_BATCH_SIZE, SEQ_LEN, dtype=torch.int64)
        dist.all_gather_into_tensor(samples, inputs["input"])
        if rank == 0:
            print(f"step {step}: {samples[:, 0].tolist()}", flush=True)
        done["step"].fill_(step)
        checkpoints.save(step, last_step=step == num_steps)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a Python that is shutting down
