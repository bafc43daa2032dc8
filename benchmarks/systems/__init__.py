"""One adapter for each system: how it writes its files, and what a user writes to read them."""

from __future__ import annotations

import importlib

from benchmarks.systems.base import System

NAMES = (  # in the order of tables
    "zephon_torch",
    "limits",
    "torch",
    "stateful",
    "nodes",
    "hf",
    "litdata",
    "grain",
    "webdataset",
    "mds",
    "megatron",
    "energon",
    "zephon",
)
SHORT = ("zephon_torch", "limits", "torch")


def load(name: str) -> System:
    """Return the adapter of that name; its package need not be there."""
    found: System = importlib.import_module(f"benchmarks.systems.{name}").ADAPTER
    return found
