"""Arrow by hand: the values of ``to_pylist``, for many shards in one call."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon_torch.errors import DatasetError, RecordError
from zephon_torch.io import Dataset

pa = pytest.importorskip("pyarrow")
ipc = pytest.importorskip("pyarrow.ipc")

PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    pa.string(): st.text(max_size=6),
    pa.large_string(): st.text(max_size=6),
    pa.binary(): st.binary(max_size=6),
    pa.large_binary(): st.binary(max_size=6),
    pa.bool_(): st.booleans(),
    pa.int8(): st.integers(-(2**7), 2**7 - 1),
    pa.int16(): st.integers(-(2**15), 2**15 - 1),
    pa.int32(): st.integers(-(2**31), 2**31 - 1),
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.uint8(): st.integers(0, 2**8 - 1),
    pa.uint16(): st.integers(0, 2**16 - 1),
    pa.uint32(): st.integers(0, 2**32 - 1),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.float32(): st.floats(width=32),
    pa.float64(): st.floats(),
}
# They stand between plain ones; each takes other numbers of nodes and buffers.
OTHERS = {
    pa.null(): st.none(),
    pa.date32(): st.dates(),
    pa.list_(pa.string()): st.lists(st.text(max_size=2), max_size=2),
    pa.list_(pa.int8(), 2): st.just([1, 2]),
    pa.struct({"a": pa.string(), "b": pa.large_list(pa.bool_())}): st.just({"a": "x", "b": []}),
    pa.map_(pa.string(), pa.int32()): st.just([("k", 1)]),
    pa.decimal128(5, 2): st.none(),
    pa.binary(3): st.just(b"abc"),
}


@st.composite
def tables(draw: st.DrawFn) -> tuple[Any, list[str]]:
    """Batches of one schema, some of them slices, and the columns of plain types."""
    kinds = draw(st.lists(st.sampled_from([*PLAIN, *OTHERS, *PLAIN]), min_size=1, max_size=5))
    kinds.append(draw(st.sampled_from([*PLAIN])))
    schema = pa.schema([(f"c{i}", kind) for i, kind in enumerate(kinds)])
    batches = []
    for _ in range(draw(st.integers(1, 3))):
        num_rows = draw(st.integers(0, 12))
        columns = []
        for kind in kinds:
            cell = {**PLAIN, **OTHERS}[kind]
            cell = draw(st.sampled_from([cell, cell | st.none()]))
            cells = draw(st.lists(cell, min_size=num_rows, max_size=num_rows))
            columns.append(pa.array(cells, kind))
        batch = pa.record_batch(columns, schema=schema)
        start = draw(st.integers(0, num_rows))
        batches.append(batch.slice(start, draw(st.integers(0, num_rows - start))))
    batches.append(batch)
    return batches, [field.name for field in schema if field.type in PLAIN]


def write(path: Path, batches: list[Any], new: Any = ipc.new_stream) -> Path:
    with new(str(path), batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return path


@settings(max_examples=30)
@given(tables(), st.randoms(use_true_random=False), st.sampled_from([ipc.new_stream, ipc.new_file]))
def test_values_are_those_of_pyarrow(
    tmp_path_factory: pytest.TempPathFactory, made: tuple[Any, list[str]], random: Any, new: Any
) -> None:
    batches, plain = made
    columns = random.sample(plain, random.randint(1, len(plain)))
    rows = pa.Table.from_batches(batches).select(columns).to_pylist()
    path = write(tmp_path_factory.mktemp("arrow") / "x.arrow", batches, new)
    dataset = Dataset.from_path("a", path, columns=columns)
    if not rows:
        return
    samples = np.array(random.choices(range(len(rows)), k=40))
    with closing(dataset.open(0)) as reader:
        group = reader.group_kind.make(1)
        group.add(0, reader)
        read = group.read(np.zeros(40, np.int64), samples)
        assert [*map(repr, read)] == [repr(rows[i]) for i in samples.tolist()]
        assert [*map(repr, reader.read(samples))] == [*map(repr, read)]


def numbered(start: int, stop: int) -> Any:
    texts = [None if i % 5 == 4 else f"t{i}" for i in range(start, stop)]
    return pa.record_batch({"id": range(start, stop), "text": texts})


def row(i: int) -> dict[str, Any]:
    return {"id": i, "text": None if i % 5 == 4 else f"t{i}"}


def test_shards_of_any_datasets_are_read_in_one_call(tmp_path: Path) -> None:
    readers = []
    for number in range(4):
        start = 100 * number
        batches = [
            numbered(start, start + 7),
            numbered(0, 1).slice(1),
            numbered(start + 7, start + 20),
        ]
        path = write(tmp_path / f"{number}.arrow", batches)
        readers.append(Dataset.from_path(f"d{number}", path).open(0))
    assert len({reader.group_kind for reader in readers}) == 1
    group = readers[0].group_kind.make(9)
    for number, reader in enumerate(readers):
        group.add(2 * number, reader)
    order = np.random.default_rng(0).permutation(80)
    read = group.read(2 * (order // 20), order % 20)
    assert read == [row(100 * (i // 20) + i % 20) for i in order.tolist()]
    group.remove(2)
    readers[1].close()
    read = group.read(np.array([6, 0, 4]), np.array([19, 6, 7]))
    assert read == [row(319), row(6), row(207)]
    for shard, sample in ((2, 0), (0, 20), (0, -1), (1, 0)):
        with pytest.raises(IndexError):
            group.read(np.array([6, shard]), np.array([0, sample]))
    with pytest.raises(DatasetError, match="closed"):
        readers[1].read(np.array([0]))
    for reader in (readers[0], *readers[2:]):
        reader.close()


def test_what_pyarrow_has_to_read_belongs_to_no_group(tmp_path: Path) -> None:
    words = pa.array(["a", "b"])
    columns = {"n": pa.array([[1], [2]]), "text": words, "word": words.dictionary_encode()}
    options = {"compressed": {"options": ipc.IpcWriteOptions(compression="zstd")}}
    for name, chosen, is_by_hand in (
        ("plain", ["text"], True),
        ("nested", ["n", "text"], False),
        ("dictionary", ["text"], False),
        ("compressed", ["text"], False),
    ):
        there = columns if name == "dictionary" else {k: columns[k] for k in ("n", "text")}
        batch = pa.record_batch(there)
        path = tmp_path / f"{name}.arrow"
        with ipc.new_stream(str(path), batch.schema, **options.get(name, {})) as writer:
            writer.write_batch(batch)
        with closing(Dataset.from_path("a", path, columns=chosen).open(0)) as reader:
            assert (getattr(reader, "group_kind", None) is not None) is is_by_hand
            assert [sample["text"] for sample in reader.read(np.array([1, 0]))] == ["b", "a"]


@pytest.mark.parametrize("bad", [-1, 2**31 - 1, 1])
def test_an_offset_that_leads_elsewhere_is_a_bad_record(tmp_path: Path, bad: int) -> None:
    texts = [f"{i}" * 10 for i in range(8)]
    path = write(tmp_path / "x.arrow", [pa.record_batch({"text": texts})])
    content = path.read_bytes()
    offsets = np.arange(0, 90, 10, dtype="<i4")
    assert content.count(offsets.tobytes()) == 1
    damaged = offsets.copy()
    damaged[4] = bad
    path.write_bytes(content.replace(offsets.tobytes(), damaged.tobytes()))
    with closing(Dataset.from_path("a", path).open(0)) as reader:
        group = reader.group_kind.make(1)
        group.add(0, reader)
        with pytest.raises(ValueError, match="offset"):
            group.read(np.zeros(8, np.int64), np.arange(8))
        with pytest.raises(RecordError, match="record 3"):
            reader.read(np.arange(8))
        assert reader.read(np.array([7, 0])) == [{"text": texts[7]}, {"text": texts[0]}]


def test_a_file_that_is_cut_short_while_it_is_open_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "x.arrow", [numbered(0, 5000)])
    with closing(Dataset.from_path("a", path).open(0)) as reader:
        assert reader.read(np.array([4999])) == [row(4999)]
        with path.open("r+b") as file:
            file.truncate(100)
        with pytest.raises(DatasetError, match="cut short"):
            reader.read(np.array([4999]))
