"""The loop's iterator goes on at the same batch after the store could not give it."""

from __future__ import annotations

from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from stores import WebStore
from toys import ENGINES

from zephon_torch import DataLoader
from zephon_torch.errors import StorageError
from zephon_torch.io import Dataset
from zephon_torch.io.remote import retries


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
