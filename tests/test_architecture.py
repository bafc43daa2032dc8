"""The shape of the package: what may import what, how long a file may be, what is public."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import zephon_torch

ROOT = Path(zephon_torch.__file__).parent
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py"))
MAX_LINES = 400

MAX_FILES = 12  # of a room

# Rooms from the bottom up: a file imports from its own room and from those before it.
ROOMS = [
    "errors.py",
    "version.py",
    "support",
    "arithmetic",
    "io/storage",
    "io/remote",
    "io/index",
    "io/cache",
    "io/codecs",
    "io/formats",
    "io/formats/json",
    "io/formats/tables",
    "io/formats/tar",
    "io/formats/rows",
    "io/formats/mds",
    "io/datasets",
    "io",
    "work/order",
    "work/identity",
    "work/plan",
    "work/sources",
    "work/sharing",
    "work",
    "nodes",
    "engines",
    "bridges",
    "loader/watch",
    "loader",
    "trainers",
    "audit",
    "__main__.py",
    "__init__.py",
]
# The plan and all below it is plain arithmetic: files of work/ that may know torch.
WORK_WITH_TORCH = {
    "work/sources/static_mixture.py",
    "work/sharing/splitter.py",
    "work/sharing/foreign_samplers.py",
    "work/sharing/world.py",
}
FSSPEC_ONLY_IN = {"io/remote/storage.py", "io/cache/shard_cache.py"}
STARTS_THREADS = {
    "engines/engine.py", "engines/worker_side.py", "engines/processes.py", "engines/leash.py",
    "engines/look_ahead.py", "io/datasets/counting.py", "support/waits.py",
}  # fmt: skip
READS_TORCH_DISTRIBUTED = {"work/sharing/world.py"}


def room_of(file: str) -> str:
    """The folder of a file; a file of the package's root is a room of its own."""
    return file.rpartition("/")[0] or file


@cache
def tree_of(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(), file)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imports_at_import_time(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that run with the module: not those in functions or for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        elif is_type_checking(child):
            assert isinstance(child, ast.If)
            for other in child.orelse:
                yield from imports_at_import_time(other)
        else:
            yield from imports_at_import_time(child)


def all_imports(file: str) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node


def names(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Dotted names that a statement may import a module by."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert node.level == 0 and node.module, "imports are absolute"
    return [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]


def file_of(module: str) -> str | None:
    """The package's file behind a dotted name."""
    first, *rest = module.split(".")
    if first != "zephon_torch":
        return None
    for candidate in ("/".join(rest) + ".py", "/".join([*rest, "__init__.py"])):
        if candidate in FILES:
            return candidate
    return None


@cache
def imported_files(file: str) -> frozenset[str]:
    """Files of the package that a file imports at import time."""
    found = set()
    for node in imports_at_import_time(tree_of(file)):
        modules = names(node)
        if isinstance(node, ast.ImportFrom):
            # `from package import name` needs the package, `from package import module` the module
            submodules = [other for name in modules[1:] if (other := file_of(name))]
            found |= set(submodules) or {other for other in [file_of(modules[0])] if other}
        else:
            found |= {other for name in modules if (other := file_of(name))}
    return frozenset(found - {file})


def outside_modules(file: str, *, at_import_time: bool) -> set[str]:
    """Top-level packages, not ours, that a file imports."""
    nodes = imports_at_import_time(tree_of(file)) if at_import_time else all_imports(file)
    return {names(node)[0].split(".")[0] for node in nodes} - {"zephon_torch"}


# --- who imports whom ----------------------------------------------------------------------------


def test_every_room_is_listed_and_small() -> None:
    counts = Counter(room_of(file) for file in FILES)
    assert set(ROOMS) == set(counts)
    files = {room: counts[room] - (f"{room}/__init__.py" in FILES) for room in ROOMS}
    assert {room: number for room, number in files.items() if number > MAX_FILES} == {}


@pytest.mark.parametrize("file", FILES)
def test_a_file_imports_only_from_its_room_and_those_below(file: str) -> None:
    for other in imported_files(file):
        is_below = ROOMS.index(room_of(other)) <= ROOMS.index(room_of(file))
        assert is_below, f"{file} imports {other} from above"


def test_no_two_files_import_each_other_by_any_way_round() -> None:
    order: list[str] = []
    left = {file: set(imported_files(file)) for file in FILES}
    while left:
        free = sorted(file for file, needs in left.items() if not needs)
        assert free, f"a cycle among {sorted(left)}: {left}"
        order += free
        left = {file: needs - set(free) for file, needs in left.items() if file not in free}
    assert [file for file in order if not file.startswith("trainers/")][-1] == "__init__.py"
    assert not imported_files("errors.py") and not imported_files("version.py")


@pytest.mark.parametrize(
    "file", [f for f in FILES if f.startswith(("arithmetic/", "io/", "work/"))]
)
def test_the_plan_and_the_files_know_nothing_of_torch(file: str) -> None:
    found = outside_modules(file, at_import_time=True) & {"torch", "torchdata"}
    assert not found or file in WORK_WITH_TORCH, f"{file} imports {found}"
    if file.startswith("io/"):
        assert "torch" not in outside_modules(file, at_import_time=False)


@pytest.mark.parametrize("file", FILES)
def test_fsspec_is_met_in_one_place(file: str) -> None:
    if file not in FSSPEC_ONLY_IN:
        assert "fsspec" not in outside_modules(file, at_import_time=False)
    assert "fsspec" not in outside_modules(file, at_import_time=True), "imported when needed"


@pytest.mark.parametrize("file", FILES)
def test_threads_and_processes_are_started_in_one_place(file: str) -> None:
    source = (ROOT / file).read_text()
    starts = ("ThreadPoolExecutor(", "ProcessPoolExecutor(", "Thread(", "Process(", ".DataLoader(")
    code = "\n".join(line.split("#")[0] for line in source.splitlines())
    tree = ast.parse(code)
    called = {ast.unparse(node.func) + "(" for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = {call for call in called if call.endswith(starts)}
    assert not found or file in STARTS_THREADS, f"{file} calls {found}"


@pytest.mark.parametrize("file", FILES)
def test_torch_distributed_is_read_in_one_place(file: str) -> None:
    if file in READS_TORCH_DISTRIBUTED:
        return
    for node in imports_at_import_time(tree_of(file)):
        assert not any(name.startswith("torch.distributed") for name in names(node)), file
    attributes = {ast.unparse(n) for n in ast.walk(tree_of(file)) if isinstance(n, ast.Attribute)}
    assert not any(name.startswith("torch.distributed") for name in attributes), file


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", FILES)
def test_a_file_is_short_and_begins_with_what_it_is(file: str) -> None:
    text = (ROOT / file).read_text()
    assert len(text.splitlines()) <= MAX_LINES
    assert ast.get_docstring(tree_of(file)), f"{file} has no docstring"


def functions(file: str) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.FunctionDef):
            yield node


def body_lines(function: ast.FunctionDef) -> int:
    """Lines of a function without its signature and docstring."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]


def test_functions_are_short() -> None:
    lengths = sorted(body_lines(function) for file in FILES for function in functions(file))
    assert lengths[len(lengths) // 2] < 10
    assert lengths[len(lengths) * 9 // 10] < 40


GLOBAL_RANDOM = ("np.random.", "numpy.random.", "random.", "torch.random.")
ALLOWED_RANDOM = {"np.random.Generator", "np.random.Philox", "numpy.random.Generator"}
GLOBAL_TORCH = {
    "torch.manual_seed", "torch.seed", "torch.rand", "torch.randn", "torch.randint",
    "torch.randperm", "torch.initial_seed", "torch.set_rng_state", "torch.default_generator",
}  # fmt: skip


@pytest.mark.parametrize("file", FILES)
def test_no_global_randomness(file: str) -> None:
    for node in ast.walk(tree_of(file)):
        if not isinstance(node, ast.Attribute):
            continue
        name = ast.unparse(node)
        if name in ALLOWED_RANDOM or name in ("np.random", "numpy.random"):
            continue
        assert not name.startswith(GLOBAL_RANDOM), f"{file}:{node.lineno} uses {name}"
        assert name not in GLOBAL_TORCH, f"{file}:{node.lineno} uses {name}"
    assert "random" not in outside_modules(file, at_import_time=False)


# --- what is public ------------------------------------------------------------------------------


def modules() -> list[Any]:
    found = pkgutil.walk_packages([str(ROOT)], "zephon_torch.")
    return [
        importlib.import_module(m.name)
        for m in found
        if not m.name.endswith("__main__") and has_its_framework(m.name)
    ]


def has_its_framework(module: str) -> bool:
    """Whether the trainer that a module subclasses is installed."""
    return module != "zephon_torch.trainers.torchtitan" or (
        importlib.util.find_spec("torchtitan") is not None
    )


@pytest.mark.parametrize("module", ["zephon_torch", "zephon_torch.io", "zephon_torch.work"])
def test_exported_names_exist_and_are_sorted(module: str) -> None:
    loaded = importlib.import_module(module)
    assert list(loaded.__all__) == sorted(set(loaded.__all__))
    for name in loaded.__all__:
        assert getattr(loaded, name) is not None
    public = {
        name
        for name, value in vars(loaded).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__.startswith("zephon_torch")
    }
    assert public <= set(loaded.__all__), "imported in __init__ but not exported"


def test_all_exceptions_are_exported_and_shown_in_the_tree() -> None:
    from zephon_torch import errors

    classes = [value for value in vars(errors).values() if inspect.isclass(value)]
    for cls in classes:
        assert cls.__name__ in zephon_torch.__all__
        assert cls.__name__ in (errors.__doc__ or "")
        assert issubclass(cls, errors.ZephonError | Warning)


def test_all_that_is_public_is_documented() -> None:
    bare = []
    for module in modules():
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != module.__name__:
                continue
            if inspect.isfunction(value) and not inspect.getdoc(value):
                bare.append(f"{module.__name__}.{name}")
            if not inspect.isclass(value):
                continue
            if not value.__doc__:
                bare.append(f"{module.__name__}.{name}")
            bare += [
                f"{module.__name__}.{name}.{method}"
                for method, member in vars(value).items()
                if not method.startswith("_")
                and (inspect.isfunction(member) or isinstance(member, property))
                and not inspect.getdoc(getattr(value, method))
                and not name.startswith("_")
            ]
    assert not bare


# --- what importing costs ------------------------------------------------------------------------

FORMAT_LIBRARIES = {
    "pyarrow", "webdataset", "datasets", "pandas", "fsspec", "tqdm", "zstandard", "aiohttp",
    "requests", "boto3", "s3fs", "h5py", "PIL", "soundfile", "tokenizers", "transformers",
    "matplotlib", "yaml",
}  # fmt: skip


@cache
def loaded_after(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after a statement, beyond those of plain torch."""
    script = (
        "import sys\nimport torch, torch.utils.data, torch.distributed, numpy\n"
        f"before = set(sys.modules)\n{statement}\nprint(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(ROOT.parent), "PATH": ""},
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["zephon_torch.work", "zephon_torch.io", "zephon_torch"])
def test_importing_pulls_in_no_format_library(module: str) -> None:
    found = loaded_after(f"import {module}")
    assert not {name.split(".")[0] for name in found} & FORMAT_LIBRARIES
    if module == "zephon_torch.work":
        assert not any(name.startswith("zephon_torch.io.formats.json.jsonl") for name in found)


def test_importing_adds_little_beyond_torch() -> None:
    found = loaded_after("import zephon_torch")
    others = {name.split(".")[0] for name in found} - {"zephon_torch", "torch", "torchdata"}
    assert not others - set(sys.stdlib_module_names) - {"numpy"}, "third-party packages"
    assert len([name for name in found if name.startswith("torchdata.")]) < 40
