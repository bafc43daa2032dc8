"""Launches scripts as torchrun does, but forks the ranks: importing torch takes the longest.

Usage: forks.py MODULE ...

Imports the modules, once for all launches. Each line of standard input is then a request in JSON,
and answered by a line:

    {"script": ..., "arguments": [...], "world": ranks, "environment": {...}, "output": file,
     "errors": file}
        starts a launch in a session of its own; answers its process id. 0 ranks: the script runs
        alone, without the environment of a launch.
    {"end": process id}
        waits for the end of a launch; answers its exit code.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from typing import Any

import numpy as np
import torch.distributed as dist
import torch.multiprocessing as mp


def run(script: str, arguments: list[str]) -> None:
    """As `python SCRIPT ARGUMENTS` would.

    Random seeds are drawn anew, as in a process of its own; that of the hashes of strings is the
    one thing that forked processes share.
    """
    np.random.seed()  # noqa: NPY002
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")


def run_rank(rank: int, world: int, port: int, script: str, arguments: list[str]) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    run(script, arguments)


def launch(
    script: str,
    arguments: list[str],
    world: int,
    environment: dict[str, str],
    output: str,
    errors: str,
) -> None:
    os.setsid()
    os.environ |= environment
    redirect(0, os.devnull, os.O_RDONLY)
    redirect(1, output, os.O_WRONLY | os.O_APPEND)
    redirect(2, errors, os.O_WRONLY | os.O_APPEND)
    if not world:
        run(script, arguments)
        return
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    arguments_of_all = (world, store.port, script, arguments)
    mp.start_processes(run_rank, arguments_of_all, nprocs=world, start_method="fork")


def redirect(descriptor: int, path: str, flags: int) -> None:
    opened = os.open(path, flags)
    os.dup2(opened, descriptor)
    os.close(opened)


def answer(request: dict[str, Any]) -> int:
    if "end" in request:
        return os.waitstatus_to_exitcode(os.waitpid(request["end"], 0)[1])
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        launch(**request)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    for module in sys.argv[1:]:
        importlib.import_module(module)
    for line in sys.stdin:
        print(answer(json.loads(line)), flush=True)
