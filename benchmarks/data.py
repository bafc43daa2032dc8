"""The data that is measured: made once, the same on every run of one machine.

Documents are slices of the Python installation's own library, their lengths lognormal as those of
web pages are; token rows are uint16.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROW_LENGTH = 2049
ROW_SHARDS = (1, 24, 100)
NUM_ROWS = 28_800  # 118 MB
NUM_DOCUMENTS = {"web": 40_000, "code": 15_000} | {f"small-{i:02d}": 600 for i in range(20)}
NUM_SHARDS = {"web": 24, "code": 8}
MEAN_BYTES, SIGMA = 5_400, 1.2
FIRST_ID = {name: i * 1_000_000 for i, name in enumerate(NUM_DOCUMENTS)}
VERSION = 1  # of the data: another number, another folder


class Data:
    """Corpora and token rows in a folder; `factor` scales the numbers of documents and rows."""

    def __init__(self, folder: Path, factor: float = 1.0) -> None:
        self.folder, self.factor = folder, factor

    def shards(self, corpus: str) -> list[Path]:
        return sorted((self.folder / corpus).glob("*.jsonl"))

    def offsets(self, corpus: str) -> list[npt.NDArray[np.int64]]:
        """Return for each shard where its lines begin, and its size: int64[lines + 1]."""
        paths = [self.folder / "offsets" / f"{corpus}-{p.stem}.npy" for p in self.shards(corpus)]
        return [np.load(path) for path in paths]

    def documents(self, corpus: str) -> Iterator[dict[str, Any]]:
        for path in self.shards(corpus):
            with open(path, "rb") as file:
                yield from map(json.loads, file)

    def document(self, number: int) -> dict[str, Any]:
        """Return the document of that id."""
        corpus = list(NUM_DOCUMENTS)[number // 1_000_000]
        left = number % 1_000_000
        for path, offsets in zip(self.shards(corpus), self.offsets(corpus), strict=True):
            if left < len(offsets) - 1:
                with open(path, "rb") as file:
                    file.seek(int(offsets[left]))
                    found: dict[str, Any] = json.loads(file.readline())
                    return found
            left -= len(offsets) - 1
        raise LookupError(number)

    def mixture(self, num_datasets: int) -> dict[str, float]:
        """Return the weights of a mixture of 1, 2 or 20 corpora."""
        if num_datasets == 1:
            return {"web": 1.0}
        if num_datasets == 2:
            return {"web": 0.7, "code": 0.3}
        names = [name for name in NUM_DOCUMENTS if name.startswith("small-")]
        return {name: float(round(1 / (i + 1), 4)) for i, name in enumerate(names)}

    def rows(self, num_shards: int) -> list[Path]:
        return sorted((self.folder / f"rows-{num_shards}").glob("*.npy"))

    def all_rows(self) -> npt.NDArray[np.uint16]:
        """Return all rows, mapped: uint16[rows, 2049]."""
        found: npt.NDArray[np.uint16] = np.load(self.rows(1)[0], mmap_mode="r")
        return found

    def checksum(self) -> str:
        return str(json.loads((self.folder / "data.json").read_text())["sha256"])


def prepare(folder: Path, factor: float = 1.0) -> Data:
    """Make the data, unless it is there already."""
    data = Data(folder, factor)
    wanted = {"version": VERSION, "factor": factor}
    note = folder / "data.json"
    if note.exists() and wanted.items() <= json.loads(note.read_text()).items():
        return data
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "offsets").mkdir(parents=True)
    digest = hashlib.sha256()
    pool = _pool()
    for number, corpus in enumerate(NUM_DOCUMENTS):
        _write_corpus(data, corpus, pool, np.random.default_rng(number), digest)
    _write_rows(data, digest)
    note.write_text(json.dumps(wanted | {"sha256": digest.hexdigest()}))
    return data


def _pool() -> str:
    """Return sources and texts of the standard library, 20 MB at most."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts, size = [], 0
    for parent, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - {"site-packages", "__pycache__"})
        for name in sorted(files):
            if name.endswith((".py", ".txt", ".rst", ".md")):
                parts.append(Path(parent, name).read_text("utf-8", "ignore"))
                size += len(parts[-1])
        if size > 20_000_000:
            break
    return "".join(parts)


def _write_corpus(
    data: Data, corpus: str, pool: str, rng: np.random.Generator, digest: Any
) -> None:
    count = max(32, int(NUM_DOCUMENTS[corpus] * data.factor))
    lengths = rng.lognormal(np.log(MEAN_BYTES) - SIGMA**2 / 2, SIGMA, count).astype(int)
    lengths = np.clip(lengths, 40, 200_000)
    starts = rng.integers(0, len(pool) - 200_000, count)
    folder = data.folder / corpus
    folder.mkdir()
    for shard, numbers in enumerate(np.array_split(np.arange(count), NUM_SHARDS.get(corpus, 1))):
        lines = [
            json.dumps(
                {"id": FIRST_ID[corpus] + int(i), "text": pool[starts[i] : starts[i] + lengths[i]]},
                ensure_ascii=False,
            ).encode()
            + b"\n"
            for i in numbers
        ]
        name = f"part-{shard:03d}"
        (folder / f"{name}.jsonl").write_bytes(b"".join(lines))
        offsets = np.cumsum([0, *map(len, lines)], dtype=np.int64)
        np.save(data.folder / "offsets" / f"{corpus}-{name}.npy", offsets)
        for line in lines:
            digest.update(line)


def _write_rows(data: Data, digest: Any) -> None:
    count = int(NUM_ROWS * data.factor)
    rows = np.random.default_rng(1).integers(0, 50_000, (count, ROW_LENGTH), dtype=np.uint16)
    rows[:, 0], rows[:, 1] = np.divmod(np.arange(count), 50_000)  # a row tells its number
    digest.update(rows)
    for num_shards in ROW_SHARDS:
        folder = data.folder / f"rows-{num_shards}"
        folder.mkdir()
        for shard, part in enumerate(np.array_split(rows, num_shards)):
            np.save(folder / f"part-{shard:03d}.npy", part)


def touch(folder: Path) -> None:
    """Read all files of a folder once, so that they are in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.read(1 << 24):
                    pass
