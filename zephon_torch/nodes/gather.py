"""Gathers rows with torch, into memory that is used again.

numpy allocates for each gather, and gives up the interpreter's lock only for more than 500 rows.
``PlacedRows.gather`` is numpy's, gives the same rows, and is used wherever a batch stands alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from zephon_torch.io.formats.mapped_rows import PlacedRows, RowGroupKind


class RowBuffer:
    """Memory for the rows of a window; used again once all its batches are finished."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, num_rows: int, kind: RowGroupKind) -> torch.Tensor | None:
        """uint8[num_rows, row_bytes], with anything in it; None if there is no place for such."""
        num_bytes = num_rows * kind.row_bytes
        if len(self._bytes) < num_bytes:
            self._bytes = torch.empty(num_bytes, dtype=torch.uint8)
        return self._bytes[:num_bytes].view(num_rows, kind.row_bytes)


def gather(rows: PlacedRows, buffer: RowBuffer) -> npt.NDArray[Any]:
    """Rows, (n, row_length), in the buffer if there is a place for them.

    Raises:
        DatasetError: a file was cut short or written over.
    """
    out = buffer.take(len(rows), rows.kind)
    if out is None:
        return rows.gather()
    rows.check()
    torch.index_select(_as_tensor(rows), 0, torch.from_numpy(rows.places), out=out)
    gathered: npt.NDArray[Any] = out.numpy().view(rows.kind.dtype)
    return gathered


def _as_tensor(rows: PlacedRows) -> torch.Tensor:
    """uint8[n, row_bytes]: the row that begins at each byte of the space. Never written to."""
    space = rows.space
    if space.tensor is None:
        space.tensor = torch.from_numpy(np.asarray(space.as_bytes))
    tensor: torch.Tensor = space.tensor
    return tensor
