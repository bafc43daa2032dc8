"""What an adapter is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.data import Data

WORKERS = ("inline", "1 worker", "2 workers")


class System:
    """A system that is measured: one class a system, importing its package only when used.

    A variant is a dict. Of text: ``format``, ``datasets`` (1, 2 or 20: ``data.mixture`` has their
    weights), ``engine``. Of token rows: ``shards`` and ``engine``.

    Attributes:
        label: name in tables.
        requirement: what pip installs; None if the running interpreter has it.
        packages: distributions whose versions the results tell.
        modules: what a user imports; timed apart.
        note: the order that it gives, and how it is configured.
        formats: of text, the first of which is used for mixtures.
        text_engines, mixture_engines, token_engines: what is measured; () for nothing.
    """

    label: ClassVar[str]
    requirement: ClassVar[str | None] = None
    packages: ClassVar[tuple[str, ...]] = ()
    modules: ClassVar[tuple[str, ...]] = ()
    note: ClassVar[str] = ""
    formats: ClassVar[tuple[str, ...]] = ("jsonl",)
    text_engines: ClassVar[tuple[str, ...]] = WORKERS
    mixture_engines: ClassVar[tuple[str, ...]] = ("inline", "2 workers")
    token_engines: ClassVar[tuple[str, ...]] = ("inline", "2 workers")

    def before_import(self) -> None:
        """Do what has to be done before the modules can be imported."""

    def prepare(self, data: Data, folder: Path) -> None:
        """Write what this system reads, once, outside of timing."""

    def text(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterable[Any]:
        """Return batches of text: lists of 32 dicts with "id" and "text"."""
        raise NotImplementedError

    def tokens(self, variant: dict[str, Any], data: Data, folder: Path) -> Iterable[Any]:
        """Return batches of token rows: int64 tensors [32, 2049]."""
        raise NotImplementedError


def num_workers(variant: dict[str, Any]) -> int:
    """Return the number of worker processes of a variant's engine."""
    engine = str(variant["engine"])
    return int(engine.split()[0]) if engine[0].isdigit() else 0


def same(samples: list[Any]) -> list[Any]:
    """Collate text: leave the list of samples as it is."""
    return samples
