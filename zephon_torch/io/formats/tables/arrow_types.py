"""Types of Arrow columns: which are read, and what else their arrays may be looked at as."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zephon_torch.io.formats.tables.libarrow import pa, types

# pyarrow has no values for intervals of months, or of days and milliseconds.
_INTERVALS = (21, 22)  # ids of these types in Arrow's C++
_REFUSED = (types.is_union, types.is_run_end_encoded, lambda kind: kind.id in _INTERVALS)

# Types whose values are checked beyond what reading them needs: text for UTF-8, decimals for their
# precision, times for their range. As these they are only checked for where their bytes lie.
_BARE: tuple[tuple[Callable[[Any], bool], Callable[[Any], Any]], ...] = (
    (types.is_string, lambda _: pa.binary()),
    (types.is_large_string, lambda _: pa.large_binary()),
    (types.is_string_view, lambda _: pa.binary_view()),
    (types.is_decimal, lambda kind: pa.binary(kind.byte_width)),
    (types.is_date64, lambda _: pa.int64()),
    (types.is_time32, lambda _: pa.int32()),
    (types.is_time64, lambda _: pa.int64()),
)


def unsupported(kind: Any) -> Any:
    """Return the type, or one inside of it, that is not read; None without."""
    if any(is_refused(kind) for is_refused in _REFUSED):
        return kind
    found = map(unsupported, _inner(kind))
    return next((inner for inner in found if inner is not None), None)


def has_dictionary(kind: Any) -> bool:
    """Whether a type or one inside of it is dictionary-encoded."""
    return bool(types.is_dictionary(kind)) or any(map(has_dictionary, _inner(kind)))


def has_values(kind: Any) -> bool:
    """Whether a type has anything to be stored: structs without fields have not."""
    if types.is_struct(kind) or types.is_nested(kind):
        return any(map(has_values, _inner(kind)))
    return True


def stored(kind: Any) -> Any:
    """A type with what extension types in it are stored as.

    Values must not depend on which packages have registered a type in this process.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return stored(kind.storage_type)
    return _with_inner(kind, stored)


def bare(kind: Any) -> Any:
    """A type of the same layout without anything to be checked but where its bytes lie."""
    for is_such, make in _BARE:
        if is_such(kind):
            return make(kind)
    return _with_inner(kind, bare)


def _with_inner(kind: Any, change: Callable[[Any], Any]) -> Any:
    """A type whose inner types are changed."""
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, change(kind.value_type), kind.ordered)
    if not types.is_nested(kind):
        return kind
    fields = [kind.field(number) for number in range(kind.num_fields)]
    changed = [field.with_type(change(field.type)) for field in fields]
    if types.is_struct(kind):
        return pa.struct(changed)
    if types.is_map(kind):
        pair = [kind.key_field, kind.item_field]
        return pa.map_(*(field.with_type(change(field.type)) for field in pair), kind.keys_sorted)
    if types.is_fixed_size_list(kind):
        return pa.list_(changed[0], kind.list_size)
    make = next(make for is_such, make in _LISTS if is_such(kind))
    return make(changed[0])


_LISTS = (
    (types.is_list, pa.list_),
    (types.is_large_list, pa.large_list),
    (types.is_list_view, pa.list_view),
    (types.is_large_list_view, pa.large_list_view),
)


def _inner(kind: Any) -> list[Any]:
    """Types that a type is made of."""
    if isinstance(kind, pa.BaseExtensionType):
        return [kind.storage_type]
    if types.is_dictionary(kind):
        return [kind.value_type]
    return [kind.field(number).type for number in range(kind.num_fields)]
