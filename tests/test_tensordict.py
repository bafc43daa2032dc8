"""TensorDicts and dicts by number are map-style datasets, as torch's loader takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.data
from toys import ENGINES

from zephon_torch import ConfigurationError, DataLoader

Torchs = torch.utils.data.DataLoader


def as_it_is(batch: Any) -> Any:
    return batch


@pytest.fixture
def rows() -> Any:
    tensordict = pytest.importorskip("tensordict")
    inner = {"b": torch.arange(30).view(10, 3)}
    return tensordict.TensorDict({"a": torch.arange(10), "inner": inner}, [10])


def values(loop: Any) -> list[Any]:
    return [
        (type(b).__name__, list(b.batch_size), b["a"].tolist(), b["inner", "b"].tolist())
        for b in loop
    ]


@pytest.mark.parametrize(
    "engine", [*ENGINES.values(), {"on_error": "skip"}], ids=[*ENGINES, "tolerant"]
)
@pytest.mark.parametrize("collate_fn", [None, as_it_is])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_tensordict_comes_in_batches_as_from_torch(
    rows: Any, engine: dict[str, Any], collate_fn: Any, drop_last: bool
) -> None:
    with DataLoader(rows, 4, collate_fn=collate_fn, drop_last=drop_last, **engine) as loader:
        expected = values(Torchs(rows, 4, collate_fn=collate_fn, drop_last=drop_last))
        assert values(loader) == expected
        assert expected[0][:2] == ("TensorDict", [4])


def test_shuffled_transformed_and_mixed_they_stay_tensordicts(rows: Any) -> None:
    loader = DataLoader(rows, 4, shuffle=True, transform=as_it_is, collate_fn=as_it_is)
    epoch = values(loader)
    assert sorted(i for batch in epoch for i in batch[2]) == list(range(10))
    assert all(row == [3 * i, 3 * i + 1, 3 * i + 2] for b in epoch for i, row in zip(*b[2:]))  # noqa: B905
    mixed = DataLoader({"x": rows, "y": rows}, 4, mixture={"x": 1, "y": 1}, collate_fn=as_it_is)
    assert values(mixed)[0][:3] == ("TensorDict", [4], [0, 0, 1, 1])
    of_numbers = DataLoader(rows, 4, transform=lambda row: int(row["a"]), collate_fn=as_it_is)
    assert list(of_numbers) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_its_dataset_and_collate_fn_give_them_in_torchs_own_loader(rows: Any) -> None:
    ours = DataLoader(rows, 4, collate_fn=as_it_is)
    theirs: Any = Torchs(ours.dataset, batch_sampler=ours.batch_sampler, collate_fn=ours.collate_fn)
    assert values(theirs) == values(ours)


def test_a_tensorclass_is_taken_too() -> None:
    tensordict = pytest.importorskip("tensordict")

    class Data:
        a: torch.Tensor

    made = tensordict.tensorclass(Data)(torch.arange(8), batch_size=[8])
    for collate_fn in (None, as_it_is):
        batches = list(DataLoader(made, 4, collate_fn=collate_fn))
        theirs = list(Torchs(made, 4, collate_fn=collate_fn))
        assert [(type(b), b.a.tolist()) for b in batches] == [
            (type(b), b.a.tolist()) for b in theirs
        ]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dict_by_number_is_a_dataset(num_workers: int) -> None:
    squares = {i: i * i for i in reversed(range(7))}
    for cls in (Torchs, DataLoader):
        loader: Any = cls(squares, 3, num_workers=num_workers)
        assert [batch.tolist() for batch in loader] == [[0, 1, 4], [9, 16, 25], [36]]
    assert list(DataLoader({0: "x", 1: "y"}, 2)) == [["x", "y"]]


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        ({1: "x", 2: "y"}, {}, r"has the key 1 but not 0: as a dataset it needs the keys 0 to 1"),
        ({(0, 1): "x"}, {}, r"has the key \(0, 1\) but not 0.*list\(samples.values\(\)\)"),
        ({"a": [1]}, {}, r"several datasets \(\['a'\]\) need mixture="),
        ({}, {}, "need mixture="),
        ({0: [1], 1: [2]}, {"mixture": {0: 1, 1: 1}}, "name must be a str"),
    ],
    ids=str,
)
def test_other_mappings_say_what_is_wrong(
    dataset: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DataLoader(dataset, 2, **options)
