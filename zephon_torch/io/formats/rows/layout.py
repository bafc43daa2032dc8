"""Where rows of equal length stand in a file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Where rows stand in a file.

    Attributes:
        dtype: Of the values as stored; any byte order.
        row_length: Values of a row, at least 1.
        start: Byte at which row 0 starts.
        num_rows: Rows that follow each other without a gap.
    """

    dtype: np.dtype[Any]
    row_length: int
    start: int
    num_rows: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.row_length * self.dtype.itemsize
