"""Small datasets in every format, made by the format's own library: one entry a format."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files of one format.

    Attributes:
        format: what ``Dataset.from_path`` must tell without being told.
        write: makes a folder that does not exist yet and a shard in it for each list of ids; skips
            (``pytest.importorskip``) where the library that makes such files is not installed.
        id_of: the id of a sample as the reader gives it.
        options: keywords for ``Dataset.from_path``.
        path: what to give to it, from the folder; the folder itself by default.
        to_batch: collate_fn of loaders; None for the default, whose batches ``id_of_batch`` reads.
        ids_of: the ids of a batch.
    """

    format: str
    write: Callable[[Path, Sequence[Sequence[int]]], object]
    id_of: Callable[[Any], int]
    ids_of: Callable[[Any], list[int]]
    options: Mapping[str, Any] = field(default_factory=dict)
    path: Callable[[Path], Path] = lambda folder: folder
    to_batch: Callable[[list[Any]], Any] | None = None


def of_key(sample: Mapping[str, Any]) -> int:
    return int(sample["id"])


def of_column(batch: Mapping[str, Any]) -> list[int]:
    return [int(number) for number in batch["id"]]


def write_jsonl(folder: Path, shards: Sequence[Sequence[int]]) -> None:
    folder.mkdir(parents=True)
    for number, ids in enumerate(shards):
        lines = (json.dumps({"id": i, "text": f"t{i} ö " * (i % 5)}) + "\n" for i in ids)
        (folder / f"{number:03d}.jsonl").write_text("".join(lines))


def write_gzip(folder: Path, shards: Sequence[Sequence[int]]) -> None:
    """Two members a shard, cut in the middle of a line."""
    write_compressed(folder, shards, ".gz", gzip.compress)


def write_zstd(folder: Path, shards: Sequence[Sequence[int]]) -> None:
    """Two frames a shard, cut in the middle of a line."""
    compressor = pytest.importorskip("zstandard").ZstdCompressor(write_checksum=True)
    write_compressed(folder, shards, ".zst", compressor.compress)


def write_compressed(
    folder: Path,
    shards: Sequence[Sequence[int]],
    extension: str,
    compress: Callable[[bytes], bytes],
) -> None:
    write_jsonl(folder, shards)
    for path in list(folder.iterdir()):
        content = path.read_bytes()
        path.unlink()
        middle = len(content) // 2
        members = (content[:middle], content[middle:])
        path.with_name(path.name + extension).write_bytes(b"".join(map(compress, members)))


FILES: dict[str, Files] = {
    "jsonl": Files(format="jsonl", write=write_jsonl, id_of=of_key, ids_of=of_column),
    "jsonl.gz": Files(format="jsonl", write=write_gzip, id_of=of_key, ids_of=of_column),
    "jsonl.zst": Files(format="jsonl", write=write_zstd, id_of=of_key, ids_of=of_column),
}
ALL = pytest.mark.parametrize("files", FILES.values(), ids=FILES)
