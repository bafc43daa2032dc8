"""on_error: records that cannot be decoded or transformed, the same on every engine and world."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from toys import ids, write_shards

from zephon_torch import ConfigurationError, DataLoader, RecordError, StaticMixtureWorkSource
from zephon_torch.errors import DatasetError
from zephon_torch.io import Dataset

BAD_LINES = {3, 10, 11}  # ids whose lines are broken
BAD_IDS = {20, 21}  # ids that the transform refuses
NUM = 40
ENGINES: list[dict[str, Any]] = [
    {"num_threads": 0},
    {},
    {"num_threads": 2},
    {"num_workers": 2},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("web")
    for shard in range(2):
        lines = [
            '{"id": broken' if i in BAD_LINES else json.dumps({"id": i})
            for i in range(shard * 20, shard * 20 + 20)
        ]
        (folder / f"{shard}.jsonl").write_text("\n".join(lines))
    return folder


def refuse(sample: dict[str, int]) -> int:
    if sample["id"] in BAD_IDS:
        raise ValueError(f"no use for {sample['id']}")
    return sample["id"]


def ids_only(samples: list[int]) -> list[int]:
    return samples


def loader(folder: Path, on_error: str, **options: Any) -> DataLoader:
    source = StaticMixtureWorkSource(
        [Dataset.from_path("web", folder)], {"web": 1}, seed=5, shuffle_block_size="global"
    )
    defaults: dict[str, Any] = {"batch_size": 4, "transform": refuse, "collate_fn": ids_only}
    return DataLoader(source, **defaults | options, on_error=on_error)  # type: ignore[arg-type]


def batches(loader: DataLoader) -> list[tuple[list[int], list[bool]]]:
    with loader:
        return [(batch, loader.valid.tolist()) for batch in loader]  # type: ignore[union-attr]


GOOD = sorted(set(range(NUM)) - BAD_LINES - BAD_IDS)


def test_raise_is_the_default(folder: Path) -> None:
    with pytest.raises((RecordError, ValueError)):
        batches(loader(folder, "raise"))


@pytest.mark.parametrize("on_error", ["ignore", None, 1])
def test_an_unknown_way_is_refused(folder: Path, on_error: Any) -> None:
    with pytest.raises(ConfigurationError, match=r'on_error is .*"skip"'):
        loader(folder, on_error)


@pytest.mark.parametrize("engine", ENGINES)
def test_skip_gives_each_good_sample_once_and_lists_the_bad(
    folder: Path, engine: dict[str, Any]
) -> None:
    skipping = loader(folder, "skip", **engine)
    seen = batches(skipping)
    assert sorted(x for batch, _ in seen for x in batch) == GOOD
    assert len(seen) == len(skipping) == NUM / 4
    assert seen == batches(loader(folder, "skip", num_threads=0))
    assert (skipping.stats.num_bad, skipping.stats.samples) == (5, len(GOOD))
    said = [f"{bad.where}: {bad.error}" for bad in skipping.stats.bad]
    for line in BAD_LINES:
        assert any(f"0.jsonl, record {line}: RecordError" in text for text in said), line
    assert sum("ValueError: no use for 2" in text for text in said) == 2


@pytest.mark.parametrize("engine", ENGINES)
def test_substitute_keeps_every_batch_whole(folder: Path, engine: dict[str, Any]) -> None:
    seen = batches(loader(folder, "substitute", **engine))
    assert all(len(batch) == 4 and all(valid) for batch, valid in seen)
    assert {x for batch, _ in seen for x in batch} == set(GOOD)
    assert seen == batches(loader(folder, "substitute", num_threads=0))


def test_pointers_name_what_is_in_the_batch(folder: Path) -> None:
    for on_error in ("skip", "substitute"):
        tolerant = loader(folder, on_error)
        for batch in tolerant:
            assert tolerant.pointers is not None
            shard, sample = tolerant.pointers.shard, tolerant.pointers.sample
            assert (shard * 20 + sample).tolist() == batch


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_worlds_and_resumes_see_the_same(folder: Path, on_error: str) -> None:
    whole = batches(loader(folder, on_error, batch_size=8))
    ranks = [
        batches(loader(folder, on_error, rank=r, num_replicas=2, batch_size=4)) for r in range(2)
    ]
    for (batch, _), (left, _), (right, _) in zip(whole, *ranks, strict=True):
        assert batch == left + right
    first = loader(folder, on_error, batch_size=8)
    iterator = iter(first)
    taken = [next(iterator) for _ in range(2)]
    second = loader(folder, on_error, batch_size=8, num_workers=1)
    second.load_state_dict(first.state_dict())
    assert taken + [batch for batch, _ in batches(second)] == [batch for batch, _ in whole]


def test_a_batch_of_bad_records_comes_with_one_substitute_that_is_not_real(folder: Path) -> None:
    source = StaticMixtureWorkSource(
        [Dataset.from_path("web", folder)], {"web": 1}, shuffle_shards=False
    )
    tolerant = DataLoader(source, 2, on_error="skip", collate_fn=ids_only)
    batch = tolerant.batch(5)  # records 10 and 11
    assert len(batch) == 1 and batch[0]["id"] not in BAD_LINES
    seen = [(batch, tolerant.valid.tolist()) for batch in tolerant]  # type: ignore[union-attr]
    assert seen[5] == (batch, [False])
    assert tolerant.stats.samples == NUM - len(BAD_LINES)


def test_nothing_but_bad_records_raises(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{\n[\n")
    for on_error in ("skip", "substitute"):
        tolerant = DataLoader(Dataset.from_path("a", tmp_path), 2, on_error=on_error)  # type: ignore[arg-type]
        with pytest.raises(RecordError) as caught:
            next(iter(tolerant))
        assert "16 samples" in str(caught.value.__notes__)


def refuse_as_image_decoders_do(sample: dict[str, int]) -> int:
    if sample["id"] in BAD_IDS:
        raise OSError("cannot identify image file")
    return sample["id"]


def test_an_os_error_of_a_transform_is_a_bad_record(folder: Path) -> None:
    skipping = loader(folder, "skip", transform=refuse_as_image_decoders_do)
    assert sorted(x for batch, _ in batches(skipping) for x in batch) == GOOD


def test_an_error_of_the_storage_is_raised_always() -> None:
    class Broken:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> int:
            raise OSError("the disk is gone")

    for on_error in ("skip", "substitute"):
        with pytest.raises(OSError, match="the disk is gone"):
            next(iter(DataLoader(Broken(), 2, on_error=on_error)))  # type: ignore[arg-type]


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_bad_record_is_counted_once_also_where_padding_repeats_it(
    tmp_path: Path, on_error: str, engine: dict[str, Any]
) -> None:
    """Nine records, the last one broken, on four ranks: three of them get a copy of it."""
    lines = [json.dumps({"id": i}) for i in range(8)]
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, "{"]))
    notes = []
    for rank in range(4):
        tolerant = DataLoader(
            Dataset.from_path("a", tmp_path), 2, on_error=on_error, collate_fn=ids_only,  # type: ignore[arg-type]
            rank=rank, num_replicas=4, **engine,
        )  # fmt: skip
        for batch in tolerant:
            assert tolerant.pointers is not None and tolerant.valid is not None
            assert [sample for _, _, sample in tolerant.pointers] == ids(batch)
            assert len(tolerant.valid) == len(batch)
        assert tolerant.stats.num_bad == len(tolerant.stats.bad)
        notes += tolerant.stats.bad
    (only,) = notes
    assert only.where.endswith("a.jsonl, record 8")


@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
def test_a_file_that_was_overwritten_is_no_bad_record(tmp_path: Path, part: bool) -> None:
    path = write_shards(tmp_path / "web", [40]) / "00.jsonl"
    dataset = Dataset.from_path("web", path)
    if part:
        dataset = dataset.split({"all": 1.0})["all"]
    with DataLoader(dataset, 4, num_threads=0, on_error="skip") as loader:
        batches = iter(loader)
        next(batches)
        content = path.read_bytes()
        with path.open("r+b") as file:  # in place, as large as it was
            file.write(content.replace(b'"id"', b'"id '))
        with pytest.raises(DatasetError, match=r"00.jsonl' changed since the dataset was made"):
            next(batches)
