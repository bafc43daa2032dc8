"""The suite itself: tests know nothing of each other, in any order, and leave no process behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from configparser import ConfigParser
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from floors import floors
from processes import ROOT, environment, forked, is_running

INI = "[pytest]\npythonpath = {tests}\naddopts = -p no:randomly -p no:cacheprovider -p conftest\n"


def run(
    folder: Path, *options: str, before: Callable[[], object] | None = None, **files: str
) -> subprocess.CompletedProcess[str]:
    """What pytest says of some files, under the settings of this suite."""
    (folder / "pytest.ini").write_text(INI.format(tests=ROOT / "tests"))
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--rootdir", str(folder), *options, str(folder)],
        cwd=folder, env=environment(), capture_output=True, text=True,
        check=False, preexec_fn=before,
    )  # fmt: skip


LEAVES = """
import gc, multiprocessing, os, subprocess, time

here = os.getcwd()

def test_process(tmp_path):
    left = subprocess.Popen(["sleep", "600"])
    (tmp_path.parent / "pid").write_text(str(left.pid))
    left.returncode = 0  # it warns of nothing
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()

def test_environment(tmp_path):
    os.environ["LEFT"] = "1"
    del os.environ["PYTHONPATH"]
    os.chdir(tmp_path)

def test_collection():
    assert not multiprocessing.active_children()
    assert "LEFT" not in os.environ and "PYTHONPATH" in os.environ and os.getcwd() == here
    gc.disable()

def test_nothing():
    gc.enable()
"""


def test_what_a_test_leaves_is_put_back_or_told_and_processes_are_ended(tmp_path: Path) -> None:
    done = run(tmp_path, f"--basetemp={tmp_path / 'temporary'}", "-q", leaves=LEAVES)
    errors = re.findall(r"^E +AssertionError: the test has left (.*)$", done.stdout, re.MULTILINE)
    collection = "changed: garbage collection"
    assert errors == ["processes running", collection, collection], done.stdout
    assert "4 passed, 3 errors" in done.stdout
    assert not is_running(int((tmp_path / "temporary" / "pid").read_text()))


READERS = """
import fsspec, numpy as np, pytest
from zephon_torch.io import Dataset
from zephon_torch.io.formats.tables import table_cache as kept

pa = pytest.importorskip("pyarrow.parquet")
left = []

@pytest.mark.parametrize("first", [True, False])
def test_reader(tmp_path, first):
    assert kept.kept.num_bytes == 0
    assert not fsspec.filesystem("memory").exists("/left")
    import pyarrow
    pa.write_table(pyarrow.table({"a": [1, 2]}), tmp_path / "x.parquet")
    left.append(Dataset.from_path("x", tmp_path).open(0))
    left[-1].read(np.array([0]))
    fsspec.filesystem("memory").pipe("/left", b"1")
    assert kept.kept.num_bytes > 0
"""


def test_readers_that_a_test_leaves_open_are_unknown_to_the_next(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    done = run(tmp_path, "-q", readers=READERS)
    assert "2 passed" in done.stdout, done.stdout


INTERRUPTED = """
import signal, subprocess, sys

SCRIPT = "import time; print('on', flush=True); time.sleep(600)"

def test_it():
    command, pipe = [sys.executable, "-c", SCRIPT], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe) as child:
        child.stdout.readline(1)
        child.send_signal(signal.SIGINT)
        assert b"KeyboardInterrupt" in child.communicate(timeout=60)[1]
"""


def test_ctrl_c_reaches_programs_also_where_the_shell_started_the_suite_in_the_background(
    tmp_path: Path,
) -> None:
    ignores = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    done = run(tmp_path, "-q", before=ignores, interrupted=INTERRUPTED)
    assert "1 passed" in done.stdout, done.stdout


NUMBERED = "import pytest\n@pytest.mark.parametrize('i', range(9))\ndef test_it(i): pass\n"


def test_files_and_tests_come_in_the_order_of_a_seed_and_files_in_one_piece(tmp_path: Path) -> None:
    files = dict.fromkeys("abcdef", NUMBERED)
    orders = []
    for options in ([], ["--shuffle=1"], ["--shuffle=1"], ["--shuffle=2"]):
        listed = run(tmp_path, "-q", "--collect-only", *options, **files).stdout
        orders.append(re.findall(r"^test_(\w)\.py::test_it\[(\d)\]$", listed, re.MULTILINE))
    plain, first, again, other = orders
    assert plain == [(name, str(i)) for name in "abcdef" for i in range(9)]
    assert first == again and len({tuple(order) for order in orders}) == 3
    for order in (first, other):
        assert sorted(order) == plain
        names = [name for name, _ in order]
        assert sum(a != b for a, b in pairwise(names)) == 5
        assert names != sorted(names)


def test_a_child_ends_with_its_block() -> None:
    with pytest.raises(ZeroDivisionError), forked(lambda: os.read(os.pipe()[0], 1)) as child:
        _ = 1 / 0
    assert not is_running(child)


def test_ci_runs_the_command_of_the_readme() -> None:
    (command,) = re.findall(r"&& (pytest .*)$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert command in (ROOT / ".ci" / "run").read_text().splitlines()


def test_every_requirement_has_a_floor_and_stands_once_in_its_list() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    lists = dict(config["options.extras_require"]) | {"": config["options"]["install_requires"]}
    assert floors([])[:2] == ["torch==2.6", "torchdata==0.11"]
    for extra, text in lists.items():
        names = re.findall(r"^([\w-]+)", text, re.MULTILINE)
        assert len(names) == len(set(names)), extra
        if extra not in ("", "dev"):
            pinned = {line.partition("==")[0] for line in floors([extra])}
            assert set(names) <= pinned, extra
