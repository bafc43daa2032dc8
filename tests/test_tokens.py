"""Token rows of .npy and bare .bin files: what is read, what is refused, whole batches of them."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import numpy.lib.format as npy
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon_torch import DataLoader
from zephon_torch.errors import ConfigurationError, DatasetError, RecordError, ZephonError
from zephon_torch.io import Dataset

ROWS = np.arange(60, dtype=np.uint16).reshape(12, 5) + 65_400
TWO = {"dtype": "uint16", "row_length": 5}


def saved(array: npt.NDArray[Any], version: tuple[int, int] | None = None) -> bytes:
    stream = io.BytesIO()
    npy.write_array(stream, array, version)
    return stream.getvalue()


def dataset_of(folder: Path, content: bytes, name: str = "a.npy", **options: Any) -> Dataset:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return Dataset.from_path("web", folder / name, **options)


def read(dataset: Dataset, samples: Sequence[int], shard: int = 0) -> npt.NDArray[Any]:
    with closing(dataset.open(shard)) as reader:
        rows = reader.read(np.array(samples, np.int64))
    assert isinstance(rows, np.ndarray)
    return rows


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("dtype", ["u1", "<u2", ">u2", ">i4", "<i8", "<u8", "<f2", ">f4", "<f8"])
def test_rows_are_those_of_numpy_in_native_byte_order(
    tmp_path: Path, dtype: str, version: tuple[int, int]
) -> None:
    array = (np.arange(60).reshape(12, 5) * 3).astype(dtype)
    rows = read(dataset_of(tmp_path, saved(array, version)), [3, 0, 11, 3])
    assert rows.dtype.isnative and rows.dtype.itemsize == array.dtype.itemsize
    assert rows.tolist() == array[[3, 0, 11, 3]].tolist()
    rows[:] = 0  # in memory of their own
    assert list(map(list, dataset_of(tmp_path, saved(array, version)))) == array.tolist()


def test_users_get_whole_numbers_as_int64_and_floats_as_stored(tmp_path: Path) -> None:
    assert dataset_of(tmp_path, saved(ROWS))[0].dtype == np.int64
    assert dataset_of(tmp_path, saved(ROWS.astype("<f4")))[0].dtype == np.float32


def test_files_of_one_axis_are_cut_into_rows_and_what_is_left_is_in_no_row(tmp_path: Path) -> None:
    values = np.arange(59, dtype="<u2")
    kinds: dict[str, tuple[bytes, dict[str, Any]]] = {
        "a.npy": (saved(values), {"row_length": 5}),
        "a.bin": (values.tobytes(), TWO),
        "b.BIN": (values.astype(">u2").tobytes(), TWO | {"dtype": np.dtype(">u2")}),
        "c.bin": (values.tobytes(), TWO | {"dtype": np.uint16, "row_length": np.int32(5)}),
    }
    for name, (content, options) in kinds.items():
        dataset = dataset_of(tmp_path / "ü %20 #1?", content, name, **options)
        assert len(dataset) == 11
        assert [row.tolist() for row in dataset] == values[:55].reshape(11, 5).tolist()


@pytest.mark.parametrize(
    ("name", "content", "options", "num_rows"),
    [
        ("a.bin", b"", TWO, 0),
        ("a.bin", b"12345678", TWO, 0),
        ("a.npy", saved(np.zeros((0, 5), "u2")), {}, 0),
        ("a.npy", saved(np.zeros(0, "u2")), {"row_length": 5}, 0),
        ("a.npy", saved(np.zeros(4, "u2")), {"row_length": 5}, 0),
        ("a.npy", saved(np.zeros((1, 5), "u2")), {}, 1),
    ],
)
def test_a_file_with_no_row_is_an_empty_shard(
    tmp_path: Path, name: str, content: bytes, options: dict[str, Any], num_rows: int
) -> None:
    dataset = dataset_of(tmp_path, content, name, **options)
    assert len(dataset) == num_rows and len(list(dataset)) == num_rows
    assert read(dataset, []).shape == (0, 5)
    with pytest.raises(RecordError, match=f"a.{name[-3:]}' has no record {num_rows}"):
        read(dataset, [num_rows])


def header(text: str, body: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    return b"\x93NUMPY" + version + len(text).to_bytes(2, "little") + text.encode("latin1") + body


def described(descr: str, shape: str, order: str = "False") -> bytes:
    return header(f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, }}\n")


class Trap:
    """Raises if it is ever unpickled."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('unpickled')",))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not a .npy file"),
        (b"\x93NUM", "is not a .npy file"),
        (b"PK\x03\x04 a zip archive", "is not a .npy file"),
        (header("{}"), "is not a .npy file: .*correct keys"),
        (header("x" * 60_000), "is not a .npy file"),
        (header("(" * 5000), "is not a .npy file"),
        (header("'''"), "is not a .npy file"),
        (header("{}", version=b"\x09\x00"), r"is not a .npy file: .*version .*9"),
        (saved(ROWS)[:-1], r"has 247 bytes, its header says 248 .*cut short"),
        (saved(ROWS) + b"1", r"has 249 bytes, its header says 248 .*was added"),
        (saved(np.array([Trap()], object)), "pickled objects, which are never loaded"),
        (saved(np.zeros(3, [("a", "u2")])), "only whole and floating-point numbers"),
        (saved(np.zeros(3, "S4")), "only whole and floating-point numbers"),
        (saved(np.zeros(3, "M8[s]")), "only whole and floating-point numbers"),
        (saved(np.zeros(3, "c8")), "only whole and floating-point numbers"),
        (saved(np.zeros(3, "?")), "only whole and floating-point numbers"),
        (saved(np.zeros(3, np.longdouble)), "at most 64 bits"),
        (saved(np.asfortranarray(ROWS)), r"Fortran order.*ascontiguousarray"),
        (saved(np.zeros((2, 3, 4), "u2")), r"has shape \(2, 3, 4\)"),
        (saved(np.zeros((), "u2")), r"has shape \(\)"),
        (saved(np.zeros((4, 0), "u2")), r"has shape \(4, 0\)"),
        (described("'<u2'", "(-2, -3)") + b"0" * 12, r"has shape \(-2, -3\)"),
        (described("'<u2'", "(-1,)"), r"has shape \(-1,\)"),
        (described("'<u2'", f"(0, {10**30})"), "values in a row"),
        (described("'<u2'", f"({10**30}, 2)"), "its header says"),
    ],
)
def test_files_that_cannot_be_read_are_refused_by_name(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = re.escape(str(tmp_path / "a.npy"))
    with pytest.raises(DatasetError, match=f"{path}' .*{reason}"):
        dataset_of(tmp_path, content)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a.bin", {}, r"a.bin' is bare values: give dtype= and row_length="),
        ("a.bin", {"dtype": "uint16"}, r"give dtype= and row_length="),
        ("a.npy", {"row_length": 6}, r"rows of 5 values, but row_length= says 6"),
        ("a.npy", {"dtype": "int32"}, r"a.npy' holds <u2, but dtype= says <i4"),
        ("a.npy", {"dtype": "tokens"}, r"dtype must be a type of whole.* got 'tokens'"),
        ("a.npy", {"dtype": object}, r"dtype must be"),
        ("a.npy", {"dtype": "u2,u2"}, r"dtype must be"),
        ("a.npy", {"dtype": "f16"}, r"dtype must be"),
        ("a.npy", {"row_length": 0}, r"row_length must be .* got 0"),
        ("a.npy", {"row_length": True}, r"row_length must be .* got True"),
        ("a.npy", {"row_length": 5.0}, r"row_length must be .* got 5.0"),
        ("a.npy", {"row_length": 1 << 40}, r"row_length must be"),
        ("a.npy", {"length": 5}, r"'tokens' has no option 'length'; it has 'dtype', 'row_length'"),
    ],
)
def test_options_that_cannot_be_are_refused_in_words(
    tmp_path: Path, name: str, options: dict[str, Any], message: str
) -> None:
    content = saved(ROWS) if name == "a.npy" else ROWS.tobytes()
    with pytest.raises(ConfigurationError, match=message):
        dataset_of(tmp_path, content, name, **options)


def test_one_axis_without_a_row_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="one row of 60 values: give row_length="):
        dataset_of(tmp_path, saved(ROWS.ravel()))


def test_rows_behind_a_header_of_any_length_are_right(tmp_path: Path) -> None:
    """Also where the values are not aligned in the file."""
    array = np.arange(6, dtype="<i8").reshape(3, 2)
    for padding in range(9):
        text = "{'descr': '<i8', 'fortran_order': False, 'shape': (3, 2)}" + " " * padding
        dataset = dataset_of(tmp_path, header(text, array.tobytes()))
        assert read(dataset, [2, 0]).tolist() == [[4, 5], [0, 1]]


def test_bytes_that_are_no_whole_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DatasetError, match=r"a.bin' has 7 bytes, .*no multiple of the 2 bytes of a"
    ):
        dataset_of(tmp_path, b"1234567", "a.bin", **TWO)


def test_unsigned_values_beyond_int64_are_refused_where_they_are_read(tmp_path: Path) -> None:
    array = np.arange(15, dtype="<u8").reshape(3, 5)
    array[1, 4] = 1 << 63
    dataset = dataset_of(tmp_path, saved(array))
    assert read(dataset, [2, 0]).tolist() == array[[2, 0]].tolist()
    with pytest.raises(RecordError, match=r"'web', file '.*a.npy', record 1: a value is 2\^63"):
        read(dataset, [0, 1])


def test_row_length_and_dtype_are_part_of_the_identity(tmp_path: Path) -> None:
    content = np.zeros(120, "u1").tobytes()
    same = [{"dtype": "u2", "row_length": 5}, {"dtype": np.uint16, "row_length": 5}]
    prints = [dataset_of(tmp_path, content, "a.bin", **o).fingerprint for o in same]
    assert prints[0] == prints[1]
    others = [("i2", 5), ("u4", 5), ("u2", 6), (">u2", 5)]
    for dtype, length in others:
        other = dataset_of(tmp_path, content, "a.bin", dtype=dtype, row_length=length)
        prints.append(other.fingerprint)
    assert len(set(prints)) == 1 + len(others)


def test_a_changed_or_missing_file_is_named(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, saved(ROWS))
    (tmp_path / "a.npy").write_bytes(b"short")
    with pytest.raises(DatasetError, match=r"a.npy' changed since .* 248 bytes then, 5 now"):
        dataset.open(0)
    (tmp_path / "a.npy").unlink()
    with pytest.raises(DatasetError, match=r"a.npy' is gone"):
        dataset.open(0)


def test_a_file_cut_short_under_an_open_reader_is_an_error_not_a_crash(tmp_path: Path) -> None:
    array = np.zeros((1000, 50), "u2")
    with closing(dataset_of(tmp_path, saved(array)).open(0)) as reader:
        os.truncate(tmp_path / "a.npy", 200)
        with pytest.raises(DatasetError, match=r"was cut short: 100,128 bytes .* 200 now"):
            reader.read(np.array([999]))


def test_closed_readers_say_so_and_leave_nothing_behind(tmp_path: Path) -> None:
    dataset = dataset_of(tmp_path, saved(ROWS))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        reader = dataset.open(0)
        kept = reader.read(np.array([1]))
        reader.close()
        reader.close()
        assert [row.tolist() for row in kept] == ROWS[1:2].tolist()
        with pytest.raises(DatasetError, match="is closed"):
            reader.read(np.array([0]))
    assert len(os.listdir("/proc/self/fd")) == before
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("name", ["a.npy", "b.bin", "empty.bin"])
def test_remote_rows_are_the_local_ones(name: str) -> None:
    filesystem = fsspec.filesystem("memory")
    content = {"a.npy": saved(ROWS), "b.bin": ROWS.tobytes(), "empty.bin": b""}[name]
    filesystem.pipe_file(f"/tokens/ä %23 #/{name}", content)
    options = {} if name == "a.npy" else TWO
    dataset = Dataset.from_path("a", f"memory://tokens/ä %23 #/{name}", **options)
    expected = [] if name == "empty.bin" else ROWS.tolist()
    assert [row.tolist() for row in dataset] == expected
    assert read(dataset, []).shape == (0, 5)
    if expected:
        rows = read(dataset, [11, 0, 0])
        assert rows.tolist() == ROWS[[11, 0, 0]].tolist() and rows.dtype == np.uint16
        rows[:] = 0
        reader = dataset.open(0)
        filesystem.store[f"/tokens/ä %23 #/{name}"].truncate(3)
        with pytest.raises(DatasetError, match="cut short"):
            reader.read(np.array([11]))
    filesystem.rm("/tokens", recursive=True)


GOOD = saved(ROWS)


@settings(max_examples=60)
@given(
    flips=st.lists(st.tuples(st.integers(0, 127), st.integers(0, 255)), max_size=3),
    cut=st.none() | st.integers(0, len(GOOD)),
    more=st.binary(max_size=3),
)
def test_damaged_headers_give_the_right_rows_or_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, flips: Any, cut: int | None, more: bytes
) -> None:
    content = bytearray(GOOD)
    for at, value in flips:
        content[at] = value
    damaged = bytes(content[:cut]) + more
    try:
        dataset = dataset_of(tmp_path_factory.mktemp("fuzz"), damaged)
        rows = list(dataset)
    except ZephonError:
        return
    expected = np.load(io.BytesIO(damaged))
    assert [row.tolist() for row in rows] == expected.tolist()


# --- whole batches -------------------------------------------------------------------------------


def rows_folder(folder: Path, start: int, dtype: str, sizes: Sequence[int] = (13, 4, 30)) -> Path:
    folder.mkdir()
    for number, size in enumerate(sizes):
        ids = start + sum(sizes[:number]) + np.arange(size)
        np.save(folder / f"{number}.npy", (ids[:, None] + 7 * np.arange(5)).astype(dtype))
    return folder


def test_batches_are_int64_rows_that_share_no_memory(tmp_path: Path) -> None:
    """Through every way of reading, with and without a transform."""
    dataset = Dataset.from_path("a", rows_folder(tmp_path / "a", 0, "<u2"))
    for options in ({}, {"num_threads": 0}, {"num_workers": 1}, {"on_error": "skip"}):
        for transform in (None, lambda row: row):
            loader = DataLoader(
                dataset, batch_size=8, shuffle=True, transform=transform, seed=3, **options
            )
            with loader:
                batches = list(loader)
            assert all(batch.dtype == torch.int64 for batch in batches)
            assert [tuple(batch.shape) for batch in batches] == [(8, 5)] * 5 + [(7, 5)]
            rows = torch.cat(batches)
            assert sorted(rows[:, 0].tolist()) == list(range(47))
            assert torch.equal(rows, rows[:, :1] + 7 * torch.arange(5))
            assert len({batch.untyped_storage().data_ptr() for batch in batches}) == 6
            assert all(batch.untyped_storage().nbytes() == batch.nbytes for batch in batches)
            batches[0].zero_()
            assert dataset[0].tolist() == [0, 7, 14, 21, 28]


def test_a_mixture_of_narrow_and_wide_rows_is_one_batch_of_int64(tmp_path: Path) -> None:
    narrow = Dataset.from_path("narrow", rows_folder(tmp_path / "n", 0, "<u2"))
    wide = Dataset.from_path("wide", rows_folder(tmp_path / "w", 100_000, ">i4"))
    loader = DataLoader(
        {"narrow": narrow, "wide": wide}, 8, mixture={"narrow": 1, "wide": 1}, num_threads=0
    )
    seen: list[int] = []
    for batch in loader:
        assert batch.dtype == torch.int64 and batch.shape[1] == 5
        assert torch.equal(batch, batch[:, :1] + 7 * torch.arange(5))
        seen += batch[:, 0].tolist()
    assert sorted(seen) == [*range(47), *range(100_000, 100_047)]


def test_a_row_that_cannot_be_held_is_skipped(tmp_path: Path) -> None:
    array = np.arange(60, dtype="<u8").reshape(12, 5)
    array[7] = 1 << 63
    dataset = dataset_of(tmp_path, saved(array))
    with DataLoader(dataset, batch_size=4, on_error="skip", num_threads=0) as loader:
        batches = list(loader)
        (bad,) = loader.stats.bad
    assert [batch[:, 0].tolist() for batch in batches] == [
        [0, 5, 10, 15],
        [20, 25, 30],
        [40, 45, 50, 55],
    ]
    assert all(batch.dtype == torch.int64 for batch in batches)
    assert "record 7" in str(bad)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_rows_of_whole_and_of_other_numbers_are_never_mixed_without_a_word(
    tmp_path: Path, num_workers: int
) -> None:
    """torch's default_collate would make 2.0**53 of 2**53 + 1, and only without workers."""
    np.save(tmp_path / "a.npy", np.full((2, 3), 2**53 + 1))
    np.save(tmp_path / "b.npy", np.full((2, 3), 0.5))
    dataset = Dataset.from_path("mixed", tmp_path)
    with (
        DataLoader(dataset, 4, num_workers=num_workers) as loader,
        pytest.raises(DatasetError, match=r"'mixed' int64, dataset 'mixed' float64. Give a transf"),
    ):
        next(iter(loader))
    with DataLoader(dataset, 4, transform=np.float64, num_workers=num_workers) as loader:
        assert [batch.dtype for batch in loader] == [torch.float64]


def test_files_with_rows_of_two_lengths_are_refused_and_named(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((3, 4), np.uint16))
    np.save(tmp_path / "b.npy", np.zeros((3, 5), np.uint16))
    with pytest.raises(DatasetError, match=r"b.npy' has rows of 5 values, '.*a.npy' of 4: make"):
        Dataset.from_path("x", tmp_path)
