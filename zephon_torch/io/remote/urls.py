"""URLs as users write them, and as fsspec takes them apart: it splits them at every "::"."""

from __future__ import annotations

import re

from zephon_torch.io.remote.options import masked
from zephon_torch.io.remote.web import WEB

_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.:-]*)://(?P<root>.*)", re.DOTALL)
# The rest of a chained URL, as opposed to a name with "::" in it: another URL, or a path after a
# file system that lies in a file.
_CHAINED = re.compile(r"::(?=(?:[a-z][a-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]*://)")
_IN_A_FILE = {"zip", "tar", "libarchive", "reference"}
# Stands for "::" in names while fsspec, which takes URLs apart there, looks at them.
_COLONS = "\ue000\ue001"


def split_url(path: str) -> tuple[str, str, str] | None:
    """Split a URL into scheme, root and the tail that stays behind every path.

    The scheme holds the outer file systems of a chain that has no path for them. The tail is a
    query, or the rest of a chained URL. None for a path that is no URL.
    """
    url = _URL.fullmatch(path)
    if url is None:
        return None
    scheme, root = url["scheme"], url["root"]
    cut = _tail_at(scheme.rpartition("::")[2], root)
    root, tail = (root, "") if cut < 0 else (root[:cut], root[cut:])
    return scheme, root, tail


def spelled(scheme: str, path: str, tail: str) -> str:
    """Return a URL that fsspec takes apart at the right places."""
    own, chained = (path, tail) if tail.startswith("::") else (path + tail, "")
    return f"{scheme}://{own.replace('::', _COLONS)}{chained}"


def as_named(path: str) -> str:
    """Return the path that fsspec made of what was spelled, as it is named in its store."""
    return path.replace(_COLONS, "::")


def _tail_at(protocol: str, root: str) -> int:
    """Where the tail that stays behind every path begins: a query, the rest of a chain; or -1."""
    if protocol in WEB:
        return root.find("?")
    if (chained := _CHAINED.search(root)) is not None:
        return chained.start()
    return root.find("::") if protocol in _IN_A_FILE else -1


def without_queries(tail: str) -> str:
    """Return a tail as it may be shown."""
    return "".join(f"::{link.partition('?')[0]}" for link in _links(tail))


def fault_of(tail: str) -> str:
    """Say why fsspec would take a chained URL apart at the wrong places; "" where it would not."""
    wrong = next((link for link in _links(tail) if "::" in link), None)
    if wrong is None:
        return ""
    shown = masked(wrong.partition("?")[0])
    return (
        f"{shown!r} stands behind '::' and holds another '::', where fsspec would split it: "
        "rename the archive, or write [0:0:0:0:0:0:0:1] in place of [::1]"
    )


def _links(tail: str) -> list[str]:
    return _CHAINED.split(tail[2:]) if tail.startswith("::") else []
