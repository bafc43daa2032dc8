"""Rows of many shards in one gather, batches read in windows, and the ring of worker processes."""

from __future__ import annotations

import gc
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zephon_torch import DataLoader, StaticMixtureWorkSource
from zephon_torch.errors import DatasetError
from zephon_torch.io import Dataset
from zephon_torch.io.formats.rows.layout import RowLayout
from zephon_torch.io.formats.rows.mapped import MappedRows, RowGroup, RowGroupKind
from zephon_torch.io.storage import ranges
from zephon_torch.nodes import open_readers as opened
from zephon_torch.nodes import windows as window
from zephon_torch.nodes.fetch import Fetcher
from zephon_torch.work.plan.plan import Pointers
from zephon_torch.work.sharing import items

ENGINES: dict[str, dict[str, Any]] = {
    "inline": {"num_threads": 0},
    "one reading thread": {},
    "three threads": {"num_threads": 3},
    "a worker": {"num_workers": 1},
    "two persistent workers": {"num_workers": 2, "persistent_workers": True},
    "a spawned worker": {"num_workers": 1, "multiprocessing_context": "spawn"},
}


def write_rows(folder: Path, sizes: list[int], dtype: str = "<u2", row_length: int = 3) -> Path:
    """Files of rows whose first value is the number of the row in the dataset."""
    folder.mkdir(parents=True, exist_ok=True)
    number = 0
    for shard, size in enumerate(sizes):
        rows = np.arange(number, number + size).astype(dtype)[:, None].repeat(row_length, 1)
        np.save(folder / f"{shard:03d}.npy", rows)
        number += size
    return folder


class Shard:
    """A reader as a group takes it in: bare rows behind a header of any length."""

    def __init__(self, path: Path, rows: npt.NDArray[Any], num_before: int) -> None:
        path.write_bytes(b"x" * num_before + rows.tobytes())
        dataset = Dataset.from_path("bare", path, format="tokens", dtype="u1", row_length=1)
        file = dataset.content._file(dataset.shards, 0)  # type: ignore[attr-defined]
        layout = RowLayout(rows.dtype, rows.shape[1], num_before, len(rows))
        self.mapped = MappedRows(file, str(path), layout)


@given(data=st.data())
def test_a_group_gives_the_rows_of_its_shards(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    dtype = np.dtype(data.draw(st.sampled_from(["u1", "<u2", "<i4", "<f8"])))
    row_length = data.draw(st.integers(1, 5))
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    group = RowGroup(RowGroupKind(dtype, row_length), len(sizes) + 1)
    arrays = []
    for number, size in enumerate(sizes):
        first = 20 * number
        array = np.arange(first, first + size * row_length).astype(dtype).reshape(size, row_length)
        arrays.append(array)
        shard = Shard(folder / f"{number}.bin", array, data.draw(st.integers(0, 9)))
        group.add(number, shard)
    wanted = data.draw(
        st.lists(
            st.integers(0, len(sizes) - 1).flatmap(
                lambda n: st.tuples(st.just(n), st.integers(0, sizes[n] - 1))
            ),
            min_size=1,
        )
    )
    numbers, samples = (np.array(column) for column in zip(*wanted, strict=True))
    rows = group.read(numbers, samples)
    assert rows.dtype == dtype
    assert rows.tolist() == [arrays[n][s].tolist() for n, s in wanted]
    rows[:] = 0  # in memory of their own
    for number, sample in ((0, -1), (0, sizes[0]), (len(sizes), 0), (0, 1 << 62)):
        with pytest.raises(IndexError):
            group.read(np.array([number, 0]), np.array([sample, 0]))
    group.remove(0)
    with pytest.raises(IndexError):
        group.read(np.array([0]), np.array([0]))


def batches_of(loader: DataLoader) -> list[list[int]]:
    return [batch[:, 0].tolist() for batch in loader]


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_batches_are_the_same_whatever_the_window_and_own_their_memory(
    tmp_path: Path, engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = [
        Dataset.from_path("narrow", write_rows(tmp_path / "narrow", [5, 1, 0, 9])),
        Dataset.from_path("other", write_rows(tmp_path / "other", [4, 3])),
    ]
    source = StaticMixtureWorkSource(
        datasets, {"narrow": 2, "other": 1}, shuffle_block_size="global", stop_after_passes=4
    )
    expected = batches_of(DataLoader(source, 7, num_threads=0, transform=lambda row: row))
    for num_batches in (3,) if "multiprocessing_context" in engine else (1, 3, 8):
        monkeypatch.setattr(window.Windows, "batches", lambda *_, n=num_batches: n)
        with DataLoader(source, 7, **engine) as loader:
            kept = []
            for batch in loader:
                assert batch.dtype == torch.int64 and batch._is_view() is False
                assert batch.untyped_storage().nbytes() == batch.nbytes
                kept.append(batch)
            assert [batch[:, 0].tolist() for batch in kept] == expected
            loader.set_epoch(0)
            loader.set_epoch(0)
            next(iter(loader))  # a run that is left with windows under way
            loader.load_state_dict(loader.state_dict())
            assert batches_of(loader) == expected[1:]


@pytest.mark.parametrize("engine", [*ENGINES.values()][:-1], ids=[*ENGINES][:-1])
@pytest.mark.parametrize("dtype", ["<i8", "<f4", ">u2", "<u8"])
def test_rows_that_are_not_widened_are_copied_out_of_their_window(
    tmp_path: Path, dtype: str, engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = Dataset.from_path("rows", write_rows(tmp_path, [7, 8, 9], dtype))
    for num_batches in (1, 2):  # a slot of the ring is one batch, or two
        monkeypatch.setattr(window.Windows, "batches", lambda *_, n=num_batches: n)
        with DataLoader(dataset, 2, **engine) as loader:
            kept = list(loader)
        for batch in kept:
            assert batch.untyped_storage().nbytes() == batch.nbytes
        first = [float(row[0]) for batch in kept for row in batch]
        assert first == [float(number) for number in range(24)]


def test_workers_give_rows_of_two_types_without_the_ring(tmp_path: Path) -> None:
    datasets = [
        Dataset.from_path("narrow", write_rows(tmp_path / "narrow", [40])),
        Dataset.from_path("wide", write_rows(tmp_path / "wide", [40], "<i4")),
    ]
    seen = []
    for workers in (0, 2):
        with DataLoader(
            datasets, 8, mixture={"narrow": 1, "wide": 1}, num_workers=workers
        ) as loader:
            seen.append(batches_of(loader))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("engine", [{"num_threads": 0}, {"num_workers": 1}])
def test_rows_of_two_float_types_are_never_rounded_without_a_word(
    tmp_path: Path, engine: dict[str, Any]
) -> None:
    """torch's default_collate takes the type of the first one, in worker processes only."""
    names = ("<f4", "<f8")
    datasets = [
        Dataset.from_path(name, write_rows(tmp_path / name[1:], [9], name)) for name in names
    ]
    with (
        DataLoader(datasets, 4, mixture=dict.fromkeys(names, 1), **engine) as loader,
        pytest.raises(DatasetError, match="rows of different numbers"),
    ):
        list(loader)


@pytest.mark.parametrize("engine", [*ENGINES.values()][:-1], ids=[*ENGINES][:-1])
def test_an_error_in_a_window_is_that_of_its_batch_alone(
    tmp_path: Path, engine: dict[str, Any]
) -> None:
    folder = write_rows(tmp_path, [8, 8, 8, 8], "<u8")
    rows = np.load(folder / "001.npy")
    rows[5] = 1 << 63
    np.save(folder / "001.npy", rows)
    with DataLoader(Dataset.from_path("rows", folder), 4, **engine) as loader:
        seen: list[Any] = []
        iterator = iter(loader)
        for _ in range(len(loader)):
            try:
                seen.append(next(iterator)[:, 0].tolist())
            except DatasetError as error:
                assert "record 5" in str(error)
                seen.append("error")
    expected: list[Any] = [list(range(start, start + 4)) for start in range(0, 32, 4)]
    expected[3] = "error"
    assert seen == expected


def test_a_file_cut_short_is_an_error_of_the_group_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "_SIZES_TRUSTED_SECONDS", 0.0)
    folder = write_rows(tmp_path, [600, 600])
    fetcher = Fetcher([Dataset.from_path("rows", folder)])
    zeros = np.zeros(2, np.int64)
    wanted = Pointers(zeros, np.array([0, 1]), zeros, zeros)
    fetcher.read(wanted)
    assert fetcher._opened.get().together is not None
    with (folder / "001.npy").open("r+b") as file:
        file.truncate(200)
    monkeypatch.setattr(fetcher._opened.get().together._watched, "_trusted_until", 0.0)
    with pytest.raises(DatasetError, match=r"001\.npy.*cut short"):
        fetcher.read(wanted)


@pytest.mark.parametrize("engine", [{"num_threads": 0}, {}], ids=["inline", "thread"])
@pytest.mark.parametrize("kind", ["rows", "lines", "cells"])
def test_a_file_that_is_written_over_is_an_error_whoever_asks_first(
    tmp_path: Path, kind: str, engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "_SIZES_TRUSTED_SECONDS", 0.0)

    def content(value: int) -> bytes:
        if kind == "rows":
            return np.full((4000, 3), value, "<u2").tobytes()
        if kind == "lines":
            return f'{{"a": {value}}}\n'.encode() * 4000
        table, file = pa.table({"a": np.full(4000, value)}), io.BytesIO()
        with pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
        return file.getvalue()

    path = tmp_path / {"rows": "0.bin", "lines": "0.jsonl", "cells": "0.arrow"}[kind]
    path.write_bytes(content(1))
    options = {"dtype": "uint16", "row_length": 3} if kind == "rows" else {}
    with DataLoader(Dataset.from_path("a", path, **options), 8, shuffle=True, **engine) as loader:
        iterator = iter(loader)
        next(iterator)
        state = path.stat()
        with path.open("r+b") as file:  # in place: the thread may be reading from the map
            file.write(content(9))
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 10**9))
        for _ in range(3):
            for held in [one for one in gc.get_objects() if isinstance(one, ranges.FileMap)]:
                held._trusted_until = 0.0  # a second has passed
            with pytest.raises(DatasetError, match="written to while it was open"):
                for _ in iterator:  # after what was read ahead: of 500 batches not nearly all
                    pass


def test_more_shards_in_a_batch_than_can_be_open_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "_MAX_OPEN", 6)
    monkeypatch.setattr(opened, "_MIN_OPEN", 2)
    dataset = Dataset.from_path("rows", write_rows(tmp_path, [2] * 20))
    with DataLoader(dataset, 32, num_threads=0) as loader:
        assert batches_of(loader) == [list(range(32)), list(range(32, 40))]
        assert len(loader._pipeline.fetcher._opened.get()) <= 6


@pytest.mark.parametrize("most", [1, 16])
def test_as_many_batches_are_in_flight_as_was_asked_for(
    tmp_path: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a window holds several of them, and where batches are so large that it holds one."""
    monkeypatch.setattr(window.Windows, "batches", lambda self, _: min(self.num_batches, most))
    dataset = Dataset.from_path("rows", write_rows(tmp_path, [200]))
    for asked, options in ((1, {}), (1, {"num_threads": 0}), (6, {}), (6, {"num_threads": 2})):
        with DataLoader(dataset, 4, prefetch_factor=asked, **options) as loader:
            iterator = iter(loader)
            for _ in range(4):
                next(iterator)
            run = iterator._run
            flying = sum(len(batches) for batches, _ in getattr(run, "_in_flight", ()))
            assert flying + len(run._ready) <= asked + asked // 2
            if most == 1 and options != {"num_threads": 0}:
                assert flying == asked - 1, "one was taken, and none asked for since"


def test_a_slab_is_computed_once_and_again_only_after_an_error() -> None:
    computed = []

    def compute() -> Pointers:
        computed.append(len(computed))
        if len(computed) == 1:
            raise KeyboardInterrupt
        return Pointers(*(np.arange(6) for _ in range(4)))

    slab = items.Slab(compute)
    parts = [
        items.WorkItem(0, 2 * i, 2 * i + 2, items.SlabPart(slab, 2 * i, 2 * i + 2))
        for i in range(3)
    ]
    assert not computed and [item.num_samples for item in parts] == [2, 2, 2]
    with pytest.raises(KeyboardInterrupt):
        items.pointers_of(parts)
    assert items.pointers_of(parts).sample.tolist() == list(range(6))
    again = items.unpacked(*items.packed(parts[1:]))
    assert [item.pointers.sample.tolist() for item in again] == [[2, 3], [4, 5]]
    assert [(item.start, item.stop) for item in again] == [(2, 4), (4, 6)]
    assert len(computed) == 2
