"""Shared test settings: reproducible property tests, any order, and no trace of other tests."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest
from hypothesis import settings
from processes import children_of_this, is_running, is_service

from zephon_torch.support.lru import Recent

settings.register_profile("zephon", derandomize=True, deadline=None, max_examples=50)
settings.register_profile("long", settings.get_profile("zephon"), max_examples=500)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the full product of long matrices")
    parser.addoption(
        "--shuffle", type=int, metavar="SEED", help="shuffle the files, and the tests of each file"
    )


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("long" if config.getoption("--long") else "zephon")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what ends with &
        signal.signal(signal.SIGINT, signal.default_int_handler)  # else children ignore it, too


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--shuffle")
    if seed is not None:
        items[:] = shuffled(items, random.Random(seed))
    if config.getoption("--long"):
        return
    skip = pytest.mark.skip(reason="needs --long")
    for item in items:
        if "long" in item.keywords:
            item.add_marker(skip)


def shuffled(items: list[pytest.Item], rng: random.Random) -> list[pytest.Item]:
    """All tests, files still in one piece; the same order in all processes of a run."""
    files = [list(tests) for _, tests in groupby(items, key=lambda item: item.path)]
    rng.shuffle(files)
    for tests in files:
        rng.shuffle(tests)
    return [test for tests in files for test in tests]


@pytest.fixture(autouse=True, scope="session")
def _own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Indexes and decoded files that stand beside no shard: not those of earlier runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEPHON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="module")
def _collections_are_quick() -> None:
    """Leave what is there by now, many libraries in one process, out of garbage collections.

    Tests ask for many of them, each of which would take up to a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_trace_of_other_tests() -> Iterator[None]:
    """Begin with empty tables; undo or tell what the test, or a library in it, leaves changed.

    The environment and the working folder are put back; libraries set variables when imported.
    """
    forget()
    processes, before = children_of_this(), surroundings()
    variables, working_folder = dict(os.environ), os.getcwd()
    yield
    os.chdir(working_folder)
    restore_environment(variables)
    if left_running(processes):
        gc.collect()  # an iterator with worker processes, held by the traceback of its error
    deadline = time.monotonic() + 10  # some are just ending
    while (left := left_running(processes)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in left:
        os.kill(process, signal.SIGKILL)
    for child in multiprocessing.active_children():  # which keeps a list of its own
        if child.pid in left:
            child.join()
    for process in left:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process, 0)
    assert not left, "the test has left processes running"
    after = surroundings()
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    assert not changed, f"the test has left changed: {', '.join(changed)}"


def left_running(before: set[int]) -> set[int]:
    """Processes that were not there before, live, and are not for all tests."""
    new = children_of_this() - before
    return {process for process in new if is_running(process) and not is_service(process)}


def forget() -> None:
    """Empty the tables of open readers, this thread's and all threads', and memory://."""
    for name, module in list(sys.modules.items()):
        if name.startswith("zephon_torch."):
            for table in vars(module).values():
                if isinstance(table, Recent):
                    Recent.__init__(table)
                elif isinstance(table, WeakValueDictionary):
                    table.clear()
    if in_memory := sys.modules.get("fsspec.implementations.memory"):
        in_memory.MemoryFileSystem.store.clear()
        in_memory.MemoryFileSystem.pseudo_dirs[:] = [""]


def restore_environment(variables: dict[str, str]) -> None:
    """Put back all variables but pytest's own, which says what is running."""
    for name in os.environ.keys() | variables.keys():
        if not name.startswith("PYTEST_") and os.environ.get(name) != variables.get(name):
            os.environ.pop(name, None)
            if name in variables:
                os.environ[name] = variables[name]


def surroundings() -> dict[str, Any]:
    """What a test may change for itself alone, and has to put back."""
    dist = sys.modules.get("torch.distributed")
    return {
        "handler of SIGINT": signal.getsignal(signal.SIGINT),
        "handler of SIGTERM": signal.getsignal(signal.SIGTERM),
        "garbage collection": gc.isenabled(),
        "sys.path": list(sys.path),
        "process group": dist is not None and dist.is_available() and dist.is_initialized(),
    }


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
