"""The command ``zephon-torch``: builds indexes in parallel, shows what a dataset is.

It ends with 0 if all went well, 1 if data could not be used, 2 if it was called wrongly, 130 after
Ctrl-C; errors are one line on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import reprlib
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, NoReturn

import numpy as np

from zephon_torch.errors import ConfigurationError, DatasetError, ZephonError
from zephon_torch.io.datasets.counting import count_in_processes
from zephon_torch.io.datasets.dataset import Dataset
from zephon_torch.io.datasets.discovery import count_samples, find_shards
from zephon_torch.io.formats import FORMATS, make_options, without_pickles
from zephon_torch.io.remote.options import HiddenPath
from zephon_torch.support.wording import describe_bytes, plural
from zephon_torch.version import __version__

_MAX_LINE = 400


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    given = _parser().parse_args(arguments)
    try:
        given.run(given)
        sys.stdout.flush()
    except ConfigurationError as error:
        return _fail(error, 2)
    except BrokenPipeError:  # whoever reads has enough; flushing at exit would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ZephonError, OSError) as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    return 0


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """End with 2."""
        self.exit(2, f"{self.prog}: {message} (--help shows what it takes)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="zephon-torch", description="Datasets of zephon_torch.")
    parser.add_argument("--version", action="version", version=f"zephon-torch {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    index = commands.add_parser("index", help="build the indexes that are missing, in parallel")
    index.set_defaults(run=_index)
    index.add_argument("paths", nargs="+", metavar="PATH", help="folder, file, pattern or URL")
    index.add_argument(
        "--jobs", type=_positive, default=os.cpu_count() or 1, metavar="N", help="processes at once"
    )
    index.add_argument("--manifest", metavar="FILE", help="write a manifest of the one PATH")
    inspect = commands.add_parser("inspect", help="show what a dataset is made of")
    inspect.set_defaults(run=_inspect)
    inspect.add_argument("path", metavar="PATH", help="folder, file, pattern or URL")
    inspect.add_argument("--name", help="of the dataset, for its fingerprint")
    inspect.add_argument(
        "--samples", type=_natural, default=3, metavar="N", help="show the first N (default 3)"
    )
    for command in (index, inspect):
        command.add_argument("--format", help=f"one of {', '.join(FORMATS)}; told from the names")
        command.add_argument(
            "--option", type=_option, action="append", default=[], metavar="KEY=VALUE",
            help="of the format; VALUE is JSON, else a text",
        )  # fmt: skip
    return parser


def _index(given: argparse.Namespace) -> None:
    if given.manifest and len(given.paths) > 1:
        raise ConfigurationError("--manifest is of one dataset: give one PATH")
    num_failed = 0
    for path in given.paths:
        try:
            _index_one(path, given)
        except (ZephonError, OSError) as error:
            if len(given.paths) == 1:
                raise
            num_failed += 1
            _fail(error, 1)
    if num_failed:
        raise DatasetError(f"{num_failed} of {len(given.paths)} paths failed")


def _index_one(path: str, given: argparse.Namespace) -> None:
    start = time.monotonic()
    found = find_shards(HiddenPath(path), given.format, None)
    options = make_options(found.format, dict(given.option))
    counted = count_in_processes(path, found, options, given.jobs)
    for warning in counted.warnings:
        print(f"zephon-torch: {_one_line(warning)}", file=sys.stderr)
    dataset = Dataset.of_counted(_name(path), found, options, counted.sizes)
    num_known = dataset.num_shards - counted.num_read
    print(
        f"{path}: {dataset.format}, {plural(dataset.num_shards, 'shard')}, "
        f"{plural(len(dataset), 'sample')}, {describe_bytes(int(dataset.shard_num_bytes.sum()))}; "
        f"{counted.num_read:,} indexed, {num_known:,} needed no indexing, "
        f"{time.monotonic() - start:.1f} s",
        flush=True,
    )
    if given.manifest:
        dataset.save_manifest(given.manifest)
        print(f"{given.manifest}: manifest of {path}", flush=True)


def _inspect(given: argparse.Namespace) -> None:
    dataset = _open_to_look(given)
    num_bytes = int(dataset.shard_num_bytes.sum())
    for label, value in (
        ("name", repr(dataset.name)),
        ("format", dataset.format),
        ("shards", f"{dataset.num_shards:,}"),
        ("samples", f"{len(dataset):,}{_spread(dataset.shard_num_samples)}"),
        ("bytes", f"{num_bytes:,}{_spread(dataset.shard_num_bytes)}"),
        ("fingerprint", dataset.fingerprint),
    ):
        print(f"{label:<12}{value}")
    for number, sample in enumerate(islice(dataset, given.samples)):
        print(_one_line(f"sample {number}: {_short.repr(sample)}")[:_MAX_LINE])


def _open_to_look(given: argparse.Namespace) -> Dataset:
    """The dataset, reading which runs no code of whoever made it."""
    name, options = given.name or _name(given.path), dict(given.option)
    found = find_shards(HiddenPath(given.path), given.format, None)
    shown = without_pickles(make_options(found.format, options))
    return Dataset.of_counted(name, found, shown, count_samples(name, found, shown))


def _spread(sizes: Any) -> str:
    low, middle, high = np.percentile(sizes, [0, 50, 100], method="nearest").tolist()
    return f" (a shard: {low:,} to {high:,}, median {middle:,})"


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100
_short.maxdict = _short.maxlist = _short.maxtuple = 12


def _name(path: str) -> str:
    return os.path.basename(path.rstrip("/")) or path


def _positive(text: str) -> int:
    return _at_least(1, text)


def _natural(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    with suppress(ValueError):
        if (number := int(text)) >= least:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is no integer >= {least}")


def _option(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise argparse.ArgumentTypeError(f"{text!r} is not like key=value")
    with suppress(ValueError):
        return key, json.loads(value)
    return key, value


def _fail(error: object, code: int) -> int:
    print(f"zephon-torch: {_one_line(str(error))}", file=sys.stderr)
    return code


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n")
