"""Scripts under torchrun, as tests start, watch and kill them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

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
                env=os.environ | {
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                },
                stdout=printed, stderr=subprocess.STDOUT, start_new_session=True,
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
        """SIGKILL ranks and launcher, whatever they are doing.

        The ranks go first, all at once, while the launcher is stopped and cannot interfere; then
        it reaps them. They are in sessions of their own.
        """
        if not self.is_running:
            return
        os.kill(self._process.pid, signal.SIGSTOP)
        for rank in children(self._process.pid):
            os.kill(rank, signal.SIGKILL)
        os.kill(self._process.pid, signal.SIGCONT)
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(timeout=20)


def children(parent: int) -> list[int]:
    """Processes that a process has started, and not yet reaped."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        if int(fields[1]) == parent:
            found.append(int(status.parent.name))
    return found
