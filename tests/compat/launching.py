"""Runs a script of this folder as a user would, alone or under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import environment

LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def launch(
    world: int, script: Path, *arguments: str, launcher: Sequence[str] = LAUNCHER
) -> str:  # fmt: skip
    """What it printed on standard output."""
    start = [*launcher, str(world)] if world > 1 else [sys.executable]
    done = subprocess.run(
        [*start, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def results(world: int, script: str, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    """What the script answered to each request."""
    printed = launch(world, Path(__file__).with_name(script), *map(json.dumps, requests))
    lines = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(requests)
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]
