"""Prints each requirement of some extras of setup.cfg at the lowest version that it admits.

Usage: floors.py EXTRA ...
"""

from __future__ import annotations

import re
import sys
from configparser import ConfigParser
from pathlib import Path


def floors(extras: list[str]) -> list[str]:
    """Lines for pip, like ``numpy==1.26``; without an extra, those of the package alone."""
    config = ConfigParser()
    config.read(Path(__file__).parent.parent / "setup.cfg")
    lists = [config["options"]["install_requires"]]
    lists += [config["options.extras_require"][extra] for extra in extras]
    lines = [line for text in lists for line in text.splitlines() if ">=" in line]
    return list(dict.fromkeys(re.sub(r">=([\d.]+).*", r"==\1", line) for line in lines))


if __name__ == "__main__":
    print(*floors(sys.argv[1:]), sep="\n")
