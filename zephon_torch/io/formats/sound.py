"""Whether rows of mapped Arrow arrays may be touched.

The bytes of a file become arrays without being looked at, and a wrong offset in them would lead
outside of the map. Only the offsets of the rows that are wanted are read here, so that one row of a
large batch costs a few pages.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from zephon_torch.io.formats.libarrow import pa, types

Rows = npt.NDArray[np.int64]

_REFUSED = (
    types.is_union,
    types.is_run_end_encoded,
    types.is_list_view,
    types.is_large_list_view,
    types.is_string_view,
    types.is_binary_view,
)
_OFFSETS_64 = (types.is_large_string, types.is_large_binary, types.is_large_list)


def unsupported(kind: Any) -> Any:
    """Return the type inside of a type whose rows cannot be checked, None without one."""
    if isinstance(kind, pa.BaseExtensionType):
        return unsupported(kind.storage_type)
    if any(is_refused(kind) for is_refused in _REFUSED):
        return kind
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    if types.is_dictionary(kind):
        inner.append(kind.value_type)
    return next((found for part in inner if (found := unsupported(part)) is not None), None)


def has_dictionary(kind: Any) -> bool:
    """Whether a type or one inside of it is dictionary-encoded."""
    if isinstance(kind, pa.BaseExtensionType):
        return has_dictionary(kind.storage_type)
    inner = (kind.field(number).type for number in range(kind.num_fields))
    return bool(types.is_dictionary(kind)) or any(map(has_dictionary, inner))


def check_rows(array: Any, rows: Rows) -> None:
    """Follow the rows of an array down to its values.

    Args:
        array: a ``pyarrow.Array`` whose buffers are long enough (``validate()``), and whose
            dictionaries, if any, are sound (``validate(full=True)``).
        rows: int64[n], in any order.

    Raises:
        ValueError: an offset leads outside of what it points into.
    """
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        check_rows(array.storage, rows)
    elif types.is_struct(kind):
        for number in range(kind.num_fields):
            check_rows(array.field(number), rows)
    elif types.is_fixed_size_list(kind):
        each = np.arange(kind.list_size, dtype=np.int64)
        first = (np.unique(rows) + array.offset) * kind.list_size
        check_rows(array.values, (first[:, None] + each).ravel())
    elif types.is_list(kind) or types.is_large_list(kind):
        check_rows(array.values, _inner(*_bounds(array, rows, len(array.values))))
    elif types.is_map(kind):
        starts, stops = _bounds(array, rows, min(len(array.keys), len(array.items)))
        for part in (array.keys, array.items):
            check_rows(part, _inner(starts, stops))
    elif _has_bytes(kind):
        content = array.buffers()[2]
        _bounds(array, rows, 0 if content is None else content.size)


def _has_bytes(kind: Any) -> bool:
    return bool(
        types.is_string(kind)
        or types.is_binary(kind)
        or types.is_large_string(kind)
        or types.is_large_binary(kind)
    )


def _bounds(array: Any, rows: Rows, num_inner: int) -> tuple[Rows, Rows]:
    """Where the values of each distinct row start and stop, in the order of the array."""
    rows = np.unique(rows) + array.offset
    if not len(rows):
        return rows, rows
    is_wide = any(is_kind(array.type) for is_kind in _OFFSETS_64)
    offsets = np.frombuffer(array.buffers()[1], np.int64 if is_wide else np.int32)
    starts, stops = offsets[rows].astype(np.int64), offsets[rows + 1].astype(np.int64)
    ascend = (starts <= stops).all() and (stops[:-1] <= starts[1:]).all()
    if not ascend or starts[0] < 0 or stops[-1] > num_inner:
        raise ValueError(f"offsets of {array.type} values lead outside of them")
    return starts, stops


def _inner(starts: Rows, stops: Rows) -> Rows:
    """All numbers from each start to its stop."""
    lengths = stops - starts
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum(), dtype=np.int64)
