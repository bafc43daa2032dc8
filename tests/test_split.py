"""Parts of a dataset: disjoint, exact, the same everywhere, read like any dataset."""

from __future__ import annotations

import pickle
from contextlib import closing
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import ENGINES, batches, flat, ids, memory, write_shards

from zephon_torch import DataLoader
from zephon_torch.arithmetic.apportion import SplitTree
from zephon_torch.errors import ConfigurationError, RecordError, WorkerError
from zephon_torch.io import Dataset
from zephon_torch.io.datasets.part import BLOCK, sizes_of_parts
from zephon_torch.work import StaticMixtureWorkSource

SIZES = [1, 0, 127, 128, 129, 300, 315]
PARTS = {"train": 0.9, "val": 0.07, "test": 0.03}


def parts_of(dataset: Dataset, **options: Any) -> dict[str, list[Any]]:
    return {part: list(made) for part, made in dataset.split(PARTS, **options).items()}


def read(dataset: Dataset, shard: int, samples: list[int]) -> Any:
    with closing(dataset.open(shard)) as reader:
        return reader.read(np.array(samples, np.int64))


# --- what a split is -----------------------------------------------------------------------------


@settings(max_examples=30)
@given(
    shard_sizes=st.lists(st.integers(0, 300), max_size=6),
    shares=st.lists(st.integers(0, 50), min_size=1, max_size=5).filter(any),
    seed=st.integers(-(2**70), 2**70),
)
def test_parts_are_disjoint_and_everything_together(
    shard_sizes: list[int], shares: list[int], seed: int
) -> None:
    dataset = memory("a", sum(shard_sizes), shard_sizes=shard_sizes)
    fractions = {str(i): Fraction(share, sum(shares)) for i, share in enumerate(shares)}
    parts = dataset.split(fractions, seed=seed)  # type: ignore[arg-type]
    assert list(parts) == list(fractions)
    read_in_order = [list(part) for part in parts.values()]
    assert sorted(flat(read_in_order)) == list(range(len(dataset)))
    for part, share, found in zip(parts.values(), fractions.values(), read_in_order, strict=True):
        assert found == sorted(found), "a part keeps the order of its dataset"
        assert len(found) == len(part)
        assert abs(len(found) - share * len(dataset)) < 1
        for number in range(0, len(part), 25):
            shard, sample = part.shards.locate(number)
            assert (shard, part.record(shard, sample)) == dataset.shards.locate(found[number])


def by_definition(shard_sizes: list[int], sizes: dict[str, int], seed: int) -> dict[str, list[int]]:
    """The definition in ``io/datasets/part.py``, record by record in plain integers."""
    names = sorted(sizes)
    tree = SplitTree([sizes[name] for name in names])
    key = oracle.text_key("zephon_torch/split/1", str(seed), "")
    found: dict[str, list[int]] = {name: [] for name in names}
    start = 0
    for shard, size in enumerate(shard_sizes):
        for block, at in enumerate(range(start, start + size, BLOCK)):
            stop = min(at + BLOCK, start + size)
            before, after = tree.counts(np.array([at, stop])).tolist()
            k = oracle.subkey(oracle.subkey(key, shard), block)
            ordered = sorted(range(stop - at), key=lambda i: (oracle.mix((k + i) % 2**64) >> 39, i))
            for name, low, high in zip(names, before, after, strict=True):
                chosen, ordered = ordered[: high - low], ordered[high - low :]
                found[name] += [at + i for i in sorted(chosen)]
        start += size
    return found


def test_parts_are_those_of_the_definition() -> None:
    dataset = memory("a", 1000, shard_sizes=SIZES)
    expected = by_definition(SIZES, {"train": 900, "val": 70, "test": 30}, seed=3)
    assert parts_of(dataset, seed=3) == expected


PINNED = [107, 128, 205, 296, 418, 635, 684, 687, 829, 997]
PINNED_FINGERPRINT = "e94d4e31b409f3e4091fa966ea976c19d653b51e3daf35d7643890ebeadb1614"


def test_parts_are_pinned() -> None:
    made = memory("a", 1000, shard_sizes=SIZES).split({"train": 990, "val": 10})
    assert list(made["val"]) == PINNED
    assert made["val"].fingerprint == PINNED_FINGERPRINT


def test_seed_decides_and_name_and_order_of_parts_do_not() -> None:
    dataset = memory("a", 1000, shard_sizes=SIZES)
    first = parts_of(dataset, seed=1)
    turned = {part: PARTS[part] for part in reversed(PARTS)}
    assert parts_of(memory("b", 1000, shard_sizes=SIZES), seed=1) == first
    assert {p: list(d) for p, d in dataset.split(turned, seed=1).items()} == first
    other = parts_of(dataset, seed=2)
    assert all(other[part] != first[part] for part in PARTS)
    assert parts_of(dataset) == parts_of(dataset, seed=0)


def test_every_stretch_gives_its_share_to_each_part() -> None:
    dataset = memory("a", 100_000, shard_sizes=[40_000, 3, 59_997])
    for part, found in parts_of(dataset).items():
        for stop in range(BLOCK, 40_000, 7 * BLOCK):
            assert abs(np.searchsorted(found, stop) - PARTS[part] * stop) < 3


def test_which_records_of_a_block_are_chosen_is_spread_over_all_of_it() -> None:
    val = memory("a", 128_000).split({"train": 0.99, "val": 0.01})["val"]
    counts = np.bincount(np.array(list(val)) % BLOCK, minlength=BLOCK)
    assert counts.sum() == 1280 and counts.min() >= 1 and counts.max() <= 25  # 10 on average


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({"a": 0.5, "b": 0.5}, [6, 5]),  # a tie goes to the first name
        ({"b": 0.5, "a": 0.5}, [6, 5]),
        ({"a": 0.1, "b": 0.2, "c": 0.7}, [1, 2, 8]),
        ({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, [4, 4, 3]),
        ({"a": 1.0, "b": 0.0}, [11, 0]),
        ({"a": 1.0}, [11]),
        ({"a": 0, "b": 11}, [0, 11]),
        ({"a": np.int64(3), "b": np.int32(8)}, [3, 8]),
        ({"a": np.float32(0.5), "b": 0.5}, [6, 5]),
    ],
)
def test_sizes_are_rounded_by_largest_remainder(parts: Any, expected: list[int]) -> None:
    assert list(sizes_of_parts("x", parts, 11).values()) == expected
    made = memory("x", 11, shard_sizes=[4, 7]).split(parts)
    assert [len(made[part]) for part in sorted(made)] == expected
    assert sorted(flat(made.values())) == list(range(11))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "parts of dataset 'x' must be a mapping like"),
        ([0.9, 0.1], "parts of dataset 'x' must be a mapping like"),
        ({"a": 0.9}, "parts of dataset 'x' sum to 0.9: fractions must sum to 1"),
        ({"a": 0.9, "b": 0.2}, "parts of dataset 'x' sum to 1.1: fractions must sum to 1"),
        ({"a": 5, "b": 5}, "parts of dataset 'x' sum to 10 samples, but it has 11"),
        ({"a": 1.5, "b": -0.5}, "part 'b' of dataset 'x' is -0.5: expected a fraction"),
        ({"a": float("nan")}, "part 'a' of dataset 'x' is nan"),
        ({"a": "1"}, "part 'a' of dataset 'x' is '1'"),
        ({"a": True}, "part 'a' of dataset 'x' is True"),
        ({"": 1.0}, "the name of a part of dataset 'x' must be a str, not empty, got ''"),
        ({1: 1.0}, "the name of a part of dataset 'x' must be a str, not empty, got 1"),
    ],
)
def test_what_is_no_split_is_refused(parts: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        memory("x", 11).split(parts)
    with pytest.raises(ConfigurationError, match=r"seed is 0\.5: expected an integer"):
        memory("x", 11).split({"a": 1.0}, seed=0.5)  # type: ignore[arg-type]


def test_too_many_samples_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"'x' has 140,737,488,355,328 samples: more than"):
        sizes_of_parts("x", {"a": 1.0}, 1 << 47)


# --- what a part is ------------------------------------------------------------------------------


def test_a_part_is_described_like_a_dataset() -> None:
    parts = memory("web", 1000, shard_sizes=SIZES).split(PARTS)
    assert repr(parts["val"]) == "Dataset('web/val', memory, 7 shards, 70 samples)"
    assert parts["val"].shard_path(3) == "web[3]"
    together = sum(part.shard_num_samples for part in parts.values())
    assert np.asarray(together).tolist() == SIZES


def test_fingerprint_tells_parent_part_sizes_and_seed() -> None:
    def make(
        name: str = "a", size: int = 1000, part: str = "val", val: float = 0.1, seed: int = 0
    ) -> str:
        parts = memory(name, size).split({"train": 1 - val, "val": val}, seed=seed)
        return parts[part].fingerprint

    made = [make(), make("b"), make(size=1001), make(part="train"), make(val=0.2), make(seed=1)]
    assert len(set(made)) == 6
    assert make() == made[0]


def test_random_access_equals_sequential_reading(tmp_path: Path) -> None:
    dataset = Dataset.from_path("web", write_shards(tmp_path / "web", SIZES))
    for part in dataset.split(PARTS).values():
        expected = ids(list(part))
        order = np.random.Generator(np.random.Philox(1)).permutation(len(part))[:50]
        assert ids([part[i] for i in order]) == [expected[i] for i in order]
        start = int(part.shard_num_samples[:6].sum())
        numbers = [3, 0, 3, 1]
        assert ids(read(part, 6, numbers)) == [expected[start + i] for i in numbers]
        assert len(read(part, 6, [])) == 0


def test_one_call_for_a_whole_shard_equals_many() -> None:
    """More blocks than are ordered at once, the last of them short."""
    made = memory("a", 600 * BLOCK + 5).split(PARTS)["train"]
    numbers = list(range(len(made)))
    assert read(made, 0, numbers) == list(made)
    assert read(made, 0, numbers[::-1]) == list(made)[::-1]


def test_numbers_outside_of_a_part_are_refused(tmp_path: Path) -> None:
    dataset = Dataset.from_path("web", write_shards(tmp_path / "web", [50, 50]))
    parts = dataset.split({"train": 0.9, "val": 0.1, "none": 0.0})
    for part, size in (("train", 45), ("val", 5), ("none", 0)):
        for number in (size, -1):
            with pytest.raises(RecordError, match=rf"'web/{part}', shard .*01.jsonl has no record"):
                read(parts[part], 1, [0, number] if size else [number])


def test_messages_name_the_real_record(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "web", [200])
    lines = (folder / "00.jsonl").read_text().splitlines()
    parts = {"train": 0.9, "val": 0.1}
    bad = memory("web", 200).split(parts)["val"].record(0, 7)
    lines[bad] = "{" + lines[bad]
    (folder / "00.jsonl").write_text("\n".join(lines) + "\n")
    val = Dataset.from_path("web", folder).split(parts)["val"]
    message = rf"dataset 'web/val', file '.*00.jsonl', line {bad + 1} \(record {bad}\)"
    with pytest.raises(RecordError, match=message):
        val[7]
    loader = DataLoader(val, batch_size=4, on_error="skip", seed=1)
    seen = flat(batches(loader))
    assert len(seen) == 19 and bad not in seen
    ((place, _),) = [(entry.where, entry.error) for entry in loader.stats.bad]
    assert f"dataset 'web/val', shard {folder}/00.jsonl, record {bad}" == place


def test_a_dataset_that_runs_dry_is_named_by_its_real_record() -> None:
    class Dry:
        def __len__(self) -> int:
            return 100

        def __getitem__(self, number: int) -> int:
            return next(iter(()))

    val = Dataset.from_torch("dry", Dry()).split({"train": 0.9, "val": 0.1})["val"]
    with (
        DataLoader(val, batch_size=2, num_threads=0) as loader,
        pytest.raises(WorkerError, match=rf"'dry/val', shard dry\[0\], record {val.record(0, 0)}:"),
    ):
        next(iter(loader))


def test_a_part_can_be_split_again() -> None:
    dataset = memory("a", 1000, shard_sizes=SIZES)
    train = dataset.split(PARTS)["train"]
    halves = train.split({"x": 0.5, "y": 0.5})
    assert halves["x"].name == "a/train/x"
    assert sorted(flat(halves.values())) == list(train)
    inside = train.split(PARTS)  # the same parts and seed, one level deeper
    assert list(inside["train"].split({"x": 0.5, "y": 0.5})["x"]) != list(halves["x"])
    shard, sample = halves["y"].shards.locate(400)
    start = int(dataset.shards.stops[shard]) - SIZES[shard]
    assert start + halves["y"].record(shard, sample) == halves["y"][400]


def test_parts_can_be_pickled_and_are_small() -> None:
    parts = memory("a", 10**9, shard_sizes=[10**5] * 10**4).split({"t": 0.99, "v": 0.01})
    content = pickle.dumps(parts)
    assert len(content) < 500_000  # three columns of 10,000 shards
    copies = pickle.loads(content)
    for part, made in parts.items():
        assert copies[part].fingerprint == made.fingerprint
        assert copies[part][12_345_678 % len(made)] == made[12_345_678 % len(made)]


@pytest.mark.parametrize("part", ["t", "v"])
def test_a_trillion_samples_in_one_shard(part: str) -> None:
    class Numbers:
        def __len__(self) -> int:
            return 10**12

        def __getitem__(self, number: int) -> int:
            return number

    whole = Dataset.from_torch("big", Numbers())
    made = whole.split({"t": 0.99, "v": 0.01})
    assert len(made[part]) == {"t": 99, "v": 1}[part] * 10**10
    spots = [0, 1, 5 * 10**9, len(made[part]) - 2, len(made[part]) - 1]
    found = [made[part][spot] for spot in spots]
    share = len(made[part]) / 10**12
    assert found == sorted(set(found))
    assert all(abs(value - spot / share) < 2 * BLOCK / share for value, spot in
               zip(found, spots, strict=True))  # fmt: skip


# --- where parts are used ------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_a_mixture_of_parts_reads_the_same_on_every_engine(
    tmp_path: Path, engine: dict[str, Any]
) -> None:
    web = Dataset.from_path("web", write_shards(tmp_path / "web", [90, 70]))
    parts = {"train": 0.8, "val": 0.2}
    train, val = web.split(parts).values()
    numbers = [{"id": 1000 + i} for i in range(100)]
    code, _ = Dataset.from_samples("code", numbers).split(parts).values()
    source = StaticMixtureWorkSource(
        [train, code],
        {"web/train": 2, "code/train": 1},
        seed=3,
        shuffle_block_size="global",
        exhausted_policy="redistribute",
    )
    with DataLoader(source, batch_size=8, num_threads=0) as loader:
        expected = batches(loader)
    assert sorted(flat(expected)) == sorted(ids([*train, *code]))
    assert not set(flat(expected)) & set(ids(list(val)))
    with DataLoader(source, batch_size=8, **engine) as loader:
        assert batches(loader) == expected
