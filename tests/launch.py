"""Scripts under torchrun, as tests start, watch and kill them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from processes import STOPPED, children, environment, is_running, state

SCRIPTS = Path(__file__).parent / "distributed"


class Launch:
    """One launch of a script of ``tests/distributed`` on several ranks, in a session of its own.

    Args:
        script: name of the script.
        arguments: its command line.
        world: number of ranks.
        output: file that takes what launcher and ranks print.
    """

    def __init__(self, script: str, *arguments: object, world: int, output: Path) -> None:
        self.world, self._output = world, output
        with output.open("w") as printed:
            self._process = subprocess.Popen(
                [
                    sys.executable, "-m", "torch.distributed.run", "--standalone",
                    "--nproc-per-node", str(world), str(SCRIPTS / script), *map(str, arguments),
                ],
                env=environment(), stdout=printed, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def printed(self) -> str:
        return self._output.read_text()

    def wait(self, seconds: float = 100) -> None:
        """Until it ends by itself, well."""
        try:
            code = self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not done after {seconds} s:\n{self.printed}") from None
        assert code == 0, self.printed

    def wait_for_failure(self, seconds: float = 60) -> None:
        """Until the launcher has taken down what is left of it."""
        assert self._process.wait(timeout=seconds) != 0, "a killed rank went unnoticed"

    def kill(self) -> None:
        """SIGKILL ranks and launcher, whatever they are doing, and see them gone.

        Ranks are in sessions of their own and would outlive their launcher. It is stopped first,
        so that it starts no more of them and leaves the dead alone.
        """
        if not self.is_running:
            return
        launcher = self._process.pid
        os.kill(launcher, signal.SIGSTOP)
        ranks: set[int] = set()
        while True:
            is_stopped = state(launcher) in STOPPED
            ranks |= set(children(launcher))
            for rank in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGKILL)
            if is_stopped:
                break
            time.sleep(0.001)
        self._process.kill()
        self._process.wait(timeout=60)
        deadline = time.monotonic() + 60
        while any(map(is_running, ranks)):
            assert time.monotonic() < deadline, f"of {ranks} some are alive after SIGKILL"
            time.sleep(0.001)
