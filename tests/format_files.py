"""Small datasets in every format, made by the format's own library: one entry a format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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


def write_parquet(folder: Path, shards: Sequence[Sequence[int]]) -> None:
    """Row groups of 5 rows."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir(parents=True)
    for number, ids in enumerate(shards):
        table = pa.table({"id": pa.array(ids, pa.int32()), "text": [f"t{i} ö" for i in ids]})
        parquet.write_table(table, folder / f"{number:03d}.parquet", row_group_size=5)


def write_arrow(folder: Path, shards: Sequence[Sequence[int]], kind: str = "stream") -> None:
    """Batches of 5 rows."""
    pa, ipc = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.ipc")
    folder.mkdir(parents=True)
    for number, ids in enumerate(shards):
        table = pa.table({"id": ids, "text": [f"t{i} ö" for i in ids]})
        path = folder / f"data-{number:05d}-of-{len(shards):05d}.arrow"
        new = ipc.new_stream if kind == "stream" else ipc.new_file
        with new(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=5)


def write_hf(folder: Path, shards: Sequence[Sequence[int]]) -> None:
    """As ``datasets.Dataset.save_to_disk`` lays it out, with a cache beside the data."""
    write_arrow(folder, shards)
    names = sorted(path.name for path in folder.iterdir())
    (folder / "cache-0123456789abcdef.arrow").write_bytes((folder / names[0]).read_bytes())
    (folder / "dataset_info.json").write_text("{}")
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))


FILES: dict[str, Files] = {
    "jsonl": Files(format="jsonl", write=write_jsonl, id_of=of_key, ids_of=of_column),
    "parquet": Files(format="parquet", write=write_parquet, id_of=of_key, ids_of=of_column),
    "arrow": Files(format="arrow", write=write_arrow, id_of=of_key, ids_of=of_column),
    "arrow file": Files(
        format="arrow", write=partial(write_arrow, kind="file"), id_of=of_key, ids_of=of_column
    ),
    "hf folder": Files(format="arrow", write=write_hf, id_of=of_key, ids_of=of_column),
}
ALL = pytest.mark.parametrize("files", FILES.values(), ids=FILES)
