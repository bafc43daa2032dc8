"""No engine hangs, loses its place or leaves anything behind: errors, Ctrl-C, start methods.

Workers that die, trainers that are killed and leaks are in test_cases_loader.py (C13, C17).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from processes import is_running, started, wait_until
from stores import WebStore, s3_options
from toys import ENGINES, as_list, write_shards

import zephon_torch
from zephon_torch import DataLoader, StaticMixtureWorkSource
from zephon_torch.io import Dataset

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


@pytest.fixture(params=ENGINES.values(), ids=ENGINES)
def engine(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


# --- errors stay with their batch ----------------------------------------------------------------


class TwoArguments(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"code {code}: {text}")


def fail_at(number: int) -> None:
    if number == 9:
        raise TwoArguments(7, "no luck")
    if number == 21:
        raise KeyError("a key\nwith newlines")


def picky_sample(sample: dict[str, int]) -> int:
    fail_at(sample["id"])
    return sample["id"]


def picky_batch(samples: list[dict[str, int]]) -> list[int]:
    for sample in samples:
        fail_at(sample["id"])
    return [sample["id"] for sample in samples]


class Picky:
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> int:
        fail_at(index)
        return index


@pytest.mark.parametrize("where", ["dataset", "transform", "collate_fn"])
def test_an_error_comes_in_the_place_of_its_batch_and_the_loop_can_go_on(
    tmp_path: Path, engine: dict[str, Any], where: str
) -> None:
    files = Dataset.from_path("web", write_shards(tmp_path, [32]))
    dataset, options = {
        "dataset": (Picky(), {"collate_fn": as_list}),
        "transform": (files, {"transform": picky_sample, "collate_fn": as_list}),
        "collate_fn": (files, {"collate_fn": picky_batch}),
    }[where]
    with DataLoader(dataset, 4, **options, **engine) as loader:
        for _ in range(2):
            loop, seen, delivered = iter(loader), [], []
            while True:
                try:
                    seen.append(next(loop))
                except StopIteration:
                    break
                except Exception as error:
                    seen.append(str(error))
                    # of the exact type, or as torch sends it where the type cannot be made anew
                    assert isinstance(error, (TwoArguments, KeyError, RuntimeError))
                delivered.append(loader.delivered)
            assert "no luck" in seen[2] and "with newlines" in seen[5]
            assert [batch for batch in seen if isinstance(batch, list)] == [
                list(range(i, i + 4)) for i in range(0, 32, 4) if i not in (8, 20)
            ]
            # a batch that failed is not delivered, what comes after it is
            assert delivered == [4, 8, 8, 16, 20, 20, 28, 0]


@contextmanager
def mixed(folder: Path, on_error: str, **options: Any) -> Iterator[DataLoader]:
    source = StaticMixtureWorkSource(
        [Dataset.from_path("web", folder)], {"web": 1}, seed=5, shuffle_block_size="global"
    )
    with DataLoader(
        source, global_batch_size=8, transform=picky_sample, collate_fn=as_list,
        on_error=on_error, **options,
    ) as loader:  # type: ignore[arg-type]  # fmt: skip
        yield loader


def left(loader: DataLoader) -> list[tuple[list[int], list[bool]]]:
    return [(batch, loader.valid.tolist()) for batch in loader]  # type: ignore[union-attr]


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
def test_bad_records_are_treated_the_same_from_every_resume_point_on_any_world_and_engine(
    tmp_path: Path, on_error: str
) -> None:
    """Each resume point is taken by another engine and another world."""
    write_shards(tmp_path, [17, 20])
    with mixed(tmp_path, on_error, num_threads=0) as loader:
        reference = left(loader)
    with mixed(tmp_path, on_error, num_threads=0) as loader:
        states = [loader.state_dict(), *(loader.state_dict() for _ in loader)]
    engines = list(ENGINES.values())
    for k, state in enumerate(states[:-1]):
        world, engine = (1, 2, 4)[k % 3], engines[(k + 3) % len(engines)]
        parts = []
        for rank in range(world):
            with mixed(tmp_path, on_error, rank=rank, num_replicas=world, **engine) as loader:
                loader.load_state_dict(state)
                parts.append(left(loader))
        assert real(zip(*parts, strict=True)) == real((batch,) for batch in reference[k:]), k


def real(steps: Any) -> list[list[int]]:
    """Real samples of each global batch, rank after rank."""
    return [
        [i for batch, valid in step for i, is_real in zip(batch, valid, strict=True) if is_real]
        for step in steps
    ]


# --- worker_init_fn ------------------------------------------------------------------------------


class FailsUntil:
    """A worker_init_fn that fails in one worker until a file is there."""

    def __init__(self, path: Path, worker: int) -> None:
        self.path, self.worker = path, worker

    def __call__(self, worker: int) -> None:
        if worker == self.worker and not self.path.exists():
            raise FileNotFoundError(f"no such license: {self.path.name}")


@pytest.mark.parametrize("persistent_workers", [False, True])
@pytest.mark.parametrize("worker", [0, 1])
def test_a_failing_worker_init_fn_ends_the_run_and_costs_no_batch(
    tmp_path: Path, persistent_workers: bool, worker: int
) -> None:
    """Nothing is quietly made in the training process instead; a new iterator starts anew."""
    with DataLoader(
        range(24), 4, num_workers=2, persistent_workers=persistent_workers,
        worker_init_fn=FailsUntil(tmp_path / "license", worker), collate_fn=as_list,
    ) as loader:  # fmt: skip
        loop = iter(loader)
        seen = [next(loop) for _ in range(worker)]  # batches of the worker before it
        for _ in range(3):
            with pytest.raises(FileNotFoundError, match="no such license") as caught:
                next(loop)
            assert f"in DataLoader worker process {worker}" in str(caught.value)
        assert loader.delivered == 4 * worker
        (tmp_path / "license").touch()
        loader.load_state_dict(loader.state_dict())
        assert seen + list(loader) == [list(range(i, i + 4)) for i in range(0, 24, 4)]


# --- Ctrl-C --------------------------------------------------------------------------------------

CAUGHT = """
import json, multiprocessing, os, signal, sys, time
from pathlib import Path
from zephon_torch import DataLoader

folder = Path(sys.argv[1])

class Interrupting:
    '''Sends Ctrl-C to all processes as soon as the loop waits for sample 16, once.'''
    def __init__(self, number):
        self.waiting, self.sent = folder / f"waiting-{number}", folder / f"sent-{number}"
    def __len__(self):
        return 32
    def __getitem__(self, index):
        if index == 16 and not self.sent.exists():
            while not self.waiting.exists():
                time.sleep(0.01)
            time.sleep(0.2)
            self.sent.touch()
            os.killpg(0, signal.SIGINT)
            time.sleep(0.2)
        return index

def run(engine, number):
    dataset, seen, caught = Interrupting(number), [], 0
    with DataLoader(dataset, 4, **engine) as loader:
        loop = iter(loader)
        while True:
            try:
                if len(seen) == 4:
                    dataset.waiting.touch()
                batch = next(loop).tolist()
                assert loader.delivered == (batch[-1] + 1) % 32, (loader.delivered, batch)
                seen.append(batch)
                if len(seen) in (1, 7):  # in the middle of a step
                    os.killpg(0, signal.SIGINT)
                    time.sleep(5)
            except KeyboardInterrupt:
                caught += 1
            except StopIteration:
                return seen, caught

if __name__ == "__main__":
    for number, engine in enumerate(json.loads(sys.argv[2])):
        print(json.dumps(run(engine, number)), flush=True)
    print(multiprocessing.active_children(), flush=True)
"""


def start(*arguments: str, **options: Any) -> AbstractContextManager[subprocess.Popen[str]]:
    """Run a script as the leader of a process group of its own, as a terminal would."""
    command = [sys.executable, "-W", "ignore", *arguments]
    return started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_a_loop_that_catches_ctrl_c_goes_on_with_the_right_batch(tmp_path: Path) -> None:
    """Ctrl-C, which reaches all processes of a terminal: in a step, in next(), in a step again."""
    with start("-c", CAUGHT, str(tmp_path), json.dumps(list(ENGINES.values()))) as process:
        output, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    *runs, children = output.splitlines()
    for name, line in zip(ENGINES, runs, strict=True):
        seen, caught = json.loads(line)
        assert seen == [list(range(i, i + 4)) for i in range(0, 32, 4)], name
        assert caught == 3, name
    assert children == "[]"


UNCAUGHT = """
import json, multiprocessing, sys, time
from zephon_torch import DataLoader

class Slow:
    def __len__(self):
        return 10_000
    def __getitem__(self, index):
        time.sleep(0.02)
        return index

if __name__ == "__main__":
    loader = DataLoader(Slow(), 4, **json.loads(sys.argv[1]))
    for number, batch in enumerate(loader):
        if number == 1:
            print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        if number == 2 and sys.argv[2] == "step":
            time.sleep(60)
"""


def test_ctrl_c_ends_a_training_script_within_seconds_and_leaves_no_orphan() -> None:
    """While it waits in next(), or is in the middle of a step."""
    cases = [
        ("inline", "next"), ("three threads", "next"), ("two workers", "next"),
        ("two persistent workers", "step"),
    ]  # fmt: skip
    with ExitStack() as stack:
        processes = [
            stack.enter_context(start("-c", UNCAUGHT, json.dumps(ENGINES[name]), where))
            for name, where in cases
        ]
        workers = []
        for process in processes:
            assert process.stdout is not None
            workers += [int(pid) for pid in process.stdout.readline().split()]
        assert len(workers) == 4
        time.sleep(0.3)
        for process in processes:
            os.killpg(process.pid, signal.SIGINT)
        for process in processes:
            _, errors = process.communicate(timeout=60)
            assert process.returncode in (-signal.SIGINT, 128 + signal.SIGINT), errors
            assert errors.rstrip().endswith("KeyboardInterrupt")
        wait_until(lambda: not any(map(is_running, workers)))


# --- start methods -------------------------------------------------------------------------------

METHODS = """
import json, multiprocessing, os, signal, sys
import torch.utils.data
from zephon_torch import DataLoader

class Picky:
    def __len__(self):
        return 24
    def __getitem__(self, index):
        if index == 9:
            raise KeyError("nine")
        info = torch.utils.data.get_worker_info()
        return index, info.id, info.num_workers, info.dataset is self, os.getpid()

def as_list(samples):
    return samples

def epoch(loop):
    seen, pids = [], set()
    while True:
        try:
            batch = next(loop)
            seen.append([sample[0] for sample in batch])
            assert all(sample[1:4] == (0, 1, True) for sample in batch), batch
            pids |= {sample[4] for sample in batch}
        except StopIteration:
            return seen, sorted(pids)
        except KeyError as error:
            seen.append("nine" in str(error) and "Traceback" in str(error))

def main():
    loader = DataLoader(
        Picky(), 4, num_workers=1, persistent_workers=True, collate_fn=as_list,
        multiprocessing_context=sys.argv[1],
    )
    epochs = [epoch(iter(loader)) for _ in range(2)]
    loader.load_state_dict(loader.state_dict() | {"delivered": 16})
    epochs.append(epoch(iter(loader)))
    print(json.dumps([seen for seen, _ in epochs]), flush=True)
    print(len({str(pids) for _, pids in epochs}), flush=True)
    loop = iter(loader)
    next(loop)
    (victim,) = multiprocessing.active_children()
    try:
        os.kill(victim.pid, signal.SIGKILL)
        epoch(loop)
    except RuntimeError as error:
        print("worker" in str(error), flush=True)
    state = loader.state_dict()
    while True:
        try:
            loader.load_state_dict(state)
            print(epoch(iter(loader))[0] == epochs[0][0][state["delivered"] // 4 :], flush=True)
            break
        except RuntimeError:  # torch's handler of the signal may raise once more, anywhere
            pass
    loader.close()
    print(multiprocessing.active_children(), flush=True)

if __name__ == "__main__":
    main()
"""


def test_every_start_method_gives_the_same_and_survives_errors_and_deaths(tmp_path: Path) -> None:
    script = tmp_path / "script.py"  # a file, because spawned processes import it again
    script.write_text(METHODS)
    whole = [list(range(i, i + 4)) for i in range(0, 24, 4)]
    failing = [*whole[:2], True, *whole[3:]]
    with ExitStack() as stack:
        methods = ("fork", "spawn", "forkserver")
        processes = [stack.enter_context(start(str(script), method)) for method in methods]
        for process in processes:
            output, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors
            epochs, *rest = output.splitlines()
            assert json.loads(epochs) == [failing, failing, whole[4:]]
            assert rest == ["1", "True", "True", "[]"]


# --- signals meant for the whole job -------------------------------------------------------------

PREEMPTED = """
import os, signal, sys, time
from zephon_torch import DataLoader

SIGNALS = signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2
asked = []

def main():
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: asked.append(number))
    loader = DataLoader(
        list(range(4000)), 4, num_workers=2, multiprocessing_context=sys.argv[1],
        persistent_workers=sys.argv[1] == "spawn",
    )
    for step, batch in enumerate(loader):
        assert batch.tolist() == list(range(step * 4, step * 4 + 4))
        if step == 3:
            print(*(worker.pid for worker in loader._live()._run._results._workers), flush=True)
            while set(asked) != set(SIGNALS):
                time.sleep(0.01)
        if step == 200:  # more than all that was prefetched
            break
    print("saved", loader.state_dict()["delivered"], flush=True)
    if sys.argv[2] == "stays":
        time.sleep(60)

if __name__ == "__main__":
    main()
"""
SIGNALS = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
ENDS_WITHIN = 20  # seconds, on a busy machine; without the leash it is minutes, or for ever


def test_signals_to_the_job_leave_the_workers_to_the_trainer() -> None:
    """torchrun, SLURM and Kubernetes signal all processes; the trainer saves, and ends them."""
    with start("-W", "ignore", "-c", PREEMPTED, "fork", "ends") as process:
        assert process.stdout is not None
        workers = [int(pid) for pid in process.stdout.readline().split()]
        for number in [*SIGNALS, *SIGNALS]:
            os.killpg(process.pid, number)
            time.sleep(0.01)
        output, errors = process.communicate(timeout=200)
        assert (process.returncode, output, errors) == (0, "saved 804\n", "")
        assert len(workers) == 2 and not any(map(is_running, workers))


def test_workers_pass_over_signals_and_end_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    """Under every start method."""
    script = tmp_path / "script.py"
    script.write_text(PREEMPTED)
    with ExitStack() as stack:
        processes = [
            stack.enter_context(start("-W", "ignore", str(script), method, "stays"))
            for method in ("fork", "spawn", "forkserver")
        ]
        for process in processes:
            assert process.stdout is not None
            workers = [int(pid) for pid in process.stdout.readline().split()]
            assert len(workers) == 2
            for number in SIGNALS:
                for pid in (*workers, process.pid):  # not to a fork server, which is anybody's
                    os.kill(pid, number)
            assert process.stdout.readline() == "saved 804\n"
            process.kill()
            process.wait()
            wait_until(lambda workers=workers: not any(map(is_running, workers)))  # type: ignore[misc]


class StartsAProgram:
    def __call__(self, sample: int) -> int:
        program = subprocess.Popen(["sleep", "30"])
        program.terminate()
        return program.wait(timeout=10)


def test_what_a_worker_starts_can_be_ended() -> None:
    """Programs that user code starts get the signals of a plain process."""
    with DataLoader([0] * 4, 1, num_workers=1, transform=StartsAProgram()) as loader:
        assert [batch.item() for batch in loader] == [-signal.SIGTERM] * 4


class Forks:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        pid = os.fork()
        if pid == 0:
            time.sleep(5)
            os._exit(7)
        os.kill(pid, signal.SIGTERM)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_a_worker_forks_can_be_ended(method: str) -> None:
    with DataLoader(Forks(), 2, num_workers=1, multiprocessing_context=method) as loader:
        assert [batch.tolist() for batch in loader] == [[-signal.SIGTERM] * 2]


# --- the end of the interpreter ------------------------------------------------------------------

LEFT = """
import os, signal, sys, time
from zephon_torch import DataLoader

def main():
    loader = DataLoader(
        list(range(4000)), 4, num_workers=2, persistent_workers=sys.argv[1] == "persistent"
    )
    loop = iter(loader)
    next(loop)
    workers = loop._run._results._workers
    for worker in workers:
        os.kill(worker.pid, signal.SIGSTOP)
    print(*(worker.pid for worker in workers), flush=True)
    begun = time.monotonic()
    if sys.argv[2] == "closed":
        loader.close()
    print(time.monotonic() - begun, flush=True)
    return loop

if __name__ == "__main__":
    kept = main()
"""


def test_a_trainer_ends_within_seconds_whatever_its_workers_do() -> None:
    """They are stopped: they obey no signal but SIGKILL."""
    cases = [("run", "kept"), ("persistent", "kept"), ("persistent", "closed")]
    with ExitStack() as stack:
        processes = [
            stack.enter_context(start("-W", "ignore", "-c", LEFT, *case)) for case in cases
        ]
        for process in processes:
            assert process.stdout is not None
            workers, closed = process.stdout.readline().split(), process.stdout.readline()
            begun = time.monotonic()
            output, errors = process.communicate(timeout=200)
            assert (process.returncode, output, errors) == (0, "", "")
            assert time.monotonic() - begun < ENDS_WITHIN and float(closed) < ENDS_WITHIN
            assert len(workers) == 2 and not any(is_running(int(pid)) for pid in workers)


STALLS = """
import json, os, sys, time
from zephon_torch import DataLoader
from zephon_torch.io import Dataset

def begin(how):
    dataset = Dataset.from_path("x", f"{sys.argv[1]}/{how}.jsonl", storage_options=OPTIONS)
    options = {"num_workers": 2} if how == "workers" else {"num_threads": int(how != "inline")}
    loader = DataLoader(dataset, 4, **options)
    loop = iter(loader)
    print(how, next(loop)["id"].tolist(), flush=True)
    return loader, loop

def main():
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    kept = []
    for how in sys.argv[3:]:
        loader, loop = begin(how)
        kept.append(loop)
        try:
            while how == "inline":
                next(loop)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            continue
        sys.stdin.readline()
        if how == "closed":
            loader.close()
            print("closed", flush=True)
    return kept

OPTIONS = json.loads(sys.argv[2])
if __name__ == "__main__":
    kept = main()
"""
# How often each file is asked for until all stalls: it is counted, then the first window is read,
# by each worker if there are any.
ANSWERED = {"thread": 2, "inline": 2, "closed": 2, "workers": 3}


@pytest.mark.parametrize("kind", ["http", "s3"])
def test_a_trainer_ends_within_seconds_whatever_its_store_does(kind: str) -> None:
    """It stalls, while a thread or worker processes read ahead, all on one core."""
    pytest.importorskip("aiohttp" if kind == "http" else "s3fs")
    with WebStore() as store, ExitStack() as stack:
        answered = {f"/data/{how}.jsonl": number for how, number in ANSWERED.items()}
        store.files = dict.fromkeys(answered, b"".join(b'{"id": %d}\n' % i for i in range(100_000)))
        store.fault = lambda method, path, count: (
            "stall" if store.num_asked("GET", path) > answered[path] else None
        )
        arguments = [store.url + "/data", "null"]
        if kind == "s3":
            arguments = ["s3://data", json.dumps(s3_options(store.url))]
        of_threads, of_workers = (
            stack.enter_context(start("-c", STALLS, *arguments, *hows, stdin=subprocess.PIPE))
            for hows in (["inline", "closed", "thread"], ["workers"])
        )

        def wait_for(process: subprocess.Popen[str], how: str) -> None:
            """Until it has its first batch, and its reading ahead stalls."""
            assert process.stdout is not None
            assert process.stdout.readline() == f"{how} [0, 1, 2, 3]\n"
            path = f"/data/{how}.jsonl"
            wait_until(lambda: store.num_asked("GET", path) > answered[path])

        assert of_threads.stdout is not None and of_threads.stdin is not None
        wait_for(of_threads, "inline")
        begun = time.monotonic()
        of_threads.send_signal(signal.SIGINT)
        assert of_threads.stdout.readline() == "interrupted\n"
        wait_for(of_threads, "closed")
        of_threads.stdin.write("go on\n")
        of_threads.stdin.flush()
        assert of_threads.stdout.readline() == "closed\n"
        assert time.monotonic() - begun < ENDS_WITHIN
        for process, how in ((of_threads, "thread"), (of_workers, "workers")):
            wait_for(process, how)
            begun = time.monotonic()
            output, errors = process.communicate("go on\n", timeout=200)
            assert (process.returncode, output, errors) == (0, "", ""), how
            assert time.monotonic() - begun < ENDS_WITHIN, how


IMPORTED_FIRST = """
import sys, types

package = types.ModuleType("zephon_torch")  # without its __init__, which imports torch and so pools
package.__path__ = [sys.argv[1]]
sys.modules["zephon_torch"] = package
from zephon_torch.support import waits
from concurrent.futures import ThreadPoolExecutor

pool = ThreadPoolExecutor(1)
pool.submit(waits.pause, 100.0)
print("waits", flush=True)
"""


def test_a_pool_that_waits_is_let_go_at_exit_whoever_was_imported_first() -> None:
    with start("-c", IMPORTED_FIRST, str(Path(zephon_torch.__file__).parent)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
        begun = time.monotonic()
        process.communicate(timeout=200)
        assert process.returncode == 0 and time.monotonic() - begun < ENDS_WITHIN
