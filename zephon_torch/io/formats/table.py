"""What the formats of tables share: columns, groups of rows that are decoded at once, samples.

A sample is a dict of plain Python values, as pyarrow's ``to_pylist`` makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from zephon_torch import checks
from zephon_torch.errors import ConfigurationError, DatasetError, RecordError, ZephonError
from zephon_torch.io.files import StoredFile
from zephon_torch.io.formats.kept import keep, kept, numbers
from zephon_torch.io.formats.libarrow import pa
from zephon_torch.io.formats.reader import check_bounds
from zephon_torch.io.formats.source import RangesFile

Int64Array = npt.NDArray[np.int64]


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
        DatasetError: two columns of one name.
    """
    there = schema.names
    for column in there if columns is None else columns:
        if column not in there:
            has = ", ".join(map(repr, there)) or "none"
            raise ConfigurationError(f"{name} has no column {column!r}; it has {has}")
        if there.count(column) > 1:
            raise DatasetError(
                f"{name} has more than one column {column!r}: write it anew with one, or choose "
                "others with columns="
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


def edges_of(num_rows: Sequence[int], name: str) -> Int64Array:
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


class Group(NamedTuple):
    """Rows that were decoded at once.

    Attributes:
        batch: ``pyarrow.RecordBatch`` of the chosen columns.
        num_bytes: of memory that it keeps.
        is_sound: whether it was validated; else each row is when it is wanted.
    """

    batch: Any
    num_bytes: int
    is_sound: bool


class Groups(Protocol):
    """Rows of one open file, in groups that are decoded at once."""

    @property
    def edges(self) -> Int64Array:
        """int64[num_groups + 1]: number of the first row of each group, then of all rows."""
        ...

    def load(self, group: int, record: str) -> Group:
        """Decode a group.

        Raises RecordError, beginning with the `record` that is wanted of it, if it is corrupt.
        """
        ...

    def check(self) -> None:
        """Raise unless loaded groups may be touched: see `Ranges.check`."""
        ...

    def close(self) -> None:
        """Let go of the file."""
        ...


class TableReader:
    """Random access to the rows of one file.

    Args:
        groups: of the open file; closed with the reader.
        shard: dataset and file in words.
        num_samples: number of records when the dataset was made.

    Raises:
        DatasetError: the file holds another number of rows.
    """

    def __init__(self, groups: Groups, shard: str, num_samples: int) -> None:
        self._groups = groups
        self._edges = groups.edges
        self._shard = shard
        self._number = next(numbers)
        if (now := int(self._edges[-1])) != num_samples:
            groups.close()
            raise DatasetError(
                f"{shard} holds {now:,} records, {num_samples:,} when the dataset was made; make "
                "the dataset anew"
            )

    def read(self, samples: Int64Array) -> list[dict[str, Any]]:
        """Rows by number, in the order of the file; see `Reader.read`."""
        samples = np.asarray(samples, dtype=np.int64)
        self._groups.check()
        check_bounds(samples, int(self._edges[-1]), self._shard)
        if not len(samples):
            return []
        order = np.argsort(samples, kind="stable")
        try:
            rows = self._read_sorted(samples[order])
        except RecordError:
            if len(samples) == 1:
                raise
            # The bad one among them names itself.
            rows = [row for i in order for row in self._read_sorted(samples[i : i + 1])]
        values: list[Any] = [None] * len(samples)
        for place, row in zip(order.tolist(), rows, strict=True):
            values[place] = row
        return values

    def close(self) -> None:
        """Forget the groups and let go of the file."""
        kept.drop(self._number)
        self._groups.close()

    def _read_sorted(self, samples: Int64Array) -> list[dict[str, Any]]:
        record = f"{self._shard}, record {samples[0]}"
        groups = np.searchsorted(self._edges, samples, side="right") - 1
        cuts = np.flatnonzero(np.diff(groups)) + 1
        parts: list[Any] = []
        for start, stop in pairwise((0, *cuts.tolist(), len(samples))):
            number = int(groups[start])
            group = self._load(number, record)
            with refusing(record, RecordError):
                parts += _pick(group, samples[start:stop] - self._edges[number])
        with refusing(record, RecordError):
            rows: list[dict[str, Any]] = pa.Table.from_batches(parts).to_pylist()
        return rows

    def _load(self, number: int, record: str) -> Group:
        key = (self._number, number)
        group: Group | None = kept.get(key)
        if group is None:
            group = self._groups.load(number, record)
            keep(key, group, group.num_bytes)
        return group


def _pick(group: Group, rows: Int64Array) -> list[Any]:
    """Batches of ascending rows: one that owns its memory, or views of each, validated."""
    if group.is_sound:
        return [group.batch.take(pa.array(rows))]
    # One row of each batch is what a global shuffle asks for.
    cuts = (rows[1:] != rows[:-1] + 1).nonzero()[0] + 1 if len(rows) > 1 else rows[:0]
    parts = []
    for start, stop in pairwise((0, *cuts.tolist(), len(rows))):
        part = group.batch.slice(int(rows[start]), stop - start)
        part.validate(full=True)
        parts.append(part)
    return parts
