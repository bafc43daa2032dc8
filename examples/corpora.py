r"""Two corpora of real text that every machine with Python and PyTorch has.

``code`` is Python's own standard library. ``prose`` is what people wrote for people: descriptions,
licences and documentation of the installed packages, and the docstrings of their modules. Both are
cut into pieces that fit the model's context and written once, as folders of JSONL shards::

    {"corpus": "code", "id": 17, "text": "import abc\n...", "source": "abc.py"}

What is installed decides what they hold, so they belong to one machine and are written once: a run
that resumes must find the files it began with.
"""

from __future__ import annotations

import ast
import importlib.metadata
import itertools
import json
import shutil
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

MAX_PIECE_BYTES = 192  # a piece fits the default context: nothing that is read is thrown away
MAX_SOURCE_BYTES = 8 << 10  # of one file, so that a corpus holds a bit of everything
MAX_PACKAGE_BYTES = 64 << 10  # of one package, for the same reason
SHARD_SIZES = (997, 1_511, 613, 2_003, 1_249)  # records a shard, in turn: uneven on purpose
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "__pycache__"}
DOCUMENT_NAMES = ("LICENSE", "LICENCE", "COPYING", "NOTICE", "README", "AUTHORS", "CHANGELOG")
DOCUMENT_SUFFIXES = {".md", ".rst"}

Source = tuple[str, str]  # where a text comes from, and the text


def write_corpora(folder: Path, *, max_bytes: int) -> dict[str, Path]:
    """Write each corpus that ``folder`` lacks; returns their paths by name."""
    makers = {"code": standard_library, "prose": package_prose}
    for name, sources in makers.items():
        if not (folder / name).exists():
            write_corpus(folder, name, sources(), max_bytes=max_bytes)
    return {name: folder / name for name in makers}


def write_corpus(folder: Path, name: str, sources: Iterable[Source], *, max_bytes: int) -> None:
    """Write one corpus beside its final place and move it there when it is whole."""
    partial = folder / f"{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # what a killed run left
    partial.mkdir(parents=True)
    records = numbered_records(name, sources, max_bytes=max_bytes)
    for shard, size in enumerate(itertools.cycle(SHARD_SIZES)):
        lines = [json.dumps(record) + "\n" for record in itertools.islice(records, size)]
        if not lines:
            break
        (partial / f"shard-{shard:05d}.jsonl").write_text("".join(lines), encoding="utf-8")
    partial.replace(folder / name)


def numbered_records(
    corpus: str, sources: Iterable[Source], *, max_bytes: int
) -> Iterator[dict[str, Any]]:
    """Yield the different pieces of ``sources`` as records, up to ``max_bytes`` of text."""
    seen: set[str] = set()
    num_bytes = 0
    for source, text in sources:
        for piece in pieces(text):
            if num_bytes >= max_bytes:
                return
            if piece in seen:  # most packages carry the same few licences
                continue
            yield {"corpus": corpus, "id": len(seen), "text": piece, "source": source}
            seen.add(piece)
            num_bytes += len(piece.encode())


def pieces(text: str) -> Iterator[str]:
    """Cut a text at line ends into pieces of at most ``MAX_PIECE_BYTES``; no blank pieces."""
    piece = b""
    for line in text.encode()[:MAX_SOURCE_BYTES].splitlines(keepends=True):
        if len(piece) + len(line) > MAX_PIECE_BYTES:
            yield from decoded(piece)
            piece = b""
        piece += line[:MAX_PIECE_BYTES]
    yield from decoded(piece)


def decoded(piece: bytes) -> Iterator[str]:
    text = piece.decode(errors="ignore")  # a cut may split a character
    if text.strip():
        yield text


def standard_library() -> Iterator[Source]:
    """Yield Python's standard library, file by file, without its tests."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in python_files(root):
        yield str(path.relative_to(root)), read(path)


def package_prose() -> Iterator[Source]:
    """Yield the prose of each installed package, then the standard library's docstrings."""
    distributions = {d.metadata["Name"]: d for d in importlib.metadata.distributions()}
    for _, distribution in sorted(distributions.items()):
        yield from limited(distribution_prose(distribution), max_bytes=MAX_PACKAGE_BYTES)
    for source, text in standard_library():
        yield source, docstrings(text)


def distribution_prose(distribution: importlib.metadata.Distribution) -> Iterator[Source]:
    """Yield one package's description, then its documents, then its docstrings."""
    name = distribution.metadata["Name"]
    yield f"{name}: description", str(distribution.metadata.get_payload())
    files = sorted(distribution.files or [], key=str)
    for file in filter(is_document, files):
        yield f"{name}: {file}", read(Path(str(file.locate())))
    for file in files:
        if file.suffix == ".py" and not SKIPPED_FOLDERS & set(file.parts):
            yield f"{name}: {file}", docstrings(read(Path(str(file.locate()))))


def limited(sources: Iterable[Source], *, max_bytes: int) -> Iterator[Source]:
    """Yield the first sources, until they hold ``max_bytes``."""
    num_bytes = 0
    for source, text in sources:
        if num_bytes >= max_bytes:
            return
        yield source, text
        num_bytes += min(len(text), MAX_SOURCE_BYTES)


def is_document(path: importlib.metadata.PackagePath) -> bool:
    return path.stem.upper().startswith(DOCUMENT_NAMES) or path.suffix in DOCUMENT_SUFFIXES


def docstrings(code: str) -> str:
    """Return the docstrings in a piece of Python, one after the other; none if it is broken."""
    try:
        with warnings.catch_warnings(action="ignore"):  # old escape sequences in others' code
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return ""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, documented))
    return "\n\n".join(filter(None, found))


def python_files(root: Path) -> list[Path]:
    """List the Python files below ``root`` in the order of their names, without tests."""
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    return [root / path for path in sorted(paths) if not SKIPPED_FOLDERS & set(path.parts)]


def read(path: Path) -> str:
    """Return a file's text; nothing if it is gone, as listed files of a package may be."""
    try:
        return path.read_text(encoding="utf-8", errors="ignore")
    except OSError:
        return ""
