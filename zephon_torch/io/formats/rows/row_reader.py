"""Rows of equal length in one file, as one array a call: gathered from a map, or requested.

A call costs one gather whatever the number of rows. Values are checked to be what users get of
them: unsigned 64-bit numbers that fit, in the byte order of this machine.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import RecordError
from zephon_torch.io.formats.rows.layout import RowLayout
from zephon_torch.io.formats.rows.mapped import MappedRows, RowGroupKind
from zephon_torch.io.storage.files import StoredFile
from zephon_torch.io.storage.ranges import RequestedFile
from zephon_torch.io.storage.reader import check_bounds

Array: TypeAlias = npt.NDArray[Any]


class RowReader:
    """A `Reader` of rows.

    Args:
        file: The file as it was when the dataset was made, and is.
        layout: Where the rows stand; they lie within the file.
        shard: Dataset and file in words, for messages.
    """

    def __init__(self, file: StoredFile, layout: RowLayout, shard: str) -> None:
        self._layout = layout
        self._shard = shard
        self._is_native = layout.dtype.isnative
        self._is_uint64 = layout.dtype.newbyteorder("=") == np.uint64
        self._source: MappedRows | _RequestedRows = _RequestedRows(file, layout)
        self.group_kind: RowGroupKind | None = None
        if file.local_path is not None and layout.num_rows:  # an empty file cannot be mapped
            self._source = MappedRows(file, file.local_path, layout)
            if self._is_native and not self._is_uint64:  # no value has to be looked at
                self.group_kind = RowGroupKind(layout.dtype, layout.row_length)

    @property
    def mapped(self) -> MappedRows:
        """The part of a reader that a group uses."""
        assert isinstance(self._source, MappedRows)
        return self._source

    def read(self, samples: npt.NDArray[np.int64]) -> Array:
        """Rows by number, (n, row_length), as narrow as they are stored; see `Reader.read`."""
        check_bounds(samples, self._layout.num_rows, self._shard)
        rows = self._source.take(samples)
        if not self._is_native:
            rows = rows.astype(self._layout.dtype.newbyteorder("="))
        return self._signed(rows, samples) if self._is_uint64 else rows

    def close(self) -> None:
        """Let go of the file."""
        self._source.close()

    def _signed(self, rows: Array, samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Unsigned 64-bit rows as int64, which is what users get of all whole numbers."""
        signed = rows.view(np.int64)
        if (is_large := (signed < 0).any(axis=1)).any():
            raise RecordError(
                f"{self._shard}, record {samples[is_large][0]}: a value is 2^63 or more, which "
                "int64 cannot hold; store tokens as int64 or narrower"
            )
        return signed


class _RequestedRows:
    """Of a remote file: neighbours in one request."""

    def __init__(self, file: StoredFile, layout: RowLayout) -> None:
        self._requests = RequestedFile(file)
        self._layout = layout

    def take(self, samples: npt.NDArray[np.int64]) -> Array:
        layout = self._layout
        starts = layout.start + samples * layout.row_bytes
        # a bytearray: arrays over bytes cannot be written to
        content = bytearray().join(self._requests.read(starts, starts + layout.row_bytes))
        return np.frombuffer(content, layout.dtype).reshape(len(samples), layout.row_length)

    def close(self) -> None:
        self._requests.close()
