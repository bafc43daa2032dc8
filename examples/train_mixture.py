"""Trains a small language model on a weighted mixture of two corpora of real text.

    torchrun --nproc-per-node 2 examples/train_mixture.py

Kill it at any moment, also with ``kill -9``, and give the same command again: it goes on from its
newest checkpoint at the very next sample. The number of processes may change in between. The
checkpoint is a plain ``torch.save``; how far the data has come is part of ``model.state_dict()``.

The last line is a digest of the ids of all samples that entered a forward pass, in order. It is
the same for a run that was killed and resumed as for one that was not, and for any number of
processes at one ``--global-batch-size``.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from byte_transformer import ByteTransformer, tokens
from corpora import write_corpora
from mixture_options import DEFAULT_WEIGHTS, NUM_HEADS, Data, parse_options
from records import bytes_of, identity
from run_journal import Journal, Report, gather
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zephon_torch import DataLoader, bind
from zephon_torch.errors import StateError, ZephonError
from zephon_torch.io import Dataset
from zephon_torch.work import MixtureSpec, StaticMixtureWorkSource

Batch = dict[str, Tensor]
Optimizer = torch.optim.Optimizer


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)  # the model is too small to gain from more
    try:
        with process_group():
            train(options)
    except StateError as error:
        sys.exit(f"{error}\nGive the command that began this run, or --fresh to start anew.")
    except ZephonError as error:
        sys.exit(str(error))


def train(options: argparse.Namespace) -> None:
    launcher = os.getppid()
    loader = build_loader(options, prepare_folder(options))
    model = build_model(options)
    bind(model, loader)  # from here on model.state_dict() carries the data's progress
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    checkpoint = options.work_dir / "checkpoint.pt"
    journal = load_checkpoint(checkpoint, model, optimizer)
    journal = journal or Journal(samples_by_dataset=[0] * len(loader.datasets))
    ddp = DistributedDataParallel(model)

    report = Report(options, loader, journal)
    # After the last step the checkpoint already stands at the next epoch: there is no more to do.
    for batch in loader if journal.step < options.steps else ():
        stop_if_orphaned(launcher)
        set_learning_rate(optimizer, options, journal.step)
        loss = train_step(ddp, optimizer, batch)
        datasets = torch.from_numpy(loader.pointers.dataset)
        journal.add(ids=gather(batch["id"]), datasets=gather(datasets))
        report.update(loss)
        if journal.step % options.save_every == 0 or journal.step == options.steps:
            save_checkpoint(checkpoint, model, optimizer, journal)
    report.close()


def train_step(ddp: nn.Module, optimizer: Optimizer, batch: Batch) -> Tensor:
    loss = ddp(batch["tokens"])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def set_learning_rate(optimizer: Optimizer, options: argparse.Namespace, step: int) -> None:
    """Warm up linearly, as a function of the step: there is no scheduler to save."""
    for group in optimizer.param_groups:
        group["lr"] = options.learning_rate * min(1.0, (step + 1) / options.warmup_steps)


def prepare_folder(options: argparse.Namespace) -> list[Data]:
    """Return where the datasets are; rank 0 writes what is missing, the others wait."""
    if dist.get_rank() == 0:
        options.work_dir.mkdir(parents=True, exist_ok=True)
        (options.work_dir / ".gitignore").write_text("*\n")
        if options.fresh:
            (options.work_dir / "checkpoint.pt").unlink(missing_ok=True)
        if not options.data:
            write_corpora(options.work_dir, max_bytes=options.corpus_bytes)
    dist.barrier()
    return options.data or [Data(name, str(options.work_dir / name)) for name in DEFAULT_WEIGHTS]


def build_loader(options: argparse.Namespace, datasets: list[Data]) -> DataLoader:
    source = StaticMixtureWorkSource(
        [Dataset.from_path(data.name, data.path, **data.options) for data in datasets],
        MixtureSpec(options.weights),
        seed=options.seed,
        shuffle_block_size="auto",
        exhausted_policy="repeat",
        max_samples=options.steps * options.global_batch_size,
    )
    return DataLoader(
        source,
        global_batch_size=options.global_batch_size,
        drop_last=True,
        num_workers=options.num_workers,
        transform=functools.partial(to_tensors, length=options.context + 1),
        cache_dir=options.cache_dir,
        cache_limit=options.cache_limit if options.cache_dir else None,
    )


def to_tensors(record: Any, *, length: int) -> dict[str, Any]:
    return {"tokens": tokens(bytes_of(record), length=length), "id": identity(record)}


def build_model(options: argparse.Namespace) -> ByteTransformer:
    torch.manual_seed(options.seed)
    return ByteTransformer(
        width=options.width,
        num_layers=options.layers,
        num_heads=NUM_HEADS,
        context=options.context,
    )


def save_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer, journal: Journal) -> None:
    """Write the checkpoint on rank 0: beside the old one first, so that one is always whole."""
    if dist.get_rank() != 0:
        return
    partial = path.with_suffix(".partial")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **asdict(journal)}
    torch.save(state, partial)
    partial.replace(path)


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer) -> Journal | None:
    """Restore model, data and optimizer, if there is a checkpoint."""
    if not path.exists():
        return None
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state.pop("model"))
    optimizer.load_state_dict(state.pop("optimizer"))
    return Journal(**state)


@contextmanager
def process_group() -> Iterator[None]:
    """Join torchrun's processes; alone without torchrun."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def stop_if_orphaned(launcher: int) -> None:
    """End this process if its torchrun was killed: nobody else would, and a new run may be up."""
    if "RANK" in os.environ and os.getppid() != launcher:
        sys.exit("torchrun is gone")


def leave() -> None:
    """Exit at once: gloo's threads outlive DDP, and may abort a Python that is shutting down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
    leave()
