"""Types of Arrow columns: which are read, and what they say about reading single rows."""

from __future__ import annotations

from typing import Any

from zephon_torch.io.formats.libarrow import pa, types

_REFUSED = (
    types.is_union,
    types.is_run_end_encoded,
    types.is_list_view,
    types.is_large_list_view,
    types.is_string_view,
    types.is_binary_view,
)


def unsupported(kind: Any) -> Any:
    """Return the type, or one inside of it, that not all of pyarrow can handle; None without."""
    if any(is_refused(kind) for is_refused in _REFUSED):
        return kind
    found = map(unsupported, _inner(kind))
    return next((inner for inner in found if inner is not None), None)


def has_dictionary(kind: Any) -> bool:
    """Whether a type or one inside of it is dictionary-encoded."""
    return bool(types.is_dictionary(kind)) or any(map(has_dictionary, _inner(kind)))


def is_shallow(kind: Any) -> bool:
    """Whether validating one row of an array looks at no other row.

    A slice of an array shares its inner arrays, which are validated as a whole; that is free where
    their values all have one size.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return is_shallow(kind.storage_type)
    return all(map(types.is_primitive, _inner(kind)))


def stored_as(kind: Any) -> Any:
    """What a type is stored as: itself, but for extensions."""
    return stored_as(kind.storage_type) if isinstance(kind, pa.BaseExtensionType) else kind


def count_buffers(kind: Any) -> tuple[int, int] | None:
    """Nodes and buffers that a column takes in the header of a batch; None where not known here."""
    kind = stored_as(kind)
    if types.is_null(kind):
        return 1, 0
    if types.is_primitive(kind) or types.is_decimal(kind) or types.is_fixed_size_binary(kind):
        return 1, 2
    if any(is_text(kind) for is_text in _OF_BYTES):
        return 1, 3
    if not any(is_nested(kind) for is_nested in _NESTED):
        return None
    has_offsets = not (types.is_struct(kind) or types.is_fixed_size_list(kind))
    inner = [count_buffers(inner) for inner in _inner(kind)]
    known = [found for found in inner if found is not None]
    if len(known) < len(inner):
        return None
    return 1 + sum(n for n, _ in known), 1 + has_offsets + sum(n for _, n in known)


_OF_BYTES = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
_NESTED = (
    types.is_struct,
    types.is_list,
    types.is_large_list,
    types.is_fixed_size_list,
    types.is_map,
)


def without_extensions(batch: Any) -> Any:
    """A record batch whose columns of extension types are what these are stored as.

    Values must not depend on which packages have registered a type in this process.
    """
    if not any(isinstance(field.type, pa.BaseExtensionType) for field in batch.schema):
        return batch
    columns = [c.storage if isinstance(c, pa.ExtensionArray) else c for c in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def without_views(table: Any) -> Any:
    """A table whose columns of text and bytes that are views are plain: views cannot be taken."""
    for number, field in enumerate(table.schema):
        if types.is_string_view(field.type) or types.is_binary_view(field.type):
            plain = pa.large_string() if types.is_string_view(field.type) else pa.large_binary()
            table = table.set_column(number, field.name, table.column(number).cast(plain))
    return table


def _inner(kind: Any) -> list[Any]:
    """Types that a type is made of."""
    if isinstance(kind, pa.BaseExtensionType):
        return [kind.storage_type]
    if types.is_dictionary(kind):
        return [kind.value_type]
    return [kind.field(number).type for number in range(kind.num_fields)]
