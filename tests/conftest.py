"""Shared test settings: reproducible property tests and the ``--long`` flag."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("zephon", derandomize=True, deadline=None)
settings.load_profile("zephon")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the full product of long matrices")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    skip = pytest.mark.skip(reason="needs --long")
    for item in items:
        if "long" in item.keywords:
            item.add_marker(skip)
