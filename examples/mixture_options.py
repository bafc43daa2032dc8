"""The options of ``train_mixture.py``: read and checked before anything starts."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from glob import has_magic
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple


class Data(NamedTuple):
    """What ``Dataset.from_path`` is called with."""

    name: str
    path: str
    options: Mapping[str, Any] = MappingProxyType({})


DEFAULT_WEIGHTS = {"code": 0.7, "prose": 0.3}
NUM_HEADS = 4


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a small language model on a weighted mixture of corpora.",
        epilog="To resume, give the same command again. --steps, --global-batch-size, --seed, "
        "--weights and --data decide the order of the samples: a checkpoint of other values is "
        "refused (--fresh starts anew). The number of processes and of workers is free.",
    )
    add = parser.add_argument
    add(
        "--work-dir",
        type=Path,
        default=Path("zephon_work"),
        help="corpora and checkpoint (%(default)s)",
    )
    add("--fresh", action="store_true", help="forget the checkpoint and start anew")
    add("--steps", type=positive, default=150, help="length of the run (%(default)s)")
    add("--global-batch-size", type=positive, default=32, help="over all ranks (%(default)s)")
    add("--weights", type=weights, help="code=0.7,prose=0.3; with --data: equal ones")
    add(
        "--data",
        type=data,
        action="append",
        default=[],
        metavar="NAME=PATH[,OPTION=VALUE...]",
        help="in place of the two corpora: a folder, file, pattern or URL of any format, with "
        "options of Dataset.from_path (tokens=rows/,dtype=uint16,row_length=193); repeatable",
    )
    add("--cache-dir", help="for shards of remote data; none: they are read in ranges")
    add("--cache-limit", default="20GB", help="(%(default)s)")
    add("--seed", type=int, default=42, help="of the order and the model (%(default)s)")
    add("--num-workers", type=int, default=0, help="that load data, on each rank (%(default)s)")
    add("--save-every", type=positive, default=20, metavar="STEPS", help="(%(default)s)")
    add("--log-every", type=positive, default=10, metavar="STEPS", help="(%(default)s)")
    add("--corpus-bytes", type=positive, default=3 << 20, help="of each (%(default)s)")
    add("--width", type=positive, default=96, help="of the model (%(default)s)")
    add("--layers", type=positive, default=3, help="of the model (%(default)s)")
    add("--context", type=positive, default=192, help="bytes of a sample (%(default)s)")
    add("--learning-rate", type=float, default=2e-3, help="(%(default)s)")
    add("--warmup-steps", type=positive, default=20, help="(%(default)s)")
    options = parser.parse_args(arguments)
    check_options(parser, options)
    return options


def check_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Complete the options, and refuse those that do not fit together."""
    names = [data.name for data in options.data] or list(DEFAULT_WEIGHTS)
    if len(set(names)) < len(names):
        parser.error(f"--data names a dataset twice: {', '.join(names)}")
    for name, path, _ in options.data:
        if not ("://" in path or has_magic(path) or os.path.exists(path)):
            parser.error(f"--data {name}={path}: no such file or folder")
    options.weights = options.weights or (
        dict.fromkeys(names, 1.0) if options.data else DEFAULT_WEIGHTS
    )
    if set(options.weights) != set(names):
        given = ", ".join(options.weights)
        parser.error(f"--weights must name each dataset once: {', '.join(names)}; got {given}")
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if options.global_batch_size % world_size:
        parser.error(
            f"--global-batch-size {options.global_batch_size} is not divisible by the "
            f"{world_size} processes of --nproc-per-node"
        )
    if options.width % NUM_HEADS:
        parser.error(f"--width {options.width} is not a multiple of {NUM_HEADS}")


def positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def weights(text: str) -> dict[str, float]:
    pairs = [assignment(part) for part in text.split(",")]
    if len(dict(pairs)) < len(pairs):
        raise argparse.ArgumentTypeError(f"{text} names a dataset twice")
    return {name: float(value) for name, value in pairs}


def data(text: str) -> Data:
    name, rest = assignment(text)
    path, *options = re.split(r",(?=\w+=)", rest)
    return Data(name, path, {key: literal(value) for key, value in map(assignment, options)})


def literal(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value
