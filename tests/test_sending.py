"""Batches on their way from a worker process: what arrives is what was made."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from zephon_torch import DataLoader
from zephon_torch.engines.messages import Parcel, cannot_import

LARGE = (256 << 10) + 1  # bytes; what is smaller travels in the message

DTYPES = [
    value
    for name in sorted(dir(torch))
    if isinstance(value := getattr(torch, name), torch.dtype) and not name.startswith(("q", "bits"))
]


def sent(value: Any) -> Any:
    """What a queue's reader makes of what its writer puts in, within one process."""

    def fail(why: str) -> Any:
        raise AssertionError(why)

    return pickle.loads(pickle.dumps(Parcel(value, fail)))


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape, a.layout) != (b.dtype, b.shape, b.layout):
        return False
    if a.layout is not torch.strided or a.is_quantized:
        return bool(torch.equal(a.to_dense() if a.is_sparse else a, b.to_dense()))
    # bytes, not numbers: nan is nan, and types without == are compared, too
    plain = [t.detach().resolve_conj().resolve_neg() for t in (a, b)]
    flat = [t.contiguous().flatten().view(torch.uint8) for t in plain]
    is_marked = b.is_conj() or b.is_neg()  # made dense by what resolves the mark
    return (is_marked or a.stride() == b.stride()) and torch.equal(*flat)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_of_number(dtype: torch.dtype) -> None:
    values = torch.arange(96, dtype=torch.uint8).view(dtype).reshape(2, -1)
    arrived = sent({"a": values})["a"]
    assert is_same(arrived, values)
    assert not arrived.is_shared()


SHAPES: dict[str, torch.Tensor] = {
    "no dimension": torch.tensor(7.5),
    "no element": torch.empty(0, 3),
    "one": torch.ones(1),
    "three dimensions": torch.arange(24).reshape(2, 3, 4),
    "a part of a larger one": torch.arange(100)[10:20],
    "every other": torch.arange(100)[::2],
    "transposed": torch.arange(6).reshape(2, 3).T,
    "channels last": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "one row shown many times": torch.arange(3).expand(1000, 3),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negative of the imaginary part": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "asks for a gradient": torch.ones(3, requires_grad=True),
    "a parameter": torch.nn.Parameter(torch.ones(3)),
    "sparse": torch.eye(3).to_sparse(),
    "not a number": torch.tensor([float("nan"), -0.0, float("inf")]),
    "exactly the limit": torch.ones(LARGE - 1, dtype=torch.uint8),
    "above the limit": torch.ones(LARGE, dtype=torch.uint8),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own, as it sends one
@pytest.mark.parametrize("tensor", SHAPES.values(), ids=SHAPES)
def test_every_kind_of_tensor(tensor: torch.Tensor) -> None:
    arrived = sent(tensor)
    assert is_same(arrived, tensor)
    assert type(arrived) is type(tensor)
    assert arrived.requires_grad == tensor.requires_grad


def test_an_inference_tensor_arrives_as_one_that_autograd_takes() -> None:
    with torch.inference_mode():
        made = torch.ones(3)
    (torch.nn.Parameter(torch.ones(3)) * sent(made)).sum().backward()


def test_what_arrives_can_be_written_and_outlives_the_message() -> None:
    tensors = [sent(torch.full((5,), i)) for i in range(50)]
    for tensor in tensors:
        tensor += 1
    assert [int(tensor[4]) for tensor in tensors] == list(range(1, 51))


def test_one_tensor_in_two_places_stays_one() -> None:
    tensor = torch.ones(3)
    first, second = sent((tensor, tensor))
    assert first is second


def test_arrays_and_plain_values_beside_tensors() -> None:
    value = {"t": torch.ones(2), "n": np.arange(3, dtype=np.int16), "s": "ö", "b": b"\x00", "f": 1}
    arrived = sent(value)
    assert arrived["n"].dtype == np.int16 and arrived["n"].tolist() == [0, 1, 2]
    assert {k: arrived[k] for k in "sbf"} == {k: value[k] for k in "sbf"}


def test_what_cannot_be_sent_is_replaced_where_it_is_made() -> None:
    told: list[str] = []
    parcel = Parcel(lambda: 0, lambda why: told.append(why) or "instead")  # type: ignore[func-returns-value]
    assert pickle.loads(pickle.dumps(parcel)) == "instead"
    assert "lambda" in told[0]


class Rows:
    """Sample i is a row of `width` bytes of value i."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.width,), index, dtype=torch.uint8)


@pytest.fixture
def kept() -> Iterator[list[torch.Tensor]]:
    batches: list[torch.Tensor] = []
    yield batches
    batches.clear()


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_many_small_batches_are_kept_without_a_descriptor_each(
    kept: list[torch.Tensor], start_method: str
) -> None:
    options = {"num_workers": 1, "multiprocessing_context": start_method}
    with warnings.catch_warnings(), DataLoader(Rows(100), 2, **options) as loader:
        iterator = iter(loader)
        kept.append(next(iterator))
        before = len(os.listdir("/proc/self/fd"))
        kept.extend(iterator)
        assert len(kept) == 100
        assert len(os.listdir("/proc/self/fd")) <= before
    assert [row.tolist() for batch in kept for row in batch] == [[i] * 100 for i in range(200)]


@pytest.mark.parametrize("width", [LARGE // 2 - 50, LARGE // 2, LARGE // 2 + 50])
def test_batches_around_the_limit_arrive_whole(kept: list[torch.Tensor], width: int) -> None:
    with DataLoader(Rows(width), 2, num_workers=2) as loader:
        kept.extend(loader)
    assert all(batch.shape == (2, width) for batch in kept)
    assert [int(row.min()) for batch in kept for row in batch] == list(range(200))
    assert [int(row.max()) for batch in kept for row in batch] == list(range(200))


# --- what a process cannot import -----------------------------------------------------------------


class OfMain:
    """A class of ``__main__``, as far as pickle can tell."""


OfMain.__module__ = "__main__"


@pytest.mark.parametrize("context", ["spawn", "forkserver", multiprocessing.get_context("spawn")])
def test_what_main_defines_is_named_where_main_is_no_file(
    monkeypatch: pytest.MonkeyPatch, context: Any
) -> None:
    main = types.ModuleType("__main__")
    main.__dict__["OfMain"] = OfMain
    monkeypatch.setitem(sys.modules, "__main__", main)
    parts = {"transform": OfMain, "collate_fn": len, "dataset 'a'": [1, {"x": OfMain()}]}
    told = str(cannot_import(parts, context))
    assert told.startswith("transform needs OfMain and dataset 'a' needs OfMain, which this inter")
    assert cannot_import({"transform": len, "dataset 'a'": [1]}, context) is None
    assert cannot_import(parts, "fork") is None
    for place, is_there in ((__file__, True), ("<stdin>", False), ("/no/such/file.py", False)):
        main.__file__ = place
        assert (cannot_import(parts, context) is None) == is_there
