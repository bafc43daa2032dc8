"""A leash between the trainer and its worker processes: they live as long as it holds them.

Schedulers send SIGTERM and their like to all processes of a job at once (torchrun, SLURM,
Kubernetes, systemd). The trainer decides what comes of it, and may need batches until it has saved,
so worker processes pass over these signals while the trainer lives. They end when they are let go,
or when the trainer dies. torch and multiprocessing end processes by SIGTERM, too, and wait for
them without a limit: so they are let go before, and whatever is left after a grace (stopped, stuck
in foreign code) is killed.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe, forkserver, parent_process, resource_tracker, util
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import Any

from zephon_torch.support import waits

GRACE_SECONDS = 5.0  # for a worker to finish what it is doing; as long as torch waits for each
EXIT_SECONDS = 1.0  # at the end of the trainer, which needs none of it any more
_LOOK_SECONDS = 1.0

# Sent to all processes of a job, terminal or service. Ctrl-C is another matter: see `Beginning`.
_PASSED_OVER = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_live: weakref.WeakSet[Leash] = weakref.WeakSet()


class Leash:
    """Holds the worker processes that are started with it.

    Attributes:
        reader: What crosses to the processes: readable once they are let go.
    """

    def __init__(self) -> None:
        self.reader, writer = Pipe(duplex=False)
        self._pid = os.getpid()
        # also where nobody holds the leash any more
        self._let_go = weakref.finalize(self, _let_go, writer, self._pid)
        self._processes: Sequence[BaseProcess] = ()

    def hold(self, processes: Sequence[BaseProcess]) -> None:
        """Take note of the processes, once they are started."""
        self._processes = processes
        _live.add(self)
        atexit.unregister(_end_all)
        atexit.register(_end_all)  # the last that is registered is the first that is called

    def let_go(self) -> None:
        """Let the processes end; a second call has no effect, nor has one in a forked child."""
        self._let_go()

    def kill(self) -> None:
        """Kill what is still there."""
        left = self._left()
        for process in left:
            process.kill()
        for process in left:  # which takes no time, but for one that the kernel holds
            wait([process.sentinel], EXIT_SECONDS)

    @contextmanager
    def killed_after(self, seconds: float) -> Iterator[None]:
        """Let the processes go; kill those that are there after some time, or behind the block.

        Not where the block raises: torch may still watch them then, and raise about killed ones in
        place of what was raised. They end by themselves, or at the end of the trainer.
        """
        timer = threading.Timer(seconds, self.kill)
        timer.daemon = True
        timer.start()
        self.let_go()
        try:
            yield
        finally:
            timer.cancel()
        self.kill()

    def end(self, seconds: float) -> None:
        """End the processes at once, whatever they do; kill those that take longer."""
        self.let_go()
        for process in self._left():
            process.terminate()
        until = time.monotonic() + seconds
        while (left := self._left()) and (more := until - time.monotonic()) > 0:
            wait([process.sentinel for process in left], more)
        self.kill()

    def _left(self) -> list[BaseProcess]:
        """List the processes that run; asks nothing of the kernel that ends a zombie twice."""
        if self._pid != os.getpid():
            return []
        return [process for process in self._processes if not wait([process.sentinel], 0)]


def _let_go(writer: Any, pid: int) -> None:
    if pid == os.getpid():
        with suppress(OSError):  # of processes that are gone
            writer.send_bytes(b".")
        writer.close()


def _end_all() -> None:
    """At the end of this process: what comes later waits for its processes without a limit."""
    leashes = [leash for leash in _live if leash._pid == os.getpid()]
    if not leashes:
        return
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises for killed ones
    for leash in leashes:
        leash.let_go()
    for leash in leashes:
        leash.end(EXIT_SECONDS)


def _end_all_of_child() -> None:
    """At the end of a process of multiprocessing, which calls nothing that atexit knows."""
    util.Finalize(None, _end_all, exitpriority=100)


_end_all_of_child()
util.register_after_fork(_live, lambda _: _end_all_of_child())


def obey(reader: Any) -> None:
    """In a worker process: pass over signals meant for the job, and end with the trainer.

    Args:
        reader: That of the leash.
    """

    def pass_over(number: int, _frame: Any) -> None:
        if number == signal.SIGTERM and reader.poll():  # torch's or multiprocessing's, at the end
            os._exit(0)

    # no SIG_IGN: programs that are started here would inherit it
    signal.signal(signal.SIGTERM, pass_over)  # in place of torch's, which ends the process
    for number in _PASSED_OVER:
        if callable(signal.getsignal(number)) or not _is_handled(number):
            signal.signal(number, pass_over)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_OVER)
    _leave_to_forks([number for number in _PASSED_OVER if signal.getsignal(number) is pass_over])
    if parent_process() is not None:
        threading.Thread(target=_watch, args=(reader,), daemon=True).start()


def _leave_to_forks(numbers: Sequence[int]) -> None:
    """Let user code end what it forks here by a signal, as it does where there are no workers."""
    before = threading.local()

    def hold() -> None:  # one that comes at once is for the child to be ended by
        before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)

    def release_in_child() -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=release_in_child)


def _is_handled(number: int) -> bool:
    """Whether a signal is ignored, or handled in C (as by faulthandler), unknown to Python."""
    with open("/proc/self/status") as status:
        masks = [line.split()[1] for line in status if line.startswith(("SigIgn", "SigCgt"))]
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def _watch(reader: Any) -> None:
    """End this process with the trainer, or some time after it was let go.

    torch's watchdog asks only between two batches, and looks at the fork server if there is one.
    """
    trainer, parent = parent_process(), os.getppid()
    assert trainer is not None
    while not wait([reader, trainer.sentinel], _LOOK_SECONDS):
        if os.getppid() != parent:  # copies of the sentinel may be held by other workers
            os._exit(1)
    if wait([trainer.sentinel], 0):
        os._exit(1)
    waits.end_all()
    wait([trainer.sentinel], GRACE_SECONDS - 1)
    os._exit(0)


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold signals back, also in processes that are started meanwhile, until they are ready.

    Raises nothing: what came meanwhile comes behind the block.
    """
    held = {signal.SIGINT, *_PASSED_OVER}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_helpers(context: str | BaseContext | None) -> None:
    """Start what all of a program share before signals are held: it would hold them for ever."""
    method = context if isinstance(context, str) else multiprocessing.get_start_method()
    if isinstance(context, BaseContext):
        method = context.get_start_method()
    if method != "fork":
        resource_tracker.ensure_running()
    if method == "forkserver":
        forkserver.ensure_running()
