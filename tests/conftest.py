"""Shared test settings: reproducible property tests and the ``--long`` flag."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("zephon", derandomize=True, deadline=None, max_examples=50)
settings.register_profile("long", settings.get_profile("zephon"), max_examples=500)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the full product of long matrices")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("long" if config.getoption("--long") else "zephon")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    skip = pytest.mark.skip(reason="needs --long")
    for item in items:
        if "long" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="module")
def _collections_are_quick() -> None:
    """Leave what is there by now, many libraries in one process, out of garbage collections.

    Tests ask for many of them, each of which would take up to a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards of 7, 30 and 1 records and an empty one."""
    root = tmp_path / "data"
    start = 0
    for name, size in [("a/0", 7), ("a/1", 30), ("b", 0), ("c", 1)]:
        path = root / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"id": start + i}) + "\n" for i in range(size)))
        start += size
    return root
