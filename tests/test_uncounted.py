"""Batches for something else than the run: nothing moves, whatever is done with them."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from toys import ENGINES, batches, flat, ids, memory, mixture_of, one, three_in_files

from zephon_torch import ConfigurationError, DataLoader, StateError
from zephon_torch.work.sources.static_mixture import WorkSource

SIZE, EPOCH = 4, 12


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> WorkSource:
    datasets = three_in_files(tmp_path_factory.mktemp("data"))
    return mixture_of(datasets, shuffle_block_size="global", max_samples=46)


def make(source: WorkSource, **options: Any) -> DataLoader:
    return DataLoader(source, batch_size=SIZE, **options)


@pytest.fixture(params=ENGINES.values(), ids=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


def standing(loader: DataLoader) -> tuple[Any, ...]:
    """All that a batch that counts would move."""
    pointers = loader.pointers
    return (
        loader.state_dict(), loader.epoch, loader.delivered, loader.remaining, loader.stats,
        None if pointers is None else [column.tolist() for column in pointers.arrays()],
        None if loader.valid is None else loader.valid.tolist(),
    )  # fmt: skip


def test_in_the_middle_of_a_loop_nothing_moves(engine: dict[str, Any], source: WorkSource) -> None:
    reference = make(source)
    epochs = [batches(reference), batches(reference)]
    with make(source, **engine) as loader:
        seen = []
        for number, batch in enumerate(loader):
            seen.append(ids(batch))
            before = copy.deepcopy(standing(loader))
            assert batches(loader.peek(3)) == epochs[0][number + 1 : number + 4] or number == 11
            if number in (0, 5, 10):
                assert batches(loader.uncounted()) == epochs[0]
                assert batches(loader.uncounted(1)) == epochs[1]
            assert standing(loader) == before
        assert seen == epochs[0]
        assert batches(loader) == epochs[1]


def test_before_between_and_after_loops_they_are_what_comes_next(
    engine: dict[str, Any], source: WorkSource
) -> None:
    reference = make(source)
    epochs = [batches(reference) for _ in range(3)]
    with make(source, **engine) as loader:
        assert batches(loader.peek(2)) == epochs[0][:2] and len(loader.peek(2)) == 2
        assert batches(itertools.islice(loader, 5)) == epochs[0][:5]
        assert loader.delivered == 20
        assert batches(loader.peek(1)) == epochs[0][:1], "the next loop begins the epoch anew"
        loader.load_state_dict(loader.state_dict())
        assert batches(loader.peek(2)) == epochs[0][5:7], "but for a load, which goes on"
        assert len(loader.peek(100)) == 7
        assert batches(loader.peek(100)) == epochs[0][5:]
        assert batches(loader) == epochs[0][5:]
        assert loader.epoch == 1
        assert batches(loader.peek(2)) == epochs[1][:2]
        assert batches(loader.uncounted()) == epochs[1] and len(loader.uncounted()) == EPOCH
        loader.set_epoch(2)
        assert batches(loader.peek(2)) == epochs[2][:2]
        assert batches(loader) == epochs[2]


def test_at_the_last_batch_of_a_loop_the_next_epoch_comes_next(source: WorkSource) -> None:
    loader = make(source)
    loop = iter(loader)
    for _ in range(EPOCH):
        next(loop)
    assert batches(loader.peek(1)) == [ids(loader.batch(0, epoch=1))]
    assert list(loop) == []


def test_one_view_begins_each_time_where_the_run_stands(source: WorkSource) -> None:
    loader = make(source)
    view, epochs = loader.uncounted(), [batches(make(source).uncounted(e)) for e in range(2)]
    assert [batches(view), batches(view)] == [epochs[0]] * 2
    batches(loader)
    assert batches(view) == epochs[1]


def test_several_uncounted_loops_and_a_counted_one_side_by_side(
    engine: dict[str, Any], source: WorkSource
) -> None:
    reference = batches(make(source))
    with make(source, **engine) as loader:
        rows = zip(loader, loader.uncounted(), loader.uncounted(), strict=True)
        for number, row in enumerate(rows):
            assert [ids(batch) for batch in row] == [reference[number]] * 3


def test_training_with_update_bn_trains_every_epoch() -> None:
    """Public report: mosaicml/composer#581."""
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
    loader = DataLoader(
        list(range(40)), 4, shuffle=True, transform=lambda i: torch.tensor([float(i)])
    )
    average = torch.optim.swa_utils.AveragedModel(model)
    trained = []
    while loader.epoch < 4:
        trained.append(flat([int(i) for i in batch] for batch in loader))
        average.update_parameters(model)
        torch.optim.swa_utils.update_bn(loader.uncounted(), average)
    assert [sorted(epoch) for epoch in trained] == [list(range(40))] * 4
    assert average.module[1].num_batches_tracked == 10


@pytest.mark.parametrize("num_workers", [0, 2])
def test_provenance_and_transforms_with_generators_are_those_of_the_run(num_workers: int) -> None:
    def draw(sample: int, rng: Any) -> dict[str, int]:
        return {"id": sample, "drawn": int(rng.integers(1 << 40))}

    options: dict[str, Any] = {
        "batch_size": 4, "transform": draw, "takes_rng": True, "provenance": True,
        "num_workers": num_workers,
    }  # fmt: skip
    loader = DataLoader(one(memory("a", 12), seed=5, shuffle_block_size="global"), **options)

    def values(loop: Any) -> list[Any]:
        return [{key: value.tolist() for key, value in batch.items()} for batch in loop]

    uncounted = values(loader.uncounted())
    assert uncounted == values(loader)
    assert uncounted[0].keys() == {"id", "drawn", "provenance"}


def test_ranks_see_their_own_share() -> None:
    ranks = [DataLoader(range(9), 2, rank=rank, num_replicas=2) for rank in range(2)]
    shares = [batches(loader.uncounted()) for loader in ranks]
    assert shares == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [8]]]
    assert [len(loader.uncounted()) for loader in ranks] == [3, 3]


def test_an_endless_plan_can_be_looked_into() -> None:
    loader = DataLoader(one(memory("a", 5), exhausted_policy="repeat"), batch_size=2)
    assert batches(loader.peek(4)) == [[0, 1], [2, 3], [4, 0], [1, 2]]
    assert len(loader.peek(4)) == 4
    assert batches(itertools.islice(loader.uncounted(), 2)) == [[0, 1], [2, 3]]
    with pytest.raises(TypeError, match="never ends"):
        len(loader.uncounted())


class Fails:
    """Sample 5 cannot be read."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> int:
        if number == 5:
            raise ValueError("sample 5")
        return number


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_threads": 2}], ids=str)
def test_an_error_costs_its_batch_and_no_other(options: dict[str, Any]) -> None:
    loader = DataLoader(Fails(), 3, **options)
    loop = iter(loader.uncounted())
    assert next(loop).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="sample 5"):
        next(loop)
    assert [batch.tolist() for batch in loop] == [[6, 7, 8], [9, 10, 11]]
    assert list(loop) == []


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_threads": 2}], ids=str)
def test_an_interrupt_loses_no_batch(options: dict[str, Any]) -> None:
    loader = DataLoader(range(12), 3, **options)
    loop = iter(loader.uncounted())
    assert next(loop).tolist() == [0, 1, 2]
    run = loop._run

    class Interrupted:
        def __next__(self) -> Any:
            run.__next__()
            raise KeyboardInterrupt

    loop._run = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        next(loop)
    assert [batch.tolist() for batch in loop] == [[3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_closing_the_loader_ends_their_processes_too() -> None:
    loader = DataLoader(range(40), 4, num_workers=2)
    loop = iter(loader.uncounted())
    next(loop)
    workers = loop._engine._running()._workers  # type: ignore[attr-defined]
    assert all(worker.is_alive() for worker in workers)
    loader.close()
    assert not any(worker.is_alive() for worker in workers)
    assert next(loop).tolist() == [4, 5, 6, 7], "it goes on, as a loop does"
    assert pickle.loads(pickle.dumps(DataLoader(list(range(4)), 2).uncounted()._epoch)) is None
    loader.close()


@pytest.mark.parametrize("use", [lambda loader: loader.peek(-1), lambda loader: loader.peek(1.5)])
def test_numbers_that_cannot_be(use: Any) -> None:
    loader = DataLoader(range(4), 2)
    with pytest.raises(ConfigurationError, match="num_batches is"):
        use(loader)
    with pytest.raises(ConfigurationError, match="epoch is -1"):
        loader.uncounted(-1)
    assert batches(loader.peek(0)) == []


def test_a_state_of_another_plan_is_refused_here_too() -> None:
    loader = DataLoader(range(4), 2)
    loader.load_state_dict(DataLoader(range(5), 2).state_dict())
    for view in (loader.uncounted(), loader.peek(1)):
        with pytest.raises(StateError):
            iter(view)


# --- single steps --------------------------------------------------------------------------------


def test_a_step_of_any_epoch_is_computed_directly() -> None:
    loader = DataLoader(list(range(40)), 4, shuffle=True)
    epochs = [batches(loader.uncounted(epoch)) for epoch in range(3)]
    assert len({str(epoch) for epoch in epochs}) == 3
    assert ids(loader.batch(3)) == epochs[0][3]
    assert ids(loader.batch(3, epoch=2)) == epochs[2][3]
    for number, batch in enumerate(loader):
        assert ids(batch) == ids(loader.batch(number, epoch=0)) == epochs[0][number]
        if number < 9:
            assert ids(loader.batch(number)) == epochs[0][number]
        else:
            assert ids(loader.batch(number)) == epochs[1][number], "the last: the next epoch's"
    assert ids(loader.batch(-1, epoch=0)) == epochs[0][9]
    assert batches(loader) == epochs[1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((10,), IndexError, "step 10 of an epoch of 10 steps"),
        ((-11,), IndexError, "step -11 of an epoch of 10 steps"),
        (("3",), ConfigurationError, "step is '3'"),
        ((1.0,), ConfigurationError, "step is 1.0"),
        ((1, -1), ConfigurationError, "epoch is -1"),
        ((1, "last"), ConfigurationError, "epoch is 'last'"),
    ],
)
def test_steps_and_epochs_that_are_none(
    arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        DataLoader(list(range(40)), 4).batch(*arguments)
