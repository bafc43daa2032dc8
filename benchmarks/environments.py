"""Where peers are installed: a virtual environment each, laid over the running one.

A peer's own versions of packages come first there; torch, numpy and all else that fits is what the
runner itself uses and is not installed again.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path

from benchmarks.systems.base import System

PIP_SECONDS = 600


@dataclass(frozen=True)
class Environment:
    """A Python interpreter for a system, or why there is none; versions of what it requires."""

    python: str
    versions: dict[str, str]
    error: str | None = None


def make(system: System, folder: Path) -> Environment:
    """Install a system's requirement under a folder, unless that was done before."""
    if system.requirement is None:
        versions = {name: _version(name) for name in system.packages}
        return Environment(sys.executable, versions)
    python = folder / "bin" / "python"
    note = folder / "installed.txt"
    wanted = f"{system.requirement}\n{sys.executable}\n"
    if not note.exists() or not note.read_text() == wanted:
        shutil.rmtree(folder, ignore_errors=True)
        error = _install(system.requirement, folder, python)
        if error is not None:
            return Environment("", {}, error)
        note.write_text(wanted)
    return Environment(str(python), {name: _version(name, folder) for name in system.packages})


def _install(requirement: str, folder: Path, python: Path) -> str | None:
    """Return pip's reason if it fails."""
    venv.create(folder, with_pip=True)
    outer = sysconfig.get_paths()["purelib"]
    _site_packages(folder).joinpath("outer.pth").write_text(
        f"import site; site.addsitedir({outer!r})\n"
    )
    constraints = folder / "constraints.txt"
    constraints.write_text(f"torch=={_version('torch')}\n")
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            [*command, "-c", str(constraints), *requirement.split()],
            capture_output=True,
            text=True,
            timeout=PIP_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"pip took longer than {PIP_SECONDS} s"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return (lines or done.stderr.splitlines() or ["pip failed"])[-1]


def _site_packages(folder: Path) -> Path:
    return Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))


def _version(name: str, folder: Path | None = None) -> str:
    """Return the version of a distribution, in that environment or in the outer one."""
    if folder is not None:
        for found in importlib.metadata.distributions(
            name=name, path=[str(_site_packages(folder))]
        ):
            return found.version
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
