"""Megatron's .bin and .idx pairs: sequences, documents and rows, and files that do not fit."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence
from contextlib import closing
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import numpy.typing as npt
import pytest
from format_files import MEGATRON_CODES, megatron_pair
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon_torch.errors import ConfigurationError, DatasetError, RecordError, ZephonError
from zephon_torch.io import Dataset

GOLDEN = Path(__file__).parent / "data" / "megatron"
# Three documents: two sequences, none at all, three sequences of which one is empty.
LENGTHS = [3, 4, 2, 0, 6]
MARKS = [0, 2, 2, 5]


def sequences_of(dtype: str = "<u2") -> list[npt.NDArray[Any]]:
    starts = np.cumsum([0, *LENGTHS])
    return [np.arange(a, a + n).astype(dtype) for a, n in zip(starts, LENGTHS, strict=False)]


def dataset_of(folder: Path, stored: str = "<u2", modes: bytes = b"", **options: Any) -> Dataset:
    megatron_pair(folder / "x", sequences_of(stored), MARKS, modes)
    return Dataset.from_path("web", folder / "x.bin", **options)


def read(dataset: Dataset, samples: Sequence[int]) -> list[list[int]]:
    with closing(dataset.open(0)) as reader:
        return [row.tolist() for row in reader.read(np.array(samples, np.int64))]


def lists(ends: Sequence[int]) -> list[list[int]]:
    return [list(range(a, b)) for a, b in pairwise(ends)]


SEQUENCES = lists([0, 3, 7, 9, 9, 15])
DOCUMENTS = lists([0, 7, 7, 15])
ROWS = lists([0, 4, 8, 12])


@pytest.mark.parametrize("code", MEGATRON_CODES)
@pytest.mark.parametrize("modes", [b"", b"\0\1\0\1\0"])
def test_sequences_documents_and_rows_of_every_type(
    tmp_path: Path, code: str, modes: bytes
) -> None:
    for options, expected in (
        ({}, SEQUENCES),
        ({"unit": "document"}, DOCUMENTS),
        ({"row_length": 4}, ROWS),
    ):
        dataset = dataset_of(tmp_path, f"<{code}", modes, **options)
        assert dataset.format == "megatron"
        samples = list(dataset)
        assert [sample.tolist() for sample in samples] == expected
        kind = np.dtype(code) if code[0] == "f" else np.dtype(np.int64)
        assert {sample.dtype for sample in samples} == {kind}
        order = [2, 0, 2, 1]
        assert read(dataset, order) == [expected[i] for i in order]
        for sample in samples:
            sample[:] = 0  # in memory of its own
        assert list(map(list, dataset)) == expected


def test_the_kinds_of_samples_have_different_identities(tmp_path: Path) -> None:
    kinds: list[dict[str, Any]] = [{}, {"unit": "document"}, {"row_length": 4}, {"row_length": 5}]
    assert len({dataset_of(tmp_path, **kind).fingerprint for kind in kinds}) == 4
    explicit = dataset_of(tmp_path, unit="sequence")
    assert explicit.fingerprint == dataset_of(tmp_path).fingerprint


def test_a_pair_without_sequences_is_an_empty_shard(tmp_path: Path) -> None:
    megatron_pair(tmp_path / "x", [], [0])
    for options in ({}, {"unit": "document"}, {"row_length": 4}):
        dataset = Dataset.from_path("a", tmp_path, **options)
        assert len(dataset) == 0 and list(dataset) == [] and read(dataset, []) == []
    megatron_pair(tmp_path / "x", [np.empty(0, "<u2")] * 2, [0, 2])
    assert list(map(list, Dataset.from_path("a", tmp_path))) == [[], []]


def test_documents_without_sequences_are_empty_wherever_they_are(tmp_path: Path) -> None:
    megatron_pair(tmp_path / "x", sequences_of(), [0, 0, 5, 5, 5])
    dataset = Dataset.from_path("a", tmp_path, unit="document")
    for number, length in enumerate([0, 15, 0, 0]):
        assert [len(row) for row in read(dataset, [number, number])] == [length, length]


def test_a_bin_file_is_megatrons_where_its_index_lies_beside_it(tmp_path: Path) -> None:
    tmp_path = tmp_path / "ü %20 #1?"
    tmp_path.mkdir()
    dataset_of(tmp_path)
    for path in (tmp_path, tmp_path / "x.bin", tmp_path / "*.bin"):
        assert Dataset.from_path("a", path).format == "megatron"
    bare = Dataset.from_path("a", tmp_path / "x.bin", format="tokens", dtype="u2", row_length=4)
    assert [row.tolist() for row in bare] == ROWS
    (tmp_path / "y.bin").write_bytes(b"12")
    with pytest.raises(DatasetError, match=r"'x.bin' is megatron, 'y.bin' is tokens"):
        Dataset.from_path("a", tmp_path)
    (tmp_path / "x.idx").unlink()
    with pytest.raises(DatasetError, match=r"x.bin' is read as format 'megatron' with .*x.idx'"):
        Dataset.from_path("a", tmp_path / "x.bin", format="megatron")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit": "token"}, "unit must be one of .*'sequence', 'document'.* got 'token'"),
        ({"row_length": 0}, "row_length must be .* got 0"),
        ({"unit": "document", "row_length": 4}, "exclude each other"),
        ({"dtype": "u2"}, "'megatron' has no option 'dtype'; it has 'unit', 'row_length'"),
    ],
)
def test_options_that_cannot_be_are_refused_in_words(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        dataset_of(tmp_path, **options)


def index(**changed: Any) -> bytes:
    """The index of the pair of these tests, with some parts changed."""
    part = {
        "magic": b"MMIDIDX\0\0", "version": 1, "code": 8, "num_sequences": 5, "num_marks": 4,
        "lengths": LENGTHS, "pointers": [0, 6, 14, 18, 18], "marks": MARKS, "tail": b"",
    } | changed  # fmt: skip
    counts = struct.pack(
        "<QBQQ", part["version"], part["code"], part["num_sequences"], part["num_marks"]
    )
    columns = [(part["lengths"], "<i4"), (part["pointers"], "<i8"), (part["marks"], "<i8")]
    body = b"".join(np.array(column, dtype).tobytes() for column, dtype in columns)
    return bytes(part["magic"] + counts + body + part["tail"])


def test_the_index_of_these_tests_is_the_one_that_the_writer_makes(tmp_path: Path) -> None:
    dataset_of(tmp_path)
    assert (tmp_path / "x.idx").read_bytes() == index()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not an index of Megatron's"),
        (index()[:20], "is not an index of Megatron's"),
        (b"{}" * 50, "is not an index of Megatron's"),
        (index(magic=b"TNTIDX\0\0\0"), "is of Megatron's and fairseq's old kind .TNTIDX."),
        (index(version=2), "has version 2 of its layout, 1 expected"),
        (index(code=0), "has the unknown code 0"),
        (index(code=9), "has the unknown code 9"),
        (index(num_marks=0, marks=[]), "has no mark of a document"),
        (index()[:-1], "has 125 bytes, 126 expected for 5 sequences and 3 documents"),
        (index() + b"1", "has 127 bytes, 126 expected"),
        (index(num_sequences=6), "138 expected for 6 sequences"),
        (index(num_sequences=2**63), "sequences and 3 documents: it was cut short"),
        (index(num_marks=2**64 - 1), "it was cut short"),
        (index(marks=[0, 2, 2, 4]), "marks documents from sequence 0 to 4, but has 5"),
        (index(marks=[1, 2, 2, 5]), "marks documents from sequence 1 to 5, but has 5"),
    ],
)
def test_an_index_that_cannot_be_is_refused_by_name(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    dataset_of(tmp_path)
    (tmp_path / "x.idx").write_bytes(content)
    path = re.escape(str(tmp_path / "x.idx"))
    for options in ({}, {"row_length": 4}, {"unit": "document"}):
        with pytest.raises(DatasetError, match=f"{path}' .*{reason}"):
            Dataset.from_path("a", tmp_path, **options)


@pytest.mark.parametrize(
    "changed",
    [
        {"code": 4},  # values of another size
        {"lengths": [3, 4, 2, 0, 7]},
        {"pointers": [0, 6, 14, 18, 20]},
        {"pointers": [0, 6, 14, 18, -2]},
    ],
)
def test_an_index_of_another_bin_file_is_refused(tmp_path: Path, changed: Any) -> None:
    dataset_of(tmp_path)
    (tmp_path / "x.idx").write_bytes(index(**changed))
    with pytest.raises(DatasetError, match=r"x.bin' has 30 bytes, \d+ by '.*x.idx': one of them"):
        Dataset.from_path("a", tmp_path)


@pytest.mark.parametrize("content", [b"1" * 28, b"1" * 32, b""])
def test_a_bin_file_of_another_size_is_refused(tmp_path: Path, content: bytes) -> None:
    dataset_of(tmp_path)
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(DatasetError, match=rf"x.bin' has {len(content)} bytes, 30 by '.*x.idx'"):
        Dataset.from_path("a", tmp_path)


@pytest.mark.parametrize(
    ("changed", "unit", "bad"),
    [
        ({"pointers": [0, 8, 14, 18, 18]}, "sequence", [0, 1]),
        ({"pointers": [0, 7, 14, 18, 18]}, "document", []),
        ({"pointers": [0, 6, 15, 18, 18]}, "document", [0, 1, 2]),
        ({"pointers": [-2, 6, 14, 18, 18]}, "sequence", [0]),
        ({"pointers": [0, 6, 2**62, 18, 18]}, "sequence", [1, 2]),
        ({"lengths": [3, 4, 3, -1, 6]}, "sequence", [2, 3]),
        ({"marks": [0, 6, 2, 5]}, "document", [0, 1]),
        ({"marks": [0, -1, 2, 5]}, "document", [0, 1]),
    ],
)
def test_entries_that_do_not_agree_are_named_and_the_others_read(
    tmp_path: Path, changed: Any, unit: str, bad: list[int]
) -> None:
    dataset_of(tmp_path)
    (tmp_path / "x.idx").write_bytes(index(**changed))
    dataset = Dataset.from_path("web", tmp_path, unit=unit)
    expected = SEQUENCES if unit == "sequence" else DOCUMENTS
    for number in range(len(dataset)):
        if number not in bad:
            assert read(dataset, [number]) == [expected[number]]
            continue
        place = rf"'web', file '.*x.bin', record {number}: its entry in '.*x.idx' does not agree"
        with pytest.raises(RecordError, match=place):
            read(dataset, [number])


@pytest.mark.parametrize("options", [{}, {"row_length": 4}, {"unit": "document"}])
def test_a_change_of_either_file_after_the_dataset_was_made_is_noticed(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    dataset = dataset_of(tmp_path, **options)
    for name in ("x.idx", "x.bin"):
        before = (tmp_path / name).stat()
        os.utime(tmp_path / name, ns=(5, 5))
        with pytest.raises(DatasetError, match=f"{name}' changed since the dataset was made"):
            dataset.open(0)
        os.utime(tmp_path / name, ns=(before.st_atime_ns, before.st_mtime_ns))
        dataset.open(0).close()
    (tmp_path / "x.idx").unlink()
    with pytest.raises(DatasetError, match=r"x.idx' is gone"):
        dataset.open(0)


@pytest.mark.parametrize("name", ["x.idx", "x.bin"])
def test_either_file_cut_short_under_an_open_reader_is_an_error(tmp_path: Path, name: str) -> None:
    with closing(dataset_of(tmp_path).open(0)) as reader:
        os.truncate(tmp_path / name, 2)
        with pytest.raises(DatasetError, match=f"{name}' was cut short"):
            reader.read(np.array([4]))


def test_remote_pairs_are_read_like_local_ones(tmp_path: Path) -> None:
    dataset_of(tmp_path)
    filesystem = fsspec.filesystem("memory")
    for name in ("x.idx", "x.bin"):
        filesystem.pipe_file(f"/megatron/ü %/{name}", (tmp_path / name).read_bytes())
    for path in ("memory://megatron/ü %", "memory://megatron/ü %/x.bin"):
        dataset = Dataset.from_path("a", path)
        assert [sample.tolist() for sample in dataset] == SEQUENCES
        documents = Dataset.from_path("a", path, unit="document")
        assert read(documents, [2, 0, 1]) == [DOCUMENTS[i] for i in (2, 0, 1)]
        assert [row.tolist() for row in Dataset.from_path("a", path, row_length=4)] == ROWS
    filesystem.rm("/megatron", recursive=True)


@settings(max_examples=60)
@given(
    flips=st.lists(st.tuples(st.integers(0, 125), st.integers(0, 255)), max_size=3),
    cut=st.none() | st.integers(0, 126),
    unit=st.sampled_from(["sequence", "document"]),
)
def test_damaged_indexes_give_parts_of_the_stream_or_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, flips: Any, cut: int | None, unit: str
) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    dataset_of(folder)
    content = bytearray(index())
    for at, value in flips:
        content[at] = value
    (folder / "x.idx").write_bytes(bytes(content[:cut]))
    try:
        dataset = Dataset.from_path("a", folder, unit=unit)
        found = [sample.tolist() for sample in dataset]
    except ZephonError:
        return
    if content[17] == 8:  # else: two-byte values of the other type are others
        assert list(chain(*found)) == list(range(15))


# --- Megatron's own files ------------------------------------------------------------------------


def test_the_files_that_megatron_wrote_are_read(tmp_path: Path) -> None:
    """``data/megatron`` was made by ``data/make_megatron.py``."""
    assert [s.tolist() for s in Dataset.from_path("a", GOLDEN)] == SEQUENCES
    documents = Dataset.from_path("a", GOLDEN, unit="document")
    assert [s.tolist() for s in documents] == DOCUMENTS
    assert (GOLDEN / "golden.idx").read_bytes() == index()


@pytest.mark.filterwarnings("ignore:Transformer Engine and Apex are not installed")
def test_megatron_reads_what_we_read(tmp_path: Path) -> None:
    library = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    rng = np.random.Generator(np.random.Philox(1))
    builder = library.IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=np.int32)
    torch = pytest.importorskip("torch")
    for _ in range(50):
        builder.add_item(torch.tensor(rng.integers(0, 2**31, rng.integers(1, 40))))
        if rng.integers(2):
            builder.end_document()
    builder.end_document()
    builder.finalize(str(tmp_path / "m.idx"))
    theirs = library.IndexedDataset(str(tmp_path / "m"))
    ours = Dataset.from_path("a", tmp_path)
    assert [s.tolist() for s in ours] == [theirs[i].tolist() for i in range(len(theirs))]
    marks = theirs.document_indices
    expected = [
        np.concatenate([theirs[i] for i in range(a, b)]).tolist()
        for a, b in pairwise(marks)
        if b > a
    ]
    documents = Dataset.from_path("a", tmp_path, unit="document")
    assert [s.tolist() for s in documents if len(s)] == expected


def test_a_pair_that_lost_its_index_is_not_left_out_without_a_word(tmp_path: Path) -> None:
    for name in ("a", "b"):
        megatron_pair(tmp_path / name, [np.arange(3, dtype="<u2")], [0, 1])
    (tmp_path / "b.idx").unlink()
    with pytest.raises(DatasetError, match=r"more than one format"):
        Dataset.from_path("x", tmp_path)
    with pytest.raises(DatasetError, match=r"b.bin' lies among .* without its '.*b.idx': restore"):
        Dataset.from_path("x", tmp_path, format="megatron")
