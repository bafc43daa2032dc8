"""Under TorchTitan: its trainer resumes at the very next row, on another data-parallel degree."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
import types
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch import Launch, forks
from launching import launch
from torch.distributed.checkpoint.stateful import Stateful
from toys import flat, ids, mixture_of, one, three_in_memory

from zephon_torch import ConfigurationError, DataLoader, RecordError, StateError
from zephon_torch.io import Dataset

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

import tyro
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import Configurable

from zephon_torch import trainers
from zephon_torch.trainers.torchtitan import TitanDataLoader

SCRIPT = Path(__file__).with_name("torchtitan_run.py")
EXAMPLES = Path(__file__).parents[2] / "examples"
INTERVAL = 3


# --- under its trainer ---------------------------------------------------------------------------


def noted(folder: Path, launch: int, world: int) -> list[tuple[int, list[list[int]]]]:
    """(step, ids of each rank) for each batch of a launch."""
    files = [(folder / f"{launch}.{rank}").read_text().splitlines() for rank in range(world)]
    batches = []
    for lines in zip(*(map(json.loads, file) for file in files), strict=True):
        (step,) = {line["step"] for line in lines}
        batches.append((step, [line["ids"] for line in lines]))
    return batches


def test_the_trainer_goes_on_at_the_very_next_row_on_another_degree(tmp_path: Path) -> None:
    """2, 4, 2 and 1 processes; each launch dies some steps after its last checkpoint.

    An epoch has 77 rows and a step 8, so at its end some ranks have fewer rows that count than
    others, or none.
    """
    launches = [(2, 4), (4, 11), (2, 14), (1, 22)]
    words = [str(word) for pair in launches for word in pair]
    launch(forks(), 1, SCRIPT, str(tmp_path), str(INTERVAL), *words)

    loader = DataLoader(mixture_of(three_in_memory(), exhausted_policy="redistribute"))
    expected = flat(ids(batch) for _ in range(3) for batch in loader)
    saved = start = 0
    shares = []
    for number, (world, last_step) in enumerate(launches):
        batches = noted(tmp_path, number, world)
        seen = flat(flat(ranks) for _, ranks in batches)
        assert seen == expected[start : start + len(seen)]
        assert sorted({step for step, _ in batches}) == list(range(saved + 1, last_step + 1))
        saved = last_step // INTERVAL * INTERVAL
        start += sum(len(flat(ranks)) for step, ranks in batches if step <= saved)
        shares += [[len(rank) for rank in ranks] for _, ranks in batches]
    assert start > 2 * 77, "two ends of an epoch were passed"
    assert [2, 2, 1, 0] in shares


def test_the_example_goes_on_with_another_degree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = ""
    for world, steps in [(2, 3), (1, 5)]:
        output = tmp_path / f"output-{world}"
        script, options = EXAMPLES / "torchtitan_dp.py", (tmp_path / "run", steps)
        run = Launch(script, *options, world=world, output=output)
        try:
            run.wait()
        finally:
            run.kill()
        printed += run.printed
    lines = [line for line in printed.splitlines() if line.startswith("step")]

    monkeypatch.syspath_prepend(EXAMPLES)
    from torchtitan_dp import make_source

    batches = islice(DataLoader(make_source(), batch_size=8), 5)
    assert lines == [f"step {step}: {ids(batch)}" for step, batch in enumerate(batches, start=1)]


# --- its protocol --------------------------------------------------------------------------------


def build(config: Any, world: int = 1, rank: int = 0, tokenizer: Any = None) -> TitanDataLoader:
    """As the trainer does, with rows of 3 tokens and 4 of them a batch."""
    return config.build(
        dp_world_size=world,
        dp_rank=rank,
        tokenizer=tokenizer,
        seq_len=2,
        local_batch_size=4,
        snapshot_every_n_steps=100,
    )


def real_ids(batches: Iterable[Any]) -> list[list[int]]:
    """First tokens of the rows that count, by batch."""
    return [
        inputs["input"][(labels != IGNORE_INDEX).all(1), 0].tolist() for inputs, labels in batches
    ]


def thrice(sample: int) -> list[int]:
    return [sample] * 3


def some(number: int, **options: Any) -> Any:
    return TitanDataLoader.Config(dataset=list(range(number)), transform=thrice, **options)


def test_a_batch_has_inputs_positions_and_labels_that_are_one_ahead() -> None:
    array = np.array([4, 5, 6], np.uint16)
    array.flags.writeable = False
    rows = [[1, 2, 3], array, torch.tensor([7, 8, 9], dtype=torch.int32)]
    ((inputs, labels),) = build(TitanDataLoader.Config(dataset=rows, infinite=False))
    assert inputs["input"].tolist() == [[1, 2], [4, 5], [7, 8], [7, 8]]
    assert labels.tolist() == [[2, 3], [5, 6], [8, 9], [IGNORE_INDEX] * 2]
    assert inputs["positions"].tolist() == [[0, 1]] * 4
    tensors = [*inputs.values(), labels]
    assert {tensor.dtype for tensor in tensors} == {torch.int64}
    assert all(tensor.is_contiguous() for tensor in tensors)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_a_validator_sees_each_row_once_on_any_degree(world: int) -> None:
    ranks = [list(build(some(21, infinite=False), world, rank)) for rank in range(world)]
    assert {len(batches) for batches in ranks} == {-(-21 // (4 * world))}
    assert {tuple(labels.shape) for batches in ranks for _, labels in batches} == {(4, 2)}
    steps = zip(*map(real_ids, ranks), strict=True)
    assert flat(flat(step) for step in steps) == list(range(21))


def test_an_infinite_loader_goes_on_with_the_next_epoch() -> None:
    source = mixture_of(three_in_memory(), exhausted_policy="redistribute")
    config = TitanDataLoader.Config(dataset=source, transform=thrice)
    loader, plain = build(config), DataLoader(source, batch_size=4)
    batches = real_ids(islice(loader, 45))
    assert batches == [ids(batch) for _ in range(3) for batch in plain][:45]
    assert (loader.loader.epoch, loader.loader.delivered) == (2, 20)


def test_its_state_is_that_of_the_loader_and_the_same_on_every_rank() -> None:
    two = [build(some(21), 2, rank) for rank in range(2)]
    for loader in two:
        next(iter(loader))
    assert two[0].state_dict() == two[1].state_dict() == two[0].loader.state_dict()
    five = build(some(21), 5, 1)
    five.load_state_dict(two[0].state_dict())
    assert real_ids(islice(five, 1)) == [[11, 12, 13]]
    with pytest.raises(StateError, match="has no 'version'"):
        five.load_state_dict({"dp_rank_0": b"", "world_size": 2})


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ([1, 2], r"shape \(2,\) of int64"),
        ([[1, 2, 3]], r"shape \(1, 3\) of int64"),
        ([1.0, 2.0, 3.0], r"shape \(3,\) of float64"),
        ([True] * 3, r"shape \(3,\) of bool"),
        ({"text": "a"}, r"shape \(\) of object"),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_is_no_row_is_an_error_with_its_shape_and_dataset(
    row: Any, told: str, num_workers: int
) -> None:
    source = one(Dataset.from_samples("web", [[1, 2, 3], row]))
    loader = build(TitanDataLoader.Config(dataset=source, num_workers=num_workers))
    with pytest.raises(RecordError, match=rf"seq_len \+ 1 = 3 .* got {told}") as caught:
        list(islice(loader, 1))
    assert "'web'" in "".join(traceback.format_exception(caught.value))
    loader.close()


def test_a_batch_without_its_bad_rows_has_the_same_shape() -> None:
    rows = [[1] * 3, [2], [3] * 3, [4] * 3]
    config = TitanDataLoader.Config(dataset=rows, on_error="skip", infinite=False)
    ((inputs, labels),) = batches = list(build(config))
    assert real_ids(batches) == [[1, 3, 4]]
    assert inputs["input"].shape == labels.shape == (4, 2)


def test_a_transform_takes_the_trainers_tokenizer_and_a_generator() -> None:
    def rows(sample: int, rng: np.random.Generator, tokenizer: Any) -> list[int]:
        return [tokenizer(sample), int(rng.integers(1 << 30)), 0]

    options = {"transform": rows, "takes_rng": True, "takes_tokenizer": True}
    config = TitanDataLoader.Config(dataset=list(range(8)), infinite=False, **options)
    loops = [list(build(config, tokenizer=lambda sample: 100 + sample)) for _ in range(2)]
    assert [inputs["input"][:, 0].tolist() for inputs, _ in loops[0]] == [
        [100, 101, 102, 103],
        [104, 105, 106, 107],
    ]
    drawn = [torch.cat([inputs["input"][:, 1] for inputs, _ in loop]).tolist() for loop in loops]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 8
    with pytest.raises(ConfigurationError, match="takes_tokenizer=True"):
        build(TitanDataLoader.Config(dataset=[[1, 2, 3]], takes_tokenizer=True))


def test_its_options_are_set_on_the_command_line_and_logged_as_plain_values() -> None:
    config = tyro.cli(TitanDataLoader.Config, default=some(9), args=["--num-workers", "2"])
    assert (config.num_workers, config.dataset) == (2, list(range(9)))
    logged = json.loads(json.dumps(config.to_dict()))
    assert logged["num_workers"] == 2
    assert logged["dataset"] == repr(list(range(9)))


def test_it_is_closed_and_used_again() -> None:
    loader = build(some(21, num_workers=1, infinite=False))
    assert real_ids(islice(loader, 1)) == [[0, 1, 2, 3]]
    loader.close()
    assert flat(real_ids(loader)) == list(range(21))
    loader.close()


def test_its_base_class_is_found_where_later_versions_have_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class LaterBase(Stateful, Configurable):
        @dataclass(kw_only=True, slots=True)
        class Config(Configurable.Config):
            pass

        def close(self) -> None:
            raise NotImplementedError

    later = types.ModuleType("torchtitan.components.data.loader")
    later.BaseDataLoader = LaterBase  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchtitan.components.dataloader", None)
    monkeypatch.setitem(sys.modules, "torchtitan.components.data", types.ModuleType("data"))
    monkeypatch.setitem(sys.modules, later.__name__, later)
    monkeypatch.setattr(trainers, "torchtitan", None)  # is put back with the module
    monkeypatch.delitem(sys.modules, ours := TitanDataLoader.__module__)

    config = importlib.import_module(ours).TitanDataLoader.Config(dataset=[[1, 2, 3]])
    with closing(build(config)) as loader:
        assert isinstance(loader, LaterBase)
        assert real_ids(islice(loader, 2)) == [[1], [1]]
