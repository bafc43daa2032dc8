"""DataLoader: its arguments, lengths, single steps, batches, and what torch code finds in it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data
from toys import as_list, batches, flat, ids, memory, mixture_of, one, three_in_memory

from zephon_torch import ChunkSplitter, DataLoader
from zephon_torch.errors import ConfigurationError, DatasetError, WorkerError, WorldError
from zephon_torch.io import Dataset


class Squares(torch.utils.data.Dataset[int]):
    """A map-style torch dataset."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index**2


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))


# --- arguments -----------------------------------------------------------------------------------


def test_torchs_arguments_stand_in_torchs_order() -> None:
    def arguments(cls: Any) -> list[inspect.Parameter]:
        return list(inspect.signature(cls.__init__).parameters.values())[1:]

    torchs, ours = arguments(torch.utils.data.DataLoader), arguments(DataLoader)
    positional = [p.name for p in torchs if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    assert {p.name for p in torchs} <= {p.name for p in ours}
    defaults = {p.name: p.default for p in ours}
    assert all(defaults[p.name] == p.default for p in torchs if p.name != "dataset")


def test_it_is_used_like_torchs_loader() -> None:
    dataset = Squares(10)
    theirs = torch.utils.data.DataLoader(dataset, 4, False, None, None, 0, None, False, True)
    ours = DataLoader(dataset, 4, False, None, None, 0, None, False, True)
    assert isinstance(ours, torch.utils.data.DataLoader)
    assert batches(ours) == batches(theirs)
    assert len(ours) == len(theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": [0, 1]}, "the plan is the sampler"),
        ({"batch_sampler": [[0], [1]]}, "use batch_size="),
        ({"generator": torch.Generator()}, "use seed="),
        ({"in_order": False}, "speed of the workers"),
        ({"batch_size": None}, "use batch_size=1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": -2}, "batch_size is -2"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"batch_size": 2, "global_batch_size": 4}, "give one of batch_size and global_batch_size"),
        ({"global_batch_size": 0}, "global_batch_size is 0"),
        ({"lanes": 0}, "lanes is 0"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"num_workers": 1.5}, "num_workers is 1.5"),
        ({"num_threads": -1}, "num_threads is -1"),
        ({"num_workers": 1, "num_threads": 2}, "processes or threads"),
        ({"prefetch_factor": 0}, "prefetch_factor is 0"),
        ({"takes_rng": True}, "give transform="),
        ({"mixture": {"b": 1}}, "'a'"),
    ],
)
def test_arguments_that_cannot_work_say_what_to_do(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DataLoader(memory("a", 8), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle": True}, "shuffle=True.*shuffle_shards="),
        ({"shuffle": False}, "shuffle=False"),
        ({"seed": 1}, "seed=1"),
        ({"mixture": {"a": 1}}, "mixture="),
    ],
)
def test_a_work_source_has_its_own_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DataLoader(one(memory("a", 8)), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "give both"),
        ({"rank": 2, "num_replicas": 2}, "rank 2"),
        ({"global_batch_size": 5, "rank": 0, "num_replicas": 2}, "5.*2 ranks.*4 or 6"),
    ],
)
def test_a_world_that_does_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(WorldError, match=message):
        DataLoader(memory("a", 8), **options)


def test_what_can_only_be_iterated_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Stream is an IterableDataset.*map-style"):
        DataLoader(Stream())
    with pytest.raises(ConfigurationError, match="__getitem__"):
        DataLoader(iter(range(3)))
    with pytest.raises(ConfigurationError, match="IterableDataset"):
        DataLoader({"a": Stream()}, mixture={"a": 1})


@pytest.mark.parametrize("total", [0, 3])
def test_an_epoch_without_any_batch_is_refused_with_its_sizes(total: int) -> None:
    with pytest.raises(ConfigurationError, match=r"no samples at all|3 samples.* 4 "):
        len(DataLoader(memory("a", total), batch_size=4, drop_last=True))


# --- what it takes -------------------------------------------------------------------------------


def test_without_shuffle_a_dataset_comes_as_stored() -> None:
    dataset = memory("a", 10, shard_sizes=[3, 0, 7])
    for shuffle in (None, False):
        assert flat(batches(DataLoader(dataset, batch_size=3, shuffle=shuffle))) == [*range(10)]


def test_shuffle_is_over_everything_new_each_epoch_and_depends_on_the_seed() -> None:
    def epochs(seed: int | None) -> list[list[int]]:
        loader = DataLoader(Squares(100), batch_size=10, shuffle=True, seed=seed)
        return [flat(batches(loader)) for _ in range(2)]

    first, second = epochs(7)
    assert sorted(first) == sorted(second) == [i * i for i in range(100)]
    assert first != second
    assert [first, second] == epochs(7)
    assert epochs(8)[0] != first
    assert epochs(None) == epochs(0)


def test_a_mapping_of_datasets_is_a_mixture() -> None:
    given = {"squares": Squares(30), "files": memory("files", 10, 5000), "list": [7000, 7001]}
    loader = DataLoader(given, batch_size=5, mixture={"squares": 6, "files": 3, "list": 1})
    assert [dataset.name for dataset in loader.datasets] == ["files", "list", "squares"]
    seen = flat(batches(loader))
    assert set(seen) >= {7000, 7001, *range(5000, 5010)}


def test_a_mapping_needs_weights_and_true_names() -> None:
    with pytest.raises(ConfigurationError, match="need mixture="):
        DataLoader({"a": Squares(3)})
    with pytest.raises(ConfigurationError, match="'x' whose own name is 'a'"):
        DataLoader({"x": memory("a", 3)}, mixture={"x": 1})
    with pytest.raises(ConfigurationError, match="'b'"):
        DataLoader({"a": Squares(3)}, mixture={"a": 1, "b": 1})
    with pytest.raises(ConfigurationError):
        DataLoader({}, mixture={})


def test_plain_lists_and_torch_datasets_are_taken_as_they_are() -> None:
    assert batches(DataLoader([5, 6, 7], batch_size=2)) == [[5, 6], [7]]
    tensors = torch.utils.data.TensorDataset(torch.arange(5), torch.arange(5) * 10)
    loader = DataLoader(tensors, batch_size=2)
    assert [[a.tolist(), b.tolist()] for a, b in loader][1] == [[2, 3], [20, 30]]


# --- lengths -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "batch_size"), [*product([1, 7, 8, 9, 64], [1, 4, 10])])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_lengths_are_what_is_yielded(
    total: int, batch_size: int, drop_last: bool, num_replicas: int
) -> None:
    def make(rank: int) -> DataLoader:
        return DataLoader(
            memory("a", total), batch_size, drop_last=drop_last, rank=rank,
            num_replicas=num_replicas,
        )  # fmt: skip

    if drop_last and total < batch_size * num_replicas:
        with pytest.raises(ConfigurationError, match=f"{total} samples"):
            make(0)
        return
    seen: list[int] = []
    for rank in range(num_replicas):
        loader = make(rank)
        expected = len(loader)
        loop = iter(loader)
        for done in range(expected):
            assert loader.remaining == expected - done if done else expected
            batch = ids(next(loop))
            assert loader.valid is not None and len(batch) == len(loader.valid)
            seen += [i for i, real in zip(batch, loader.valid.tolist(), strict=True) if real]
        assert next(loop, None) is None
        assert len(loader) == loader.remaining == expected
    assert len(seen) == len(set(seen))
    lost = total - len(seen)
    assert lost == (total % (batch_size * num_replicas) if drop_last else 0)


def test_an_endless_plan_has_no_length() -> None:
    loader = DataLoader(mixture_of(three_in_memory(), exhausted_policy="repeat"), batch_size=4)
    with pytest.raises(TypeError, match="max_samples="):
        len(loader)
    with pytest.raises(TypeError, match="never ends"):
        len(loader.dataset)
    assert loader.remaining == math.inf
    assert len(ids(loader.batch(10**12))) == 4
    assert len(ids(next(iter(loader)))) == 4


# --- single steps --------------------------------------------------------------------------------


def test_any_step_is_computed_directly_and_moves_nothing() -> None:
    source = mixture_of(three_in_memory(), shuffle_block_size="global")
    loader = DataLoader(source, batch_size=4)
    state = loader.state_dict()
    n = len(loader)
    looked = {step: ids(loader.batch(step)) for step in (n - 1, 0, 5, -1, -n)}
    assert loader.state_dict() == state
    reference = batches(loader)
    assert looked == {step: reference[step] for step in looked}
    assert ids(loader.batch(0)) != reference[0], (
        "steps are those of the current epoch, now the next"
    )


def test_looking_at_a_step_does_not_disturb_a_running_loop() -> None:
    reference = batches(DataLoader(mixture_of(three_in_memory()), batch_size=4))
    loader = DataLoader(mixture_of(three_in_memory()), batch_size=4, num_threads=1)
    seen = []
    for batch in loader:
        seen.append(ids(batch))
        assert ids(loader.batch(2)) == reference[2] or loader.epoch == 1
    assert seen == reference


@pytest.mark.parametrize("step", [20, -21, 10**9])
def test_a_step_outside_of_the_epoch(step: int) -> None:
    loader = DataLoader(memory("a", 80), batch_size=4)
    with pytest.raises(IndexError, match=f"step {step} "):
        loader.batch(step)


# --- the batch in hand ---------------------------------------------------------------------------


def test_pointers_say_where_the_batch_in_hand_came_from() -> None:
    loader = DataLoader(mixture_of(three_in_memory()), batch_size=4, num_threads=2)
    assert loader.pointers is None
    for batch in loader:
        assert loader.pointers is not None
        found = [loader.datasets[dataset][sample] for dataset, _, sample in loader.pointers]
        assert ids(batch) == found


@pytest.mark.parametrize("engine", [{}, {"num_threads": 2}, {"num_workers": 1}])
def test_provenance_comes_with_the_batch_when_asked_for(
    folder: Path, engine: dict[str, Any]
) -> None:
    source = one(Dataset.from_path("web", folder), seed=1, shuffle_block_size="global")
    with DataLoader(source, batch_size=5, provenance=True, **engine) as loader:
        seen = []
        for batch in loader:
            assert batch["provenance"].dtype is torch.int64
            where = batch["provenance"].tolist()
            assert loader.pointers is not None and [tuple(w) for w in where] == [*loader.pointers]
            web = loader.datasets[0]
            before = np.cumsum([0, *web.shard_num_samples])
            assert [int(before[shard]) + sample for _, shard, sample in where] == ids(batch)
            seen += ids(batch)
    assert sorted(seen) == list(range(38))


@pytest.mark.parametrize(
    ("collate_fn", "message"),
    [
        (list, "the batch is a list: make dicts"),
        (lambda samples: {"provenance": 1}, "the key 'provenance', which the batch has already"),
    ],
)
def test_provenance_needs_a_place_to_go(collate_fn: Any, message: str) -> None:
    with pytest.raises(WorkerError, match=message):
        next(iter(DataLoader([1, 2, 3], batch_size=2, collate_fn=collate_fn, provenance=True)))


def test_a_copy_of_its_attributes_has_no_pointers_of_another_batch() -> None:
    assert not {"pointers", "valid"} & vars(DataLoader(range(4))).keys()


def test_padding_is_marked_and_the_structure_of_a_batch_never_changes() -> None:
    """21 ids in global batches of 16: the last one holds 5."""
    loaders = [
        DataLoader(memory("a", 21), batch_size=4, rank=rank, num_replicas=4) for rank in range(4)
    ]
    last, real = [], []
    for loader in loaders:
        *_, batch = loader
        assert loader.valid is not None and loader.valid.dtype is torch.bool
        assert batch.shape == loader.valid.shape == (2,)
        last.append(batch.tolist())
        real += batch[loader.valid].tolist()
    assert sorted(real) == [16, 17, 18, 19, 20]
    assert set(flat(last)) == set(real), "padding repeats real samples"


def test_a_short_batch_of_one_rank_is_short() -> None:
    loader = DataLoader(memory("a", 10), batch_size=4)
    *_, last = loader
    assert last.tolist() == [8, 9]
    assert loader.valid is not None and loader.valid.tolist() == [True, True]


def test_a_sum_over_the_valid_samples_is_exact_on_any_world() -> None:
    for num_replicas in (1, 2, 3, 4, 6):
        total = 0
        for rank in range(num_replicas):
            loader = DataLoader(
                memory("a", 101), global_batch_size=12, rank=rank, num_replicas=num_replicas
            )
            for batch in loader:
                total += int(batch[loader.valid].sum())
        assert total == sum(range(101))


def test_valid_belongs_to_the_caller() -> None:
    loader = DataLoader(memory("a", 21), batch_size=8, rank=0, num_replicas=2)
    *_, _ = loader
    assert loader.valid is not None
    loader.valid[:] = False
    *_, _ = loader
    assert loader.valid.tolist() != [False] * len(loader.valid)


# --- collate -------------------------------------------------------------------------------------


def test_a_collate_fn_always_gets_a_list() -> None:
    seen = []

    def collate(samples: Any) -> Any:
        seen.append(type(samples))
        return samples

    loader = DataLoader(memory("a", 5), batch_size=2, collate_fn=collate)
    assert list(loader) == [[0, 1], [2, 3], [4]]
    assert seen == [list] * 3


def test_without_one_torchs_default_is_used() -> None:
    samples = [{"id": i, "x": np.full(2, i, np.float32), "name": str(i)} for i in range(4)]
    (batch,) = DataLoader(samples, batch_size=4)
    assert batch["id"].tolist() == [0, 1, 2, 3]
    assert batch["x"].shape == (4, 2) and batch["x"].dtype is torch.float32
    assert batch["name"] == ["0", "1", "2", "3"]


def test_datasets_with_different_keys_are_named() -> None:
    given: Mapping[str, Any] = {
        "web": Dataset.from_samples("web", [{"text": 1, "url": 2}] * 4),
        "code": Dataset.from_samples("code", [{"text": 1}] * 4),
    }
    loader = DataLoader(given, batch_size=4, mixture={"web": 1, "code": 1})
    with pytest.raises(DatasetError, match=r"'code' \['text'\].*'web' \['text', 'url'\]") as caught:
        next(iter(loader))
    assert "collate_fn" in str(caught.value)
    alike = DataLoader(
        given, batch_size=4, mixture={"web": 1, "code": 1}, transform=lambda sample: sample["text"]
    )
    assert len(list(alike)) == 2


def test_different_keys_are_fine_for_a_collate_fn() -> None:
    loader = DataLoader(
        {"a": [{"x": 1}] * 2, "b": [{"y": 1}] * 2},
        batch_size=4, mixture={"a": 1, "b": 1}, collate_fn=as_list,
    )  # fmt: skip
    assert len(next(iter(loader))) == 4


@pytest.mark.parametrize("num_threads", [0, 1, None])
def test_stop_iteration_in_collate_is_an_error(num_threads: int | None) -> None:
    def collate(samples: list[int]) -> int:
        return next(i for i in samples if i > 5)

    loader = DataLoader(memory("a", 12), batch_size=4, collate_fn=collate, num_threads=num_threads)
    with loader, pytest.raises(WorkerError, match="collate_fn raised StopIteration"):
        list(loader)


# --- what torch code finds -----------------------------------------------------------------------


def test_its_attributes_are_true() -> None:
    loader = DataLoader(memory("a", 46), batch_size=4, drop_last=True, rank=1, num_replicas=2)
    assert isinstance(loader.batch_sampler, ChunkSplitter)
    assert loader.sampler is loader.batch_sampler
    assert (loader.batch_size, loader.drop_last, loader.num_workers) == (4, True, 0)
    assert len(loader.dataset) == 46
    assert len(loader.batch_sampler) == len(loader) == 5
    assert loader._is_accelerate_prepared and loader.use_stateful_dataloader


def test_the_batch_size_of_a_rank_follows_from_the_global_one() -> None:
    loader = DataLoader(memory("a", 46), global_batch_size=8, rank=1, num_replicas=2)
    assert len(loader) == 6
    assert loader.batch_size == 4


def test_ranks_have_even_batches_whatever_a_trainer_sets() -> None:
    ranks = [DataLoader(range(9), 2, rank=rank, num_replicas=2) for rank in range(2)]
    for loader in ranks:
        # what Accelerator.join_uneven_inputs does, where processes train on several GPUs
        assert loader.batch_sampler.even_batches is True  # type: ignore[union-attr]
        loader.batch_sampler.even_batches = False  # type: ignore[union-attr]
    assert [batches(loader) for loader in ranks] == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [8]]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_its_dataset_and_batch_sampler_give_its_batches_in_torchs_own_loader(
    num_workers: int,
) -> None:
    def tagged(sample: int, rng: np.random.Generator) -> tuple[int, int]:
        return sample, int(rng.integers(1 << 40))

    ours = DataLoader(
        mixture_of(three_in_memory()), batch_size=4, transform=tagged, takes_rng=True,
        rank=1, num_replicas=2, lanes=2,
    )  # fmt: skip
    theirs = torch.utils.data.DataLoader(
        ours.dataset,
        batch_sampler=ours.batch_sampler,
        collate_fn=ours.collate_fn,
        num_workers=num_workers,
    )
    assert len(theirs) == len(ours)

    def epoch(loader: Any) -> list[Any]:
        return [[column.tolist() for column in batch] for batch in loader]

    for number in range(2):
        ours.set_epoch(number)
        expected = epoch(ours)
        ours.set_epoch(number)
        assert epoch(theirs) == expected


def test_the_samplers_set_epoch_is_the_loaders() -> None:
    loader = DataLoader(memory("a", 40), batch_size=4, shuffle=True)
    loader.batch_sampler.set_epoch(3)  # type: ignore[union-attr]
    assert loader.epoch == 3
    assert batches(loader)[0] == ids(
        DataLoader(memory("a", 40), batch_size=4, shuffle=True)
        ._pipeline(
            loader.batch_sampler.item(0, 3)  # type: ignore[union-attr]
        )
        .data
    )


def test_what_it_says_of_itself() -> None:
    assert "40 positions" in repr(DataLoader(memory("a", 40), batch_size=4))


def test_a_list_of_datasets_is_a_mixture_by_their_names() -> None:
    a, b = Dataset.from_samples("a", range(6)), Dataset.from_samples("b", range(10, 13))
    sizes = {"a": 6, "b": 3}
    listed = batches(DataLoader([b, a], 4, mixture=sizes))
    assert listed == batches(DataLoader({"a": a, "b": b}, 4, mixture=sizes))
    assert sorted(flat(listed)) == [*range(6), *range(10, 13)]  # each once, by these weights
    with pytest.raises(ConfigurationError, match=r"several datasets .*'a', 'b'.* need mixture="):
        DataLoader([a, b])
    with pytest.raises(ConfigurationError, match=r"two datasets .* one name: \['a', 'a'\]"):
        DataLoader([a, a], mixture=sizes)
