"""Python of README and docs is run, block after block; commands, links and names exist."""

from __future__ import annotations

import doctest
import html
import importlib
import importlib.util
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launch import Launch
from test_architecture import ROOMS

import zephon_torch
import zephon_torch.io
import zephon_torch.work
from zephon_torch import ZephonError
from zephon_torch import errors as errors_module
from zephon_torch.audit import cli

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
    guides = MKDOCS[MKDOCS.index("  - Guides:") : MKDOCS.index("  - Reference:")]
    for page in listed:
        assert f"docs/{page}" in README or page not in guides


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


# --- the site, the picture of rooms, and what the reference must name ----------------------------

SPEC = importlib.util.spec_from_file_location("draw_rooms", ROOT / "docs" / "draw_rooms.py")
assert SPEC is not None and SPEC.loader is not None
draw_rooms = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(draw_rooms)


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "load_state_dict" in (tmp_path / "reference" / "loader" / "index.html").read_text()
    for page in tmp_path.rglob("index.html"):
        shown = html.unescape(re.sub("<[^>]+>", "", page.read_text()))
        assert not re.findall(r":(?:class|func|meth|attr|mod):", shown), page
        if page.parent.name != "contributing":
            assert not re.findall(r"\b[a-z_/]+\.py\b|\bdocs/\w+", shown), page
    assert not (tmp_path / "draw_rooms.py").exists()


def test_ci_builds_the_site_strictly() -> None:
    steps = (ROOT / ".ci" / "run").read_text()
    assert re.search(r"^NO_MKDOCS_2_WARNING=1 mkdocs build --strict ", steps, re.MULTILINE)
    assert "'.[dev,docs]'" in steps


def test_the_picture_of_rooms_is_what_its_script_draws() -> None:
    found = draw_rooms.rooms(ROOT / "zephon_torch")
    drawn = draw_rooms.draw(draw_rooms.reduced(found))
    assert drawn == draw_rooms.PICTURE.read_text(), "run: python docs/draw_rooms.py"
    shown = re.findall(r">([\w/]+)</text>", drawn)
    assert sorted(shown) == sorted(found) == sorted({room for room in ROOMS if "." not in room})


def test_the_page_of_the_picture_says_what_each_room_is_about() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    told = set(re.findall(r"`([\w/]+)`", "".join(re.findall(r"^\| `.*$", page, re.MULTILINE))))
    rooms = {room for room in ROOMS if "." not in room} - {"io", "work"}  # these only export
    assert told <= rooms
    assert {room for room in rooms if not {room, room.rpartition("/")[0]} & told} == set()


def test_a_picture_has_each_room_above_what_it_imports_and_no_arrow_twice(tmp_path: Path) -> None:
    files = {
        "__init__": "", "low/__init__": "", "low/a": "import os", "high/deep/__init__": "",
        "middle/b": "from zephon_torch.low import a\nfrom zephon_torch.middle import c",
        "middle/c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        "    from zephon_torch.high.deep import d\ndef f():\n    import zephon_torch.high.deep.d",
        "high/deep/d": "import zephon_torch.low.a\nif 1:\n    from zephon_torch.middle.b import a",
    }  # fmt: skip
    for name, text in files.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = draw_rooms.rooms(tmp_path)
    assert found == {"low": set(), "middle": {"low"}, "high/deep": {"low", "middle"}}
    assert draw_rooms.levels(found) == {"low": 0, "middle": 1, "high/deep": 2}
    fewer = draw_rooms.reduced(found)
    assert fewer == {"low": set(), "middle": {"low"}, "high/deep": {"middle"}}
    assert draw_rooms.draw(fewer).count('marker-end="') == 2
    with pytest.raises(ValueError, match="import each other"):
        draw_rooms.levels({"a": {"b"}, "b": {"a"}})


def classes(kind: type[BaseException]) -> set[str]:
    """Public classes of the package below a class."""
    found = set()
    for module in pkgutil.walk_packages(zephon_torch.__path__, "zephon_torch."):
        if "trainers.torchtitan" in module.name or module.name.endswith("__main__"):
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, type) and issubclass(value, kind) and not name.startswith("_"):
                found |= {name} if value.__module__.startswith("zephon_torch") else set()
    return found


def test_the_reference_has_every_public_name() -> None:
    shown = set()
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        shown |= set(re.findall(r"^::: [\w.]+\.(\w+)$", page.read_text(), re.MULTILINE))
    public = {*zephon_torch.__all__, *zephon_torch.io.__all__, *zephon_torch.work.__all__}
    assert public - classes(ZephonError) - classes(Warning) - {"__version__"} <= shown


def test_the_page_of_errors_says_of_each_class_what_to_do() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    errors = classes(ZephonError) - {"ZephonError"}
    assert {name for name in sections if name.endswith(("Error", "Mismatch"))} == errors
    for name in errors:
        assert "**Cause.**" in sections[name] and "**What to do.**" in sections[name]
        assert f"| `{name}` | `{getattr(errors_module, name).__bases__[0].__name__}`" in page
    for name, module in re.findall(r"^\| `(\w+Warning)` \| `([\w.]+)` \|", page, re.MULTILINE):
        assert issubclass(getattr(importlib.import_module(module), name), UserWarning)
    assert set(re.findall(r"^\| `(\w+Warning)`", page, re.MULTILINE)) == classes(Warning)


def test_the_page_of_errors_quotes_words_of_the_code() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text()
    sources = [path.read_text() for path in (ROOT / "zephon_torch").rglob("*.py")]
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources))
    quoted = re.findall(r'^\| "([^"]+)" \|', page, re.MULTILINE)
    assert len(quoted) >= 9
    for words in quoted:
        start, _, rest = words.partition("no other rank")
        assert start in code and rest in code, words


def test_the_page_of_the_command_line_has_every_command_option_and_variable() -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    (commands,) = (one for one in cli._parser()._actions if isinstance(one.choices, dict))
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == list(commands.choices)
    for name, parser in commands.choices.items():
        (section,) = re.findall(rf"^## {name}\n(.*?)(?=^## )", page, re.MULTILINE | re.DOTALL)
        options = [one.option_strings[0] for one in parser._actions if one.option_strings]
        described = re.findall(r"^\| `(--\w+)", section, re.MULTILINE)
        assert sorted(described) == sorted(set(options) - {"-h"})
    read = {
        variable
        for path in (ROOT / "zephon_torch").rglob("*.py")
        for variable in re.findall(r'"(ZEPHON_[A-Z_]+)"', path.read_text())
    }
    assert set(re.findall(r"^\| `(ZEPHON_[A-Z_]+)`", page, re.MULTILINE)) == read


def test_the_page_of_states_has_the_keys_and_words_of_a_state() -> None:
    page = (ROOT / "docs" / "reference" / "state.md").read_text()
    state = zephon_torch.DataLoader([1, 2, 3]).state_dict()
    assert re.findall(r"^\| `(\w+)` \| (?:int|str) \|", page, re.MULTILINE) == list(state)
    words = re.findall(r"^\| (\d+)(?: to (\d+))? \|", page, re.MULTILINE)
    counted = [n for start, stop in words for n in range(int(start), int(stop or start) + 1)]
    assert counted == list(range(16))
