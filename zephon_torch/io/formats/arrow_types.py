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
