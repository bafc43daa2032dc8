"""Arrow IPC: streams, files, and the folders that ``save_to_disk`` of HF datasets writes.

pyarrow reads them (``arrow_batches.py``). A local file is mapped: a row costs the pages it lies in.
Where batches are compressed or have dictionaries, and over a network, the whole batch is read for a
row of it, and kept for a while (``table_cache.py``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from zephon_torch.errors import DatasetError
from zephon_torch.io.formats.tables.arrow_batches import Batches
from zephon_torch.io.formats.tables.table import TableOptions, count_alike
from zephon_torch.io.formats.tables.table_rows import TableReader
from zephon_torch.io.storage.files import FileInfo, Storage, StoredFile
from zephon_torch.io.storage.reader import Reader

_STATE = "state.json"
_SPLITS = "dataset_dict.json"

Options = TableOptions


def count_all(
    files: Sequence[StoredFile], options: TableOptions, advance: Callable[[int], object]
) -> list[int]:
    """Count the rows of each file by the headers of its batches."""
    return count_alike(files, options, advance, _inspect)


def open_reader(file: StoredFile, options: TableOptions, dataset: str, num_samples: int) -> Reader:
    """Open a file that must be as it was when counted."""
    shard = f"dataset {dataset!r}, file {file.url!r}"
    return TableReader(Batches(file, options), shard, num_samples)


def choose(storage: Storage, listed: Sequence[FileInfo]) -> Sequence[FileInfo]:
    """The data files of a folder by ``save_to_disk``: caches may lie beside them."""
    there = {file.path: file for file in listed}
    if _SPLITS in there:
        splits = _state(storage, there[_SPLITS]).get("splits")
        raise DatasetError(
            f"{storage.url()!r} holds the splits {splits} of a DatasetDict: give the folder of one"
        )
    state = _state(storage, there[_STATE])
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DatasetError(
            f"{storage.url()!r} holds a selection of rows by an old version of datasets: load it, "
            "call flatten_indices() and save it anew"
        )
    names = _data_files(storage, state)
    for name in names:
        if name not in there:
            raise DatasetError(
                f"{storage.url(name)!r} is not there, but {_STATE} beside it names it: restore it"
            )
    return [there[name] for name in names]


def _state(storage: Storage, file: FileInfo) -> dict[str, Any]:
    try:
        state = json.loads(storage.read(file.path, 0, file.num_bytes))
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{storage.url(file.path)!r} is not valid JSON: {error}") from error
    return state if isinstance(state, dict) else {}


def _data_files(storage: Storage, state: dict[str, Any]) -> list[str]:
    try:
        return [str(entry["filename"]) for entry in state["_data_files"]]
    except (KeyError, TypeError):
        raise DatasetError(
            f"{storage.url(_STATE)!r} is not one of HF datasets, which lists _data_files: give a "
            "pattern such as *.arrow, or format= of the files"
        ) from None


def _inspect(file: StoredFile, options: TableOptions) -> tuple[int, dict[str, Any]]:
    with closing(Batches(file, options)) as batches:
        batches.check_claims()
        return int(batches.edges[-1]), batches.columns
