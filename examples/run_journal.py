"""What a run has trained on, and how it shows.

The digest is a chain: each step hashes the ids of its global batch, taken from the batches and
joined by rank, together with the digest of the steps before it. So the whole history is 32 bytes
that a checkpoint can carry, and it does not depend on the number of ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from zephon_torch import DataLoader


@dataclass(slots=True, kw_only=True)
class Journal:
    """What the run has trained on up to a step: small, the same on each rank, and resumable."""

    samples_by_dataset: list[int]
    step: int = 0
    digest: str = ""

    def add(self, *, ids: Tensor, datasets: Tensor) -> None:
        """Add one global batch: the ids and the datasets of its samples, in delivered order."""
        link = bytes.fromhex(self.digest) + ids.numpy().astype("<i8").tobytes()
        self.digest = hashlib.sha256(link).hexdigest()
        for dataset, count in enumerate(datasets.bincount().tolist()):
            self.samples_by_dataset[dataset] += count
        self.step += 1


def gather(column: Tensor) -> Tensor:
    """Join the ranks' columns in the order of ranks: one column of the global batch."""
    parts = [torch.empty_like(column) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, column)
    return torch.cat(parts)


class Report:
    """Rank 0's progress bar; lines of text where the output is no terminal."""

    def __init__(self, options: argparse.Namespace, loader: DataLoader, journal: Journal) -> None:
        self.options, self.loader, self.journal = options, loader, journal
        self.is_terminal = sys.stderr.isatty()
        self.is_silent = dist.get_rank() != 0
        self.first_step = journal.step
        self.start = time.perf_counter()
        self.bar = tqdm(
            total=len(loader),
            initial=journal.step,
            bar_format="{n_fmt}/{total_fmt} {bar} {remaining}{postfix}",
            dynamic_ncols=True,
            disable=self.is_silent or not self.is_terminal,
        )
        if journal.step:
            self.write(f"resumed after step {journal.step}")

    def update(self, loss: Tensor) -> None:
        """Show where the run stands after one more step; called on every rank."""
        step = self.journal.step
        status = f"loss {gather(loss[None]).mean():.4f} | {self.speed()} | {self.mixture()}"
        self.bar.set_postfix_str(status, refresh=False)
        self.bar.update()
        is_due = step % self.options.log_every == 0 or step == self.options.steps
        if is_due and not self.is_terminal:
            self.write(f"step {step} | {status}")

    def close(self) -> None:
        """Print the digest of the whole run."""
        self.bar.close()
        self.write(f"digest: {self.journal.digest}")

    def speed(self) -> str:
        """Say how fast it goes, and in which share of the time training waited for data."""
        seconds = time.perf_counter() - self.start
        num_samples = (self.journal.step - self.first_step) * self.options.global_batch_size
        waiting = self.loader.stats.wait_seconds / seconds
        return f"{num_samples / seconds:.0f} samples/s | data wait {waiting:.1%}"

    def mixture(self) -> str:
        """Say each dataset's share of the run so far, and the share it should have."""
        counts, weights = self.journal.samples_by_dataset, self.options.weights
        shares = [count / sum(counts) for count in counts]
        return " ".join(
            f"{dataset.name} {share:.3f}/{weights[dataset.name] / sum(weights.values()):.3g}"
            for dataset, share in zip(self.loader.datasets, shares, strict=True)
        )

    def write(self, line: str) -> None:
        """Print a line at once, on rank 0."""
        if not self.is_silent:
            print(line, flush=True)
