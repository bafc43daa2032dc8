"""The README's Python is run, block after block; its shell commands name things that exist."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest

import zephon_torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_python_blocks_of_the_readme_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "readme"}
    for number, block in enumerate(blocks("python")):
        exec(compile(block, f"README.md, Python block {number}", "exec"), namespace)
    printed = capsys.readouterr().out
    assert "0 320" in printed
    for table in blocks("text"):
        assert table in printed


def test_shell_blocks_of_the_readme_name_what_exists() -> None:
    commands = blocks("bash")
    assert len(commands) == 2
    assert "examples/train_mixture.py" in commands[0]
    assert "pytest" in commands[1]
    for path in re.findall(r"`?((?:examples|tests|notebooks|benchmarks)/[\w./]+\w)`?", README):
        assert (ROOT / path).exists(), path


def test_quickstart_is_short() -> None:
    assert len(blocks("python")[1].strip().splitlines()) <= 20


MODULES = [
    module.name
    for module in pkgutil.walk_packages(zephon_torch.__path__, "zephon_torch.")
    if ">>>" in Path(importlib.util.find_spec(module.name).origin).read_text()  # type: ignore[union-attr, arg-type]
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_are_true(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.attempted > 0
    assert results.failed == 0
