"""Small datasets in every format, made by the format's own library: one entry a format."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch


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


ROW_LENGTH = 5


def rows_of(ids: Sequence[int], dtype: str = "<u2") -> npt.NDArray[Any]:
    """A row of each id: the id, then numbers that depend on it."""
    return (np.array(ids)[:, None] + 100 * np.arange(ROW_LENGTH)).astype(dtype)


def write_npy(folder: Path, shards: Sequence[Sequence[int]]) -> None:
    folder.mkdir(parents=True)
    for number, ids in enumerate(shards):
        np.save(folder / f"{number:03d}.npy", rows_of(ids))


def write_bin(folder: Path, shards: Sequence[Sequence[int]]) -> None:
    folder.mkdir(parents=True)
    for number, ids in enumerate(shards):
        left_over = b"\xff" * 2 * (number % ROW_LENGTH)
        (folder / f"{number:03d}.bin").write_bytes(rows_of(ids).tobytes() + left_over)


def write_megatron(folder: Path, shards: Sequence[Sequence[int]]) -> None:
    """Sequences of an id repeated 1 to 4 times; each is a document."""
    folder.mkdir(parents=True)
    for number, ids in enumerate(shards):
        sequences = [np.full(1 + i % 4, i, "<u2") for i in ids]
        megatron_pair(folder / f"{number:03d}", sequences, range(len(sequences) + 1))


def write_megatron_rows(folder: Path, shards: Sequence[Sequence[int]]) -> None:
    folder.mkdir(parents=True)
    for number, ids in enumerate(shards):
        rows = rows_of(ids)
        sequences = np.split(rows.ravel(), [1, 3])
        megatron_pair(folder / f"{number:03d}", sequences, [0, 1, 3])


MEGATRON_CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "f8": 6, "f4": 7, "u2": 8}


def megatron_pair(
    path: Path, sequences: Sequence[npt.NDArray[Any]], marks: Sequence[int], modes: bytes = b""
) -> None:
    """The .bin and .idx files, as ``megatron.core.datasets.indexed_dataset`` lays them out."""
    dtype = sequences[0].dtype if sequences else np.dtype("<u2")
    lengths = np.array([len(sequence) for sequence in sequences], "<i4")
    pointers = np.cumsum(lengths, dtype="<i8") - lengths
    code = MEGATRON_CODES[dtype.str[1:]]
    with open(f"{path}.idx", "wb") as index:
        index.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(marks)))
        index.write(lengths.tobytes() + (dtype.itemsize * pointers).tobytes())
        index.write(np.array(marks, "<i8").tobytes() + modes)
    Path(f"{path}.bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))


def write_mds(folder: Path, shards: Sequence[Sequence[int]]) -> None:
    """Every second shard is there only compressed."""
    columns = {"id": ("int", 8), "text": ("str", None), "tokens": ("ndarray:uint16", None)}
    records = [
        [
            {
                "id": struct.pack("<q", i),
                "text": f"t{i} ö ".encode() * (i % 5),
                "tokens": b"\x04\x03" + np.full(3, i, "<u2").tobytes(),
            }
            for i in ids
        ]
        for ids in shards
    ]
    mds_folder(folder, records, columns, [None, "gz"] * len(shards))


MdsColumns = Mapping[str, tuple[str, int | None]]  # name: encoding, size


def mds_folder(
    folder: Path,
    shards: Sequence[Sequence[Mapping[str, bytes]]],
    columns: MdsColumns,
    codecs: Sequence[str | None] = (),
) -> None:
    """Shards of encoded values and their index, as version 2 of MosaicML Streaming lays them out.

    The format is described in its docs ("Dataset Format"); columns stand in order of their names.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, records in enumerate(shards):
        codec = codecs[number] if number < len(codecs) else None
        name, shard = f"shard.{number:05d}.mds", mds_shard(records, columns)
        entry = {
            "column_names": sorted(columns),
            "column_encodings": [columns[column][0] for column in sorted(columns)],
            "column_sizes": [columns[column][1] for column in sorted(columns)],
            "compression": codec, "format": "mds", "hashes": [], "samples": len(records),
            "raw_data": {"basename": name, "bytes": len(shard), "hashes": {}},
            "size_limit": None, "version": 2, "zip_data": None,
        }  # fmt: skip
        content = shard
        if codec is not None:
            name = f"{name}.{codec}"
            content = gzip.compress(shard, mtime=0) if codec == "gz" else shard
            entry["zip_data"] = {"basename": name, "bytes": len(content), "hashes": {}}
        (folder / name).write_bytes(content)
        entries.append(entry)
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))


def mds_shard(records: Sequence[Mapping[str, bytes]], columns: MdsColumns) -> bytes:
    encoded = []
    for record in records:
        varying = [len(record[c]) for c in sorted(columns) if columns[c][1] is None]
        values = b"".join(record[column] for column in sorted(columns))
        encoded.append(struct.pack(f"<{len(varying)}I", *varying) + values)
    config = b"{}"
    first = 4 * (len(records) + 2) + len(config)
    offsets = first + np.cumsum([0, *map(len, encoded)])
    head = struct.pack("<I", len(records)) + offsets.astype("<u4").tobytes()
    return head + config + b"".join(encoded)


def of_first(sample: Sequence[int]) -> int:
    return int(sample[0])


def of_first_column(batch: torch.Tensor) -> list[int]:
    assert batch.dtype == torch.int64 and batch.shape[1:] == (ROW_LENGTH,)
    return [int(number) for number in batch[:, 0]]


def of_list(batch: Sequence[Sequence[int]]) -> list[int]:
    return [of_first(sample) for sample in batch]


ROWS: dict[str, Any] = {"id_of": of_first, "ids_of": of_first_column}
BIN_OPTIONS = {"dtype": "uint16", "row_length": ROW_LENGTH}


def write_webdataset(folder: Path, shards: Sequence[Sequence[int]]) -> None:
    webdataset = pytest.importorskip("webdataset")
    folder.mkdir(parents=True)
    for number, ids in enumerate(shards):
        with webdataset.TarWriter(str(folder / f"{number:03d}.tar")) as tar:
            for i in ids:
                tar.write(
                    {"__key__": f"d.e/{i:04d}", "id": i, "npy": np.arange(3) + i, "x.txt": "ö"}
                )


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
    "mds": Files(
        format="mds",
        write=write_mds,
        id_of=of_key,
        ids_of=of_column,
    ),
    "npy": Files(format="tokens", write=write_npy, **ROWS),
    "bin": Files(format="tokens", write=write_bin, options=BIN_OPTIONS, **ROWS),
    "megatron": Files(
        format="megatron", write=write_megatron, id_of=of_first, ids_of=of_list, to_batch=list
    ),
    "megatron rows": Files(
        format="megatron",
        write=write_megatron_rows,
        options={"row_length": ROW_LENGTH},
        **ROWS,
    ),
    "webdataset": Files(
        format="webdataset", write=write_webdataset, id_of=of_key, ids_of=of_column
    ),
    "parquet": Files(format="parquet", write=write_parquet, id_of=of_key, ids_of=of_column),
    "arrow": Files(format="arrow", write=write_arrow, id_of=of_key, ids_of=of_column),
    "arrow file": Files(
        format="arrow", write=partial(write_arrow, kind="file"), id_of=of_key, ids_of=of_column
    ),
    "hf folder": Files(format="arrow", write=write_hf, id_of=of_key, ids_of=of_column),
    "jsonl.gz": Files(format="jsonl", write=write_gzip, id_of=of_key, ids_of=of_column),
    "jsonl.zst": Files(format="jsonl", write=write_zstd, id_of=of_key, ids_of=of_column),
}
ALL = pytest.mark.parametrize("files", FILES.values(), ids=FILES)
