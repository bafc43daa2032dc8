"""Rows of tokens (or of any numbers): ``.npy`` files, and ``.bin`` files of nothing but values.

A file with two axes has its first as rows. A file with one axis, and every ``.bin``, is cut into
rows of ``row_length`` values; what is left at its end, fewer values than a row, is in no row.

The header of ``.npy`` files is read by numpy's own parser (layout: the docstring of
``numpy.lib.format``), which evaluates literals only; pickled objects are never loaded.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.lib.format as npy
import numpy.typing as npt

from zephon_torch.errors import ConfigurationError, DatasetError
from zephon_torch.io.formats.rows.layout import RowLayout
from zephon_torch.io.formats.rows.row_reader import RowReader
from zephon_torch.io.storage.files import StoredFile
from zephon_torch.io.storage.reader import Reader
from zephon_torch.support import checks

_MAX_ROW_LENGTH = 1 << 31
_MAX_HEADER_BYTES = 12 + 10_000  # numpy's parser refuses more characters


@dataclass(frozen=True, slots=True)
class Options:
    """Keywords of token files.

    Attributes:
        dtype: Type of the values of ``.bin`` files, as numpy names it ("uint16", "<u4"); of
            ``.npy`` files, which know their own, only compared with it.
        row_length: Values of a row. Not needed for ``.npy`` files with two axes, and compared with
            their second one.

    Raises:
        ConfigurationError: Not a type of whole or floating-point numbers, or not a length.
    """

    dtype: npt.DTypeLike | None = None
    row_length: int | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "dtype", _number_type(self.dtype).str)
        if self.row_length is not None:
            object.__setattr__(self, "row_length", check_row_length(self.row_length))

    @property
    def identity(self) -> str | None:
        """Both, as far as given."""
        given = {"dtype": self.dtype, "row_length": self.row_length}
        known = [f"{name}={value}" for name, value in given.items() if value is not None]
        return " ".join(known) or None


def count_all(
    files: Sequence[StoredFile], options: Options, advance: Callable[[int], object]
) -> list[int]:
    """Count the rows of files that must have rows of one length.

    Those of ``.bin`` files by their size, of ``.npy`` files by their header.

    Raises:
        DatasetError: Two files differ.
    """
    layouts = []
    for file in files:
        layouts.append(layout := _layout(file, options))
        if layout.row_length != layouts[0].row_length:
            _refuse(
                file,
                f"has rows of {layout.row_length:,} values, {files[0].url!r} of "
                f"{layouts[0].row_length:,}: make one dataset of each",
            )
        advance(file.num_bytes)
    return [layout.num_rows for layout in layouts]


def open_reader(file: StoredFile, options: Options, dataset: str, num_samples: int) -> Reader:
    """Open a file that must be as it was when counted."""
    file.check_unchanged()  # first: a header that changed is no news but that it changed
    return RowReader(file, _layout(file, options), f"dataset {dataset!r}, file {file.url!r}")


def check_row_length(row_length: Any) -> int:
    """Return a length of rows as an int.

    Raises:
        ConfigurationError: Not a whole number of at least 1, or absurdly large.
    """
    is_whole = isinstance(row_length, int | np.integer) and not isinstance(row_length, bool)
    if not is_whole or not 1 <= row_length <= _MAX_ROW_LENGTH:
        raise ConfigurationError(
            f"row_length must be the number of values of a row, from 1 to {_MAX_ROW_LENGTH:,}, "
            f"got {row_length!r}"
        )
    return int(row_length)


def _number_type(given: Any) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = np.dtype(given)
        if _is_number(dtype):
            return dtype
    except (TypeError, ValueError, SyntaxError):  # not a type at all
        pass
    raise ConfigurationError(
        "dtype must be a type of whole or floating-point numbers of at most 64 bits, such as "
        f"'uint16', got {given!r}"
    )


def _is_number(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "iuf" and dtype.itemsize <= 8


def _layout(file: StoredFile, options: Options) -> RowLayout:
    return (_npy_layout if file.name.lower().endswith(".npy") else _bin_layout)(file, options)


def _bin_layout(file: StoredFile, options: Options) -> RowLayout:
    if options.dtype is None or options.row_length is None:
        raise ConfigurationError(
            f"{file.url!r} is bare values: give dtype= and row_length= to say what they are. (An "
            "index of Megatron's for it would be called as it is, with .idx in place of .bin)"
        )
    dtype = np.dtype(options.dtype)
    if file.num_bytes % dtype.itemsize:
        raise DatasetError(
            f"{file.url!r} has {file.num_bytes:,} bytes, which is no multiple of the "
            f"{dtype.itemsize} bytes of a {dtype}: it was cut short, or has another dtype"
        )
    row_bytes = options.row_length * dtype.itemsize
    return RowLayout(dtype, options.row_length, 0, file.num_bytes // row_bytes)


def _npy_layout(file: StoredFile, options: Options) -> RowLayout:
    shape, is_fortran, dtype, start = _read_header(file)
    _check_array(file, shape, is_fortran, dtype)
    num_bytes = start + math.prod(shape) * dtype.itemsize
    if num_bytes != file.num_bytes:
        raise DatasetError(
            f"{file.url!r} has {file.num_bytes:,} bytes, its header says {num_bytes:,} (shape "
            f"{shape}, {dtype}): it was cut short, or something was added; write it anew"
        )
    if options.dtype is not None and dtype != np.dtype(options.dtype):
        raise ConfigurationError(
            f"{file.url!r} holds {dtype.str}, but dtype= says {options.dtype}: leave it out"
        )
    if len(shape) == 2:
        num_rows, row_length = shape
        if options.row_length not in (None, row_length):
            raise ConfigurationError(
                f"{file.url!r} has rows of {row_length:,} values, but row_length= says "
                f"{options.row_length:,}: leave it out, or give files of one axis"
            )
        return RowLayout(dtype, row_length, start, num_rows)
    if options.row_length is None:
        raise ConfigurationError(
            f"{file.url!r} is one row of {shape[0]:,} values: give row_length= to cut it into rows"
        )
    return RowLayout(dtype, options.row_length, start, shape[0] // options.row_length)


def _check_array(
    file: StoredFile, shape: tuple[int, ...], is_fortran: bool, dtype: np.dtype[Any]
) -> None:
    if dtype.hasobject:
        _refuse(file, "holds pickled objects, which are never loaded: save an array of numbers")
    if not _is_number(dtype):
        _refuse(
            file,
            f"holds {dtype}: only whole and floating-point numbers of at most 64 bits are read",
        )
    has_rows = len(shape) == 1 or (len(shape) == 2 and 1 <= shape[1] <= _MAX_ROW_LENGTH)
    if not has_rows or shape[0] < 0:
        _refuse(
            file,
            f"has shape {shape}: one axis is read, or two with 1 to {_MAX_ROW_LENGTH:,} values "
            "in a row",
        )
    for length in shape:
        checks.integer(f"{file.url!r}: an axis of its shape", length, error=DatasetError)
    if is_fortran and len(shape) == 2:
        _refuse(
            file,
            "is stored column by column (Fortran order), where no row is in one piece: save "
            "numpy.ascontiguousarray(array)",
        )


def _read_header(file: StoredFile) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return shape, Fortran order, dtype and the byte at which the values start."""
    stream = io.BytesIO(file.storage.read(file.path, 0, min(file.num_bytes, _MAX_HEADER_BYTES)))
    try:
        version = npy.read_magic(stream)
        # Version 3 differs from 2 in names of fields only, and arrays with fields are refused.
        read = npy.read_array_header_1_0 if version[0] == 1 else npy.read_array_header_2_0
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"version {version} is not known")
        shape, is_fortran, dtype = read(stream)
    except Exception as error:  # the parser lets tokenize's and others through
        _refuse(file, f"is not a .npy file: {error}", error)
    return shape, is_fortran, dtype, stream.tell()


def _refuse(file: StoredFile, reason: str, cause: Exception | None = None) -> NoReturn:
    raise DatasetError(f"{file.url!r} {reason}") from cause
