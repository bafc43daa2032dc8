"""Warnings of two ranks of which one evaluates alone, or is slow, or looks at data by itself.

Usage: attend.py FOLDER CASE

Each rank writes its warnings to FOLDER/<rank>.txt, those at its exit too, after the line "exit".
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zephon_torch import DataLoader

DATA = list(range(40))


def evaluate(**options: Any) -> None:
    for _ in DataLoader(DATA, 4, **options):
        pass


def train(loader: DataLoader) -> None:
    for _ in loader:
        dist.all_reduce(torch.ones(1))


def alone(rank: int) -> None:
    if rank == 0:
        evaluate()


def alone_and_training_goes_on(rank: int) -> None:
    loader = DataLoader(DATA, 4, shuffle=True, seed=1)
    train(loader)
    if rank == 0:
        evaluate()
    dist.barrier()
    train(loader)


def alone_by_arguments(rank: int) -> None:
    if rank == 0:
        evaluate(rank=0, num_replicas=1)


def one_is_slow(rank: int) -> None:
    loader = DataLoader(DATA, 4, shuffle=True)
    for _ in range(2):
        time.sleep(rank)
        list(loader)  # without any collective: the other rank is far ahead
        evaluate()


def one_looks(rank: int) -> None:
    loader = DataLoader(DATA, 4, shuffle=True)
    if rank == 0:
        next(iter(loader))
        list(itertools.islice(loader, 3))
    for _ in range(2):
        warnings.simplefilter("ignore" if rank == 0 else "always")  # of the epoch begun anew
        loop = iter(loader)
        next(loop), next(loop)
        warnings.simplefilter("always")
        list(loop)


def all_at_once(rank: int) -> None:
    evaluate()
    evaluate()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, out = dist.get_rank(), Path(sys.argv[1], f"{dist.get_rank()}.txt")

    def write(message: object, *_: object, **__: object) -> None:
        with out.open("a") as file:
            file.write(f"{message}\n")

    warnings.simplefilter("always")
    warnings.showwarning = write
    globals()[sys.argv[2]](rank)
    dist.barrier()
    write("exit")
    dist.destroy_process_group()
    atexit._run_exitfuncs()
    os._exit(0)  # gloo's threads may abort a Python that is shutting down
