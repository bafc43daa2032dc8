"""Scripts on several ranks, as tests start, watch and kill them."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any, Self

from processes import STOPPED, children, environment, is_running, services, state, wait_until

SCRIPTS = Path(__file__).parent / "distributed"


class Forks:
    """A process that has imported some modules and forks launches: see ``distributed/forks.py``.

    Args:
        modules: what it imports.
    """

    def __init__(self, *modules: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPTS / "forks.py"), *modules],
            env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        services.add(self._process.pid)

    def start(
        self, script: Path, *arguments: object, world: int, output: Path, errors: Path
    ) -> int:
        """Start a launch of so many ranks, or of a process alone for 0; its process id."""
        return self._ask(
            script=str(script), arguments=[*map(str, arguments)], world=world,
            environment=environment(), output=str(output), errors=str(errors),
        )  # fmt: skip

    def end(self, launch: int) -> int:
        """Wait for the end of a launch; its exit code."""
        return self._ask(end=launch)

    def close(self) -> None:
        self._process.communicate(timeout=200)

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, **request: Any) -> int:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "forks.py has ended; standard error says why"
        return int(answer)


@cache
def forks() -> Forks:
    """With what a trainer imports, but for the package itself, which looks at its process."""
    forks = Forks("torch._dynamo", "torch.distributed.device_mesh", "torchdata.nodes", "fsspec")
    atexit.register(forks.close)
    return forks


class Launch:
    """One launch of a script on several ranks, in a session of its own.

    Args:
        script: its name in ``tests/distributed``, or its absolute path.
        arguments: its command line.
        world: number of ranks; 0 for a process alone, without a launcher.
        output: file that takes what launcher and ranks print.
        errors: file that takes what they print on standard error; by default ``output``.
        starter: forks it; by default a process that has imported torch.
    """

    def __init__(
        self,
        script: str | Path,
        *arguments: object,
        world: int,
        output: Path,
        errors: Path | None = None,
        starter: Forks | None = None,
    ) -> None:
        self.world, self._outputs, self._code = world, dict.fromkeys([output, errors or output]), 0
        for path in self._outputs:
            path.write_text("")
        self._forks = starter or forks()
        self._launcher = self._forks.start(
            SCRIPTS / script, *arguments, world=world, output=output, errors=errors or output
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def is_running(self) -> bool:
        return bool(self._launcher) and is_running(self._launcher)

    @property
    def printed(self) -> str:
        return "".join(path.read_text() for path in self._outputs)

    def wait(self, seconds: float = 200) -> None:
        """Until it ends by itself, well."""
        assert self._end(seconds) == 0, self.printed

    def wait_for_failure(self, seconds: float = 200) -> None:
        """Until the launcher has taken down what is left of it."""
        assert self._end(seconds) != 0, "a killed rank went unnoticed"

    def kill(self) -> None:
        """SIGKILL ranks and launcher, whatever they are doing, and see them gone.

        Ranks would outlive their launcher. It is stopped first, so that it starts no more of them
        and leaves the dead alone.
        """
        if not self.is_running:
            self._end()
            return
        ranks: set[int] = set()
        os.kill(self._launcher, signal.SIGSTOP)
        while True:
            is_stopped = state(self._launcher) in STOPPED
            ranks |= set(children(self._launcher))
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
            if is_stopped:
                break
            time.sleep(0.001)
        os.kill(self._launcher, signal.SIGKILL)
        self._end()
        wait_until(lambda: not any(map(is_running, ranks)), seconds=60)

    def _end(self, seconds: float = 200) -> int:
        """Its exit code, once it has ended; from then on its process id may be another's."""
        if self._launcher:
            deadline = time.monotonic() + seconds
            while is_running(self._launcher):
                assert time.monotonic() < deadline, f"not done after {seconds} s:\n{self.printed}"
                time.sleep(0.005)
            self._code, self._launcher = self._forks.end(self._launcher), 0
        return self._code
