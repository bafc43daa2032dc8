"""The loop's iterator goes on at the same batch after the store could not give it."""

from __future__ import annotations

import errno
import os
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stores import WebStore
from toys import ENGINES, one

from zephon_torch import DataLoader, Skippable
from zephon_torch.errors import StateError, StorageError
from zephon_torch.io import Dataset
from zephon_torch.io.cache import shard_cache as cache
from zephon_torch.io.remote import retries
from zephon_torch.nodes.pipeline import make_pipeline
from zephon_torch.work.plan.plan import Pointers
from zephon_torch.work.sharing.items import WorkItem


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_no_batch_is_lost_by_an_outage(
    engine: dict[str, Any], on_error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEPHON_CACHE_DIR", str(tmp_path / "indexes"))
    monkeypatch.setattr(retries, "DELAYS", (0.001,) * 2)
    with WebStore() as store:
        store.files["/x.jsonl"] = "".join(f'{{"id": {i:3}}}\n' for i in range(40)).encode()
        dataset = Dataset.from_path("x", f"{store.url}/x.jsonl")
        options = {"prefetch_factor": 1, "on_error": on_error, "shuffle": True, **engine}
        with DataLoader(dataset, 4, **options) as loader:
            whole = [batch["id"].tolist() for batch in loader]
            for at in (0, 1, 5):
                iterator, seen = iter(loader), []
                seen += [batch["id"].tolist() for batch in islice(iterator, at)]
                store.fault = lambda method, path, count: "503" if method == "GET" else None
                # what was read before the outage still comes
                while True:
                    try:
                        seen.append(next(iterator)["id"].tolist())
                    except StorageError:
                        break
                assert loader.state_dict()["delivered"] == (4 * len(seen) if at else 0) % 40
                with pytest.raises(StorageError):
                    next(iterator)
                store.fault = lambda method, path, count: None
                seen += [batch["id"].tolist() for batch in iterator]
                expected = DataLoader(dataset, 4, shuffle=True)
                epoch = loader.epoch - 1
                assert seen == [
                    expected.batch(step, epoch=epoch)["id"].tolist() for step in range(10)
                ]
            assert sorted(chain(*seen)) == sorted(chain(*whole)) == list(range(40))


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_nor_one_that_is_not_counted(
    engine: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEPHON_CACHE_DIR", str(tmp_path / "indexes"))
    monkeypatch.setattr(retries, "DELAYS", ())
    with WebStore() as store:
        store.files["/x.jsonl"] = "".join(f'{{"id": {i:3}}}\n' for i in range(40)).encode()
        dataset = Dataset.from_path("x", f"{store.url}/x.jsonl")
        with DataLoader(dataset, 4, shuffle=True, prefetch_factor=1, **engine) as loader:
            expected = [loader.batch(step)["id"].tolist() for step in range(10)]
            for view, at in ((loader.uncounted(), 0), (loader.uncounted(), 5), (loader.peek(7), 2)):
                iterator = iter(view)
                seen = [batch["id"].tolist() for batch in islice(iterator, at)]
                store.fault = lambda method, path, count: "503" if method == "GET" else None
                with pytest.raises(StorageError):
                    while True:  # what was read before the outage still comes
                        seen.append(next(iterator)["id"].tolist())
                with pytest.raises(StorageError):
                    next(iterator)
                store.fault = lambda method, path, count: None
                seen += [batch["id"].tolist() for batch in iterator]
                assert seen == expected[: len(view)]
            assert loader.state_dict()["delivered"] == 0


def test_a_bad_record_makes_nobody_wait_for_a_store_that_is_gone() -> None:
    """Its window is read item by item: not with all tries for each."""
    reads = 0

    class Gone:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            nonlocal reads
            reads += 1
            if index == 0:
                raise ValueError("bad")
            raise StorageError("gone")

    dataset = Dataset.from_torch("x", Gone())
    pipeline = make_pipeline(one(dataset), None, False, None, "raise", False, None)
    items = [
        WorkItem(0, i, i + 1, Pointers(*(np.array([n]) for n in (0, 0, i, 0)))) for i in range(8)
    ]
    results = pipeline.read_window(items)
    assert [type(result) for result in results] == [ValueError] + [StorageError] * 7
    assert reads == 3, "of the window, of the bad record, of the first behind it"


def test_a_loop_that_skips_raises_again_what_it_could_not_begin_with() -> None:
    """Not an epoch without batches."""
    loader = DataLoader(list(range(40)), 4)
    next(iter(loader))
    steps = Skippable(loader)
    loader.load_state_dict(loader.state_dict())
    rest = torch.utils.data.DataLoader(
        steps.dataset, batch_sampler=list(islice(steps.batch_sampler, 3, 6)), collate_fn=list
    )
    iterator = iter(rest)
    for _ in range(2):
        with pytest.raises(StateError, match="skips"):
            next(iterator)


@pytest.mark.parametrize("call", ["truncate", "write", "fdatasync", "replace"])
def test_a_full_disk_under_the_cache_costs_no_batch(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever call of the system the disk, or a quota, says it to."""
    monkeypatch.setenv("ZEPHON_CACHE_DIR", str(tmp_path / "indexes"))
    with WebStore() as store:
        store.files["/x.jsonl"] = "".join(f'{{"id": {i:3}}}\n' for i in range(40)).encode()
        dataset = Dataset.from_path("x", f"{store.url}/x.jsonl")
        folder = tmp_path / "copies"
        options = {"cache_dir": folder, "cache_limit": "1MB", "on_error": "skip"}
        with DataLoader(dataset, 4, num_threads=0, **options) as loader:
            iterator = iter(loader)
            with monkeypatch.context() as full:
                full.setattr(cache.os, call, _fail_for_lack_of_space)
                for _ in range(2):
                    with pytest.raises(StorageError, match=f"cache folder '{folder}'.*No space"):
                        next(iterator)
            assert [i for batch in iterator for i in batch["id"].tolist()] == list(range(40))
            assert not loader.stats.num_bad


def _fail_for_lack_of_space(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
