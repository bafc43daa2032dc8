"""Writes ``mds/`` with mosaicml-streaming (0.13.0 when it was made), and what is in it.

Two shards as they are, two with zstd and one with gz, merged under one index.
"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from streaming import MDSWriter
from streaming.base.util import merge_index

COLUMNS = {
    "bytes": "bytes", "str": "str", "int": "int", "json": "json",
    "uint8": "uint8", "uint16": "uint16", "uint32": "uint32", "uint64": "uint64",
    "int8": "int8", "int16": "int16", "int32": "int32", "int64": "int64",
    "float16": "float16", "float32": "float32", "float64": "float64",
    "str_int": "str_int", "str_float": "str_float", "str_decimal": "str_decimal",
    "any": "ndarray", "typed": "ndarray:uint16", "shaped": "ndarray:float32:2,3",
    "jpeg": "jpeg", "png": "png", "pil": "pil",
}  # fmt: skip


def sample_of(i: int) -> dict[str, Any]:
    """What is in record i; images are of one colour."""
    numbers = {name: i for name in COLUMNS if name.startswith(("int", "uint", "float"))}
    image = Image.new("RGB", (2, 3), (i, 10 * i, 100))
    return numbers | {
        "bytes": bytes(range(i)), "str": f"sämple {i}" * (i % 2), "json": {"id": [i, None, "ö"]},
        "str_int": i * 10**30, "str_float": i / 7, "str_decimal": Decimal(i) / 8,
        "any": np.arange(i + 1, dtype=["int8", "float16", "int64"][i % 3]),
        "typed": np.full((i % 3 + 1, 300), i, np.uint16),
        "shaped": np.full((2, 3), i / 2, np.float32),
        "jpeg": image, "png": image, "pil": image,
    }  # fmt: skip


def write(folder: Path, ids: range, compression: str | None, size_limit: int | None) -> None:
    """A folder of its own."""
    with MDSWriter(
        columns=COLUMNS, out=str(folder), compression=compression, size_limit=size_limit,
        hashes=["sha1"],
    ) as writer:  # fmt: skip
        for i in ids:
            sample = sample_of(i)
            kinds = {name: getattr(np, name, None) for name in COLUMNS}
            for name, value in sample.items():
                is_scalar = isinstance(value, int) and name not in ("int", "str_int")
                sample[name] = kinds[name](value) if is_scalar else value
            writer.write(sample)


if __name__ == "__main__":
    root = Path(__file__).parent / "mds"
    write(root / "plain", range(7), None, 9000)
    write(root / "zstd", range(7, 13), "zstd:7", 9000)
    write(root / "gz", range(13, 15), "gz", None)
    merge_index(str(root), keep_local=True)
    index = json.loads((root / "index.json").read_text())
    print([(shard["raw_data"]["basename"], shard["samples"]) for shard in index["shards"]])
