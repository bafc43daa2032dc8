"""Under Accelerate: as many optimizer steps as with torch's loader, exact metrics, exact resume."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="accelerate is not installed")

SCRIPT = Path(__file__).with_name("accelerate_run.py")
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def run(world: int, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    start = [*LAUNCHER, str(world)] if world > 1 else [sys.executable]
    done = subprocess.run(
        [*start, str(SCRIPT), *map(json.dumps, requests)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


@pytest.mark.parametrize("world", [1, 2])
def test_it_trains_as_with_torchs_loader(world: int) -> None:
    theirs, ours = run(world, {"kind": "torch"}, {"kind": "zephon"})
    assert ours["type"] == "zephon_torch"
    for what in ("steps", "seen", "devices", "left"):
        assert ours[what] == theirs[what], what
    assert ours["seen"] == [*range(23), *range(23)]


# from fewer to more processes it is Accelerate that cannot: a new process finds no file of its own
# for the step of the gradient accumulation, which then differs between the processes
@pytest.mark.parametrize(("saved", "resumed"), [(1, 1), (2, 2), (2, 1)])
def test_a_saved_state_goes_on_at_the_very_next_sample(
    saved: int, resumed: int, tmp_path: Path
) -> None:
    folder = str(tmp_path / "state")
    (first,) = run(saved, {"kind": "zephon", "folder": folder, "stop": 8})
    (rest,) = run(resumed, {"kind": "zephon", "folder": folder, "num_workers": 1})
    assert first["seen"] + rest["seen"] == [*range(23), *range(23)]
