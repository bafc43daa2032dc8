"""Samples of any format as the bytes that the example's model reads, and as ids for its digest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

TEXT_KEYS = ("text", "txt", "content")  # JSON lines and Parquet, WebDataset, code corpora


def bytes_of(sample: Any) -> bytes:
    """Return the text of a sample, or the tokens of a row of them."""
    if isinstance(sample, np.ndarray):
        if sample.size and (sample.min() < 0 or sample.max() > 255):
            raise ValueError(
                f"a row has token {sample.max()}; this example's model reads bytes (0 to 255)"
            )
        return sample.astype(np.uint8).tobytes()
    for key in TEXT_KEYS:
        if key in sample:
            text = sample[key]
            return text if isinstance(text, bytes) else str(text).encode()
    raise KeyError(f"a sample has none of the keys {TEXT_KEYS}, only {sorted(sample)}")


def identity(sample: Any) -> int:
    """Return 63 bits that name a sample: of its corpus and id, or of what it holds."""
    name = bytes_of(sample)
    if isinstance(sample, Mapping):
        key = sample.get("id", sample.get("__key__"))
        if key is not None:
            name = f"{sample.get('corpus', '')}/{key}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> 1
