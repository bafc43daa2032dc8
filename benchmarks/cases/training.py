"""The example's training run on two ranks: the share of its time that it waits for data.

The wait for the first batch counts, too.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NAME = "training"
TURNS = 1
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_mixture.py"


def variants(is_short: bool) -> list[dict[str, Any]]:
    if is_short:
        return []
    return [{"system": "zephon_torch", "ranks": 2, "steps": 40}]


def measure(variant: dict[str, Any], work_dir: Path) -> dict[str, float]:
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={variant['ranks']}"]
    with tempfile.TemporaryDirectory(dir=work_dir) as folder:
        options = ["--work-dir", folder, "--steps", str(variant["steps"])]
        command = [sys.executable, "-m", *launcher, str(EXAMPLE), *options]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = re.findall(r"\| (\d+) samples/s \| data wait ([\d.]+)%", done.stdout)
    if done.returncode or not found:
        raise RuntimeError(f"the example failed: {done.stdout[-500:]}")
    speed, percent = found[-1]
    return {"samples_per_s": float(speed), "wait_share": float(percent) / 100}
