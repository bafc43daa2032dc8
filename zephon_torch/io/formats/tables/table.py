"""Options, columns, counts and errors of all table formats. Rows: ``table_rows.py``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import ConfigurationError, DatasetError, RecordError, ZephonError
from zephon_torch.io.formats.tables.arrow_types import unsupported
from zephon_torch.io.formats.tables.file_object import RangesFile
from zephon_torch.io.formats.tables.libarrow import pa
from zephon_torch.io.storage.files import StoredFile
from zephon_torch.support import checks


@dataclass(frozen=True)
class TableOptions:
    """Options of Parquet and Arrow.

    Attributes:
        columns: names of the columns that samples have, in this order; all by default.
    """

    columns: Sequence[str] | None = None

    def __post_init__(self) -> None:
        names = self.columns
        if names is None:
            return
        is_list = isinstance(names, Sequence) and not isinstance(names, str | bytes)
        if not is_list or not names or not all(isinstance(name, str) for name in names):
            raise ConfigurationError(f"columns must be a list of names of columns, got {names!r}")
        if len(set(names)) != len(names):
            raise ConfigurationError(f"columns names a column twice: {names!r}")
        object.__setattr__(self, "columns", tuple(names))

    @property
    def identity(self) -> None:
        """Nothing: the same samples stand at the same places."""


def choose_columns(schema: Any, columns: Sequence[str] | None, name: str) -> dict[str, Any]:
    """Types of the columns that samples have, by name.

    Args:
        schema: ``pyarrow.Schema`` of a file.
        columns: of the options.
        name: of the file, for messages.

    Raises:
        ConfigurationError: a column that the file does not have.
        DatasetError: two columns of one name, a type that is not read, or no column at all.
    """
    there = schema.names
    if not there:
        raise DatasetError(f"{name} has no columns: move it out of the dataset or write it anew")
    for column in there if columns is None else columns:
        if column not in there:
            has = ", ".join(map(repr, there)) or "none"
            raise ConfigurationError(f"{name} has no column {column!r}; it has {has}")
        if there.count(column) > 1:
            raise DatasetError(
                f"{name} has more than one column {column!r}: write it anew with one, or choose "
                "others with columns="
            )
        if (found := unsupported(schema.field(column).type)) is not None:
            raise DatasetError(
                f"column {column!r} of {name} holds {found} values, which are not supported: "
                "choose others with columns=, or write it anew"
            )
    return {column: schema.field(column).type for column in columns or there}


def count_alike(
    files: Sequence[StoredFile],
    options: TableOptions,
    advance: Callable[[int], object],
    inspect: Callable[[StoredFile, TableOptions], tuple[int, Mapping[str, Any]]],
) -> list[int]:
    """Count the rows of files whose columns must be alike.

    Args:
        files: in order.
        options: of the dataset.
        advance: called with the size of each file that is done.
        inspect: number of rows of a file, and the types of its chosen columns.

    Raises:
        DatasetError: two files differ in a column.
    """
    counts: list[int] = []
    known: dict[str, tuple[Any, StoredFile]] = {}  # type of a column, and a file that has it so
    for file in files:
        try:
            num_rows, found = inspect(file, options)
        except DatasetError:
            file.check_unchanged()  # being written is the better reason
            raise
        if known and found.keys() != known.keys():
            _refuse_missing(files[0], known.keys(), file, found.keys())
        for name, kind in found.items():
            expected, other = known.setdefault(name, (kind, file))
            if expected == pa.null():
                known[name] = (kind, file)
            elif kind not in (expected, pa.null()):
                _refuse_different(name, (expected, other), (kind, file))
        counts.append(num_rows)
        advance(file.num_bytes)
    return counts


def edges_of(num_rows: Sequence[int], name: str) -> npt.NDArray[np.int64]:
    """int64[num_groups + 1]: number of the first row of each group, then of all rows.

    Args:
        num_rows: of each group.
        name: of the file, for messages.

    Raises:
        DatasetError: a number of rows that cannot be.
    """
    for number in (min(num_rows, default=0), sum(num_rows)):
        checks.integer(
            f"{name} is corrupt: a number of rows",
            number,
            minimum=0,
            maximum=checks.MAX_SAMPLES,
            error=DatasetError,
        )
    return np.cumsum([0, *num_rows], dtype=np.int64)


_REMEDY = "choose common ones with columns=, or make one dataset of each kind"


def _refuse_missing(
    first: StoredFile, known: Collection[str], file: StoredFile, found: Collection[str]
) -> NoReturn:
    name = next(name for name in (*known, *found) if name not in known or name not in found)
    there, lacks = (first, file) if name in known else (file, first)
    raise DatasetError(
        f"files of one dataset have different columns: {there.url!r} has {name!r}, {lacks.url!r} "
        f"has not; {_REMEDY}"
    )


def _refuse_different(name: str, *kinds: tuple[Any, StoredFile]) -> NoReturn:
    described = " and ".join(f"{kind} in {file.url!r}" for kind, file in kinds)
    raise DatasetError(
        f"files of one dataset have different columns: {name!r} is {described}; {_REMEDY}"
    )


@contextmanager
def refusing(
    what: str, kind: type[DatasetError], source: RangesFile | None = None
) -> Iterator[None]:
    """Turn whatever pyarrow raises for bytes that it cannot read into an error of this package.

    Args:
        what: the file, or the record, in words.
        kind: of the error.
        source: what pyarrow reads from; what its storage raises comes as it is.
    """
    if source is not None:
        source.failure = None
    try:
        yield
    except ZephonError:
        raise
    except MemoryError as error:  # of the record or of the machine: nothing to be skipped
        raise DatasetError(f"{what} needs too much memory, or is corrupt: {error}") from error
    except Exception as error:  # it raises OSError, ValueError, KeyError, TypeError and others
        if source is not None and source.failure is not None:
            raise source.failure from None
        text = str(error).partition("\n")[0] or type(error).__name__
        remedy = "restore the file"
        remedy += ", or see on_error=" if kind is RecordError else " or move it out of the dataset"
        raise kind(f"{what} cannot be decoded: {text}; {remedy}") from error
