"""Draws which room of the package imports which, from the code, as docs/rooms.svg.

Usage: python docs/draw_rooms.py

A room is a folder of files. It stands one level above the highest room that it imports. The picture
leaves out arrows that follow from a longer way, and the files of the package's own folder.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "zephon_torch"
PICTURE = ROOT / "docs" / "rooms.svg"
BOX_WIDTH, BOX_HEIGHT, GAP, LEVEL_HEIGHT, MARGIN = 132, 30, 16, 64, 14
COLOURS = {"io": "#e3f0e1", "work": "#e1eaf7", "loader": "#fbeedb", "": "#eeeeee"}

Rooms = dict[str, set[str]]


def main() -> None:
    """Write the picture."""
    PICTURE.write_text(draw(reduced(rooms(PACKAGE))))


def rooms(package: Path) -> Rooms:
    """Return the rooms that each room imports, itself left out."""
    found: Rooms = {}
    for path in sorted(package.rglob("*.py")):
        room = path.parent.relative_to(package).as_posix()
        if room != ".":
            here = found.setdefault(room, set())
            here.update(_room(package, module) for module in _imports(ast.parse(path.read_text())))
    return {room: needs - {room, "."} for room, needs in found.items()}


def _imports(node: ast.AST) -> Iterator[str]:
    """Dotted names, below the package, of what is imported when the module is."""
    for child in ast.iter_child_nodes(node):
        is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_typing:
            continue
        if isinstance(child, ast.ImportFrom) and child.module:
            names = [f"{child.module}.{alias.name}" for alias in child.names]
        elif isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        else:
            yield from _imports(child)
            continue
        yield from (name[13:] for name in names if name.startswith("zephon_torch."))


def _room(package: Path, module: str) -> str:
    """The folder of the file behind a dotted name: of its longest part that is a file."""
    parts = module.split(".")
    while parts:
        path = package.joinpath(*parts)
        if path.with_suffix(".py").is_file():
            return path.parent.relative_to(package).as_posix()
        if (path / "__init__.py").is_file():
            return path.relative_to(package).as_posix()
        parts.pop()
    return "."


def levels(found: Mapping[str, set[str]]) -> dict[str, int]:
    """Return the level of each room: 0 for those that import none."""
    known: dict[str, int] = {}
    while len(known) < len(found):
        free = [room for room in found if room not in known and found[room] <= known.keys()]
        if not free:
            raise ValueError(f"rooms import each other: {sorted(set(found) - known.keys())}")
        known |= {
            room: 1 + max((known[other] for other in found[room]), default=-1) for room in free
        }
    return known


def reduced(found: Mapping[str, set[str]]) -> Rooms:
    """Return the same without what follows from the rest."""
    below: Rooms = {}
    for room in sorted(found, key=levels(found).__getitem__):
        below[room] = found[room].union(*(below[other] for other in found[room]))
    return {
        room: {one for one in needs if not any(one in below[other] for other in needs)}
        for room, needs in found.items()
    }


def _places(found: Mapping[str, set[str]]) -> dict[str, tuple[float, float]]:
    """Return the middle of each box; in a level, rooms stand near those that they import."""
    level = levels(found)
    rows = [sorted(r for r in found if level[r] == n) for n in range(max(level.values()) + 1)]
    width = max(map(len, rows)) * (BOX_WIDTH + GAP) - GAP + 2 * MARGIN
    places: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        xs = {room: [places[other][0] for other in found[room]] or [0.0] for room in row}
        row.sort(key=lambda room, xs=xs: (sum(xs[room]) / len(xs[room]), room))
        left = (width - len(row) * (BOX_WIDTH + GAP) + GAP) / 2
        y = MARGIN + (len(rows) - 1 - number) * LEVEL_HEIGHT + BOX_HEIGHT / 2
        for index, room in enumerate(row):
            places[room] = left + index * (BOX_WIDTH + GAP) + BOX_WIDTH / 2, y
    return places


def draw(found: Mapping[str, set[str]]) -> str:
    """Return the picture as SVG."""
    places = _places(found)
    width = max(x for x, _ in places.values()) + BOX_WIDTH / 2 + MARGIN
    height = max(y for _, y in places.values()) + BOX_HEIGHT / 2 + MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        'font-family="sans-serif" font-size="12" text-anchor="middle">',
        '<defs><marker id="tip" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L6 3L0 6z" fill="#667"/></marker></defs>',
        f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
    ]
    lines += [_arrow(places[room], places[one]) for room in found for one in sorted(found[room])]
    lines += [_box(room, *place) for room, place in places.items()]
    return "\n".join([*lines, "</svg>\n"])


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    (x, y), (to_x, to_y) = start, end
    y, to_y = y + BOX_HEIGHT / 2, to_y - BOX_HEIGHT / 2
    bend = (to_y - y) / 2
    return (
        f'<path d="M{x:g} {y:g}C{x:g} {y + bend:g} {to_x:g} {to_y - bend:g} {to_x:g} {to_y:g}" '
        'fill="none" stroke="#667" marker-end="url(#tip)"/>'
    )


def _box(room: str, x: float, y: float) -> str:
    colour = COLOURS.get(room.split("/")[0], COLOURS[""])
    left, top = x - BOX_WIDTH / 2, y - BOX_HEIGHT / 2
    return (
        f'<rect x="{left:g}" y="{top:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5" '
        f'fill="{colour}" stroke="#667"/><text x="{x:g}" y="{y + 4:g}" fill="#111">{room}</text>'
    )


if __name__ == "__main__":
    main()
