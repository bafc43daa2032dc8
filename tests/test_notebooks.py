"""The notebooks run to their end, and were committed as they ran."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture
def this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make "python3" the kernel of this very interpreter and checkout; returns its folder."""
    kernel = tmp_path / "jupyter" / "kernels" / "python3"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": command, "display_name": "Python 3", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))  # comes before all other places
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))  # none of the user's start-up files
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = tmp_path / "cwd"
    folder.mkdir()
    return folder


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@each_notebook
def test_notebook_runs_and_prints_what_was_committed(path: Path, this_python: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    committed = printed(notebook)
    run(notebook, this_python)
    assert printed(notebook) == committed, (
        f"it prints something else now: `jupyter execute --inplace {path.relative_to(ROOT)}`"
    )


@each_notebook
def test_notebook_was_run_in_order_and_holds_its_pictures(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert shows_picture(cell) == ("plt.show()" in cell.source), cell.source
    assert any(shows_picture(cell) for cell in cells)


@each_notebook
def test_notebook_is_small_and_of_no_one_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    assert path.stat().st_size < 400_000
    assert notebook.metadata.kernelspec.name == "python3"
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert {output.get("name", "stdout") for output in outputs} == {"stdout"}  # no warnings
    assert not re.search(r"/(home|root|tmp|Users)/", printed(notebook))


def test_kernel_is_this_interpreter(this_python: Path) -> None:
    source = "import sys, zephon_torch; print(sys.executable, zephon_torch.__file__)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    run(notebook, this_python)
    package = ROOT / "zephon_torch" / "__init__.py"
    assert printed(notebook).split() == [sys.executable, str(package)]


OF_A_CELL = """
import torch
from zephon_torch import DataLoader

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, i):
        return i * i

def double(x):
    return 2 * x

def run(dataset, method, **options):
    try:
        loader = DataLoader(
            dataset, 4, num_workers=1, multiprocessing_context=method, **options
        )
        print(method, [batch.tolist() for batch in loader])
    except Exception as error:
        print(method, type(error).__name__, error)
"""


def test_a_class_of_a_cell_must_come_from_a_module(this_python: Path) -> None:
    calls = """
run(Squares(), "fork")
run(list(range(8)), "spawn")
run(Squares(), "forkserver")
run(Squares(), "spawn", transform=double)
"""
    cells = [nbformat.v4.new_code_cell(source) for source in (OF_A_CELL, calls)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    run(notebook, this_python)
    forked, of_builtins, by_server, spawned = printed(notebook).splitlines()
    assert forked == "fork [[0, 1, 4, 9], [16, 25, 36, 49]]"
    assert of_builtins == "spawn [[0, 1, 2, 3], [4, 5, 6, 7]]"
    assert "forkserver WorkerError" in by_server and "dataset 'dataset' needs Squares" in by_server
    assert "spawn WorkerError" in spawned
    assert "transform needs double and dataset 'dataset' needs Squares, which this" in spawned
    for line in (by_server, spawned):
        assert "Put it into a module" in line and "memory" not in line


def run(notebook: Any, folder: Path) -> None:
    """Execute a notebook in place; an error in a cell raises with the cell and its traceback."""
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", resources=place).execute()


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shows_picture(cell: Any) -> bool:
    return any("image/png" in output.get("data", {}) for output in cell.outputs)


def printed(notebook: Any) -> str:
    """What all cells wrote to stdout."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return "".join(output.text for output in outputs if output.get("name") == "stdout")
