"""Python of README and docs is run, block after block; commands, links and names exist."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest
from launch import Launch

import zephon_torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
MKDOCS = (ROOT / "mkdocs.yml").read_text()
DOCS = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "reference").glob("*.md")])
FORMATS = sorted((ROOT / "docs" / "formats").glob("*.md"))


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_python_blocks_of_the_readme_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "readme"}
    for number, block in enumerate(blocks("python")):
        exec(compile(block, f"README.md, Python block {number}", "exec"), namespace)
    printed = capsys.readouterr().out
    assert printed == "0 320\n"


WITH_PYTHON = [page for page in DOCS if blocks("python", page.read_text())]

# in a process of its own, because gloo's threads may abort a Python that is shutting down
ONE_RANK = """
import os, sys
import torch.distributed

os.chdir(sys.argv[1])
torch.distributed.init_process_group("gloo")
namespace = {"__name__": "docs"}
for number in range(int(sys.argv[2])):
    block = open(f"{number}.py").read()
    exec(compile(block, f"Python block {number}", "exec"), namespace)
print("done", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_python_blocks_of_the_docs_run_in_order(page: Path, tmp_path: Path) -> None:
    """Under a process group of one rank; what a page shows as text is printed."""
    found = blocks("python", page.read_text())
    for number, block in enumerate(found):
        (tmp_path / f"{number}.py").write_text(block)
    (script := tmp_path / "one_rank.py").write_text(ONE_RANK)
    launch = Launch(script, tmp_path, len(found), world=1, output=tmp_path / "output")
    try:
        launch.wait()
    finally:
        launch.kill()
    assert launch.printed.endswith("done\n"), launch.printed
    for shown in blocks("text", page.read_text()):
        assert shown in launch.printed, launch.printed


@pytest.mark.parametrize("page", FORMATS, ids=lambda page: page.name)
def test_python_blocks_of_the_formats_run_and_print_what_they_say(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "docs"}
    found = blocks("python", page.read_text())
    for number, block in enumerate(found):
        exec(compile(block, f"{page.name}, Python block {number}", "exec"), namespace)
    printed = capsys.readouterr().out.splitlines()
    promised = re.findall(r"print\(.*\)  # (.*)$", "\n".join(found), re.MULTILINE)
    assert found and len(printed) == len(promised)
    for line, expected in zip(printed, promised, strict=True):
        assert re.fullmatch(re.escape(expected).replace(re.escape("..."), ".*"), line)


def test_every_page_stands_in_the_navigation_and_every_guide_in_the_readme() -> None:
    listed = re.findall(r"^ +- [^:]+: ([\w/]+\.md)$", MKDOCS, re.MULTILINE)
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in DOCS + FORMATS]
    assert sorted(listed) == sorted(pages)
    for page in pages:
        if not page.startswith("reference/") and page != "glossary.md":
            assert f"docs/{page}" in README


def test_the_readme_is_short_and_its_links_lead_to_what_exists() -> None:
    assert len(README.splitlines()) <= 170
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (ROOT / link).exists(), link


SOURCES = re.compile(r"\b(?:zephon_torch|benchmarks|tests)/[\w/]+\.py|\bsetup\.cfg\b")


@pytest.mark.parametrize("page", DOCS + FORMATS, ids=lambda page: page.name)
def test_no_page_sends_a_reader_into_the_source(page: Path) -> None:
    """Contributing alone is about the source."""
    if page.name != "contributing.md":
        assert not SOURCES.findall(page.read_text())
    files = re.findall(r"`docs/[\w/]+\.md`", page.read_text())
    assert not files, "a link, in place of the name of a file"


def test_shell_blocks_of_the_readme_name_what_exists() -> None:
    commands = blocks("bash")
    assert len(commands) == 2
    assert "examples/train_mixture.py" in commands[0]
    assert "pytest" in commands[1]
    for path in re.findall(r"`?((?:docs|examples|tests|notebooks|benchmarks)/[\w./]+\w)`?", README):
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
