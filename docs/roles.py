"""A griffe extension: roles of reStructuredText in docstrings become code in the site.

The docstrings say ``:class:`~zephon_torch.DataLoader```, as Python tools do. The site is Markdown,
which would show the role itself.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":[a-z]+:`(~?)([\w.]+)`")


def without_roles(text: str) -> str:
    """Return a docstring with names in place of roles; after ``~`` only the last part of one."""
    return _ROLE.sub(lambda m: f"`{m[2].rpartition('.')[2] if m[1] else m[2]}`", text)


class Roles(griffe.Extension):
    """Rewrites each docstring as it is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = without_roles(obj.docstring.value)
