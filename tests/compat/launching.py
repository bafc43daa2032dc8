"""Runs a script of this folder alone or, as torchrun would, on several ranks."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from launch import Forks, Launch


def installed(*modules: str) -> bool:
    """Whether all are, without the seconds that importing them takes."""
    return None not in map(find_spec, modules)


def forget_accelerate() -> None:
    """Leave a process as if no Accelerator had been made in it: loaders ask for that."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def launch(forks: Forks, world: int, script: Path, *arguments: str) -> str:
    """What it printed on standard output."""
    with TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        with Launch(
            script, *arguments, world=world if world > 1 else 0, output=output, errors=errors,
            starter=forks,
        ) as run:  # fmt: skip
            run.wait()
        return output.read_text()


def results(
    forks: Forks, world: int, script: str, *requests: dict[str, Any]
) -> list[dict[str, Any]]:  # fmt: skip
    """What the script answered to each request."""
    printed = launch(forks, world, Path(__file__).with_name(script), *map(json.dumps, requests))
    lines = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(requests)
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]
