"""The main job as real processes: one digest for any number of ranks and any number of kills."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import webdataset
from launch import Launch
from processes import descendants, started
from stores import KEY, SECRET, s3_server

from zephon_torch.io import Dataset
from zephon_torch.work import MixtureSpec, StaticMixtureWorkSource

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
NUM_STEPS = 150
GLOBAL_BATCH_SIZE = 8
WEIGHTS = {"code": 0.7, "prose": 0.3}
SMALL_RUN = (
    f"--steps={NUM_STEPS} --global-batch-size={GLOBAL_BATCH_SIZE} --save-every=7 --log-every=1 "
    "--corpus-bytes=100000 --width=16 --layers=1 --context=64"
).split()


SCRIPT = EXAMPLES / "train_mixture.py"


@dataclass(frozen=True, slots=True)
class Outcome:
    digest: str
    losses: dict[int, str]  # by step


def under_torchrun(
    work_dir: Path, *more: str, world_size: int
) -> AbstractContextManager[subprocess.Popen[str]]:
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={world_size}"]
    script = [str(SCRIPT), f"--work-dir={work_dir}", *SMALL_RUN, *more]
    return started(
        [sys.executable, "-m", *launcher, *script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def finish(work_dir: Path, *more: str, world_size: int) -> Outcome:
    """Runs to the end, in forked ranks: those of torchrun import all they need, each of them."""
    work_dir.mkdir(exist_ok=True)
    output, options = work_dir / "output", (f"--work-dir={work_dir}", *SMALL_RUN, *more)
    launch = Launch(SCRIPT, *options, world=world_size, output=output)
    try:
        launch.wait()
    finally:
        launch.kill()
    return outcome_of(launch.printed)


def outcome_of(output: str) -> Outcome:
    digests = re.findall(r"^digest: ([0-9a-f]{64})$", output, re.MULTILINE)
    losses = re.findall(r"^step (\d+) \| loss (\S+)", output, re.MULTILINE)
    assert len(digests) == 1, output
    return Outcome(digests[0], {int(step): loss for step, loss in losses})


@contextmanager
def running_until(step: int, work_dir: Path, *more: str, world_size: int) -> Iterator[list[int]]:
    """Runs up to a step, and hands over torchrun's process id and those of its ranks."""
    with under_torchrun(work_dir, *more, world_size=world_size) as process:
        read = wait_for_step(process, step)
        pids = [process.pid, *descendants(process.pid)]
        assert len(pids) >= 1 + world_size, read  # and worker processes
        exits = {pid: os.pidfd_open(pid) for pid in pids}
        try:
            yield pids
            for pid, exit_ in exits.items():
                assert select.select([exit_], [], [], 100)[0], f"process {pid} is still there"
        finally:
            for exit_ in exits.values():
                os.close(exit_)


def wait_for_step(process: subprocess.Popen[str], step: int) -> str:
    """What it has printed until it has done so many."""
    assert process.stdout is not None
    read = []
    for line in process.stdout:
        read.append(line)
        done = re.match(r"step (\d+) ", line)
        if done and int(done[1]) >= step:
            return "".join(read)
    raise AssertionError(f"ended before step {step}:\n{''.join(read)}")


def run_and_kill(step: int, work_dir: Path, *more: str, world_size: int) -> None:
    """Kills every process of a run at once, as soon as it has printed a step."""
    with running_until(step, work_dir, *more, world_size=world_size) as pids:
        for group in {os.getpgid(pid) for pid in pids}:  # torchrun gives each rank its own session
            os.killpg(group, signal.SIGKILL)


@pytest.fixture(scope="module")
def first_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A run of two processes under torchrun from an empty folder to its end."""
    work_dir = tmp_path_factory.mktemp("first_run")
    with under_torchrun(work_dir, world_size=2) as process:
        output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output
    return work_dir, outcome_of(output)


@pytest.fixture
def work_dir(first_run: tuple[Path, Outcome], tmp_path: Path) -> Path:
    """A work folder with the corpora of the first run and no checkpoint."""
    for corpus in WEIGHTS:
        shutil.copytree(first_run[0] / corpus, tmp_path / corpus)
    return tmp_path


@pytest.fixture
def expected(first_run: tuple[Path, Outcome]) -> Outcome:
    return first_run[1]


def test_digest_is_that_of_the_plan(
    first_run: tuple[Path, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from records import identity

    work_dir, outcome = first_run
    num_samples = NUM_STEPS * GLOBAL_BATCH_SIZE
    source = StaticMixtureWorkSource(
        [Dataset.from_path(name, work_dir / name) for name in WEIGHTS],
        MixtureSpec(WEIGHTS),
        seed=42,
        shuffle_block_size="auto",
        exhausted_policy="repeat",
        max_samples=num_samples,
    )
    records = {name: read_corpus(work_dir / name) for name in WEIGHTS}
    pointers = source.plan.pointers(np.arange(num_samples))
    names = sorted(WEIGHTS)
    ids = [
        identity(records[names[dataset]][shard][sample])
        for dataset, shard, sample in zip(
            pointers.dataset, pointers.shard, pointers.sample, strict=True
        )
    ]
    digest = b""
    for batch in np.array(ids, "<i8").reshape(NUM_STEPS, GLOBAL_BATCH_SIZE):
        digest = hashlib.sha256(digest + batch.tobytes()).digest()
    assert outcome.digest == digest.hex()


def read_corpus(folder: Path) -> list[list[dict[str, object]]]:
    shards = [path.read_text().splitlines() for path in sorted(folder.glob("*.jsonl"))]
    return [[json.loads(line) for line in lines] for lines in shards]


def test_digest_does_not_depend_on_the_number_of_processes(
    work_dir: Path, expected: Outcome
) -> None:
    """One here; four, and one after them, below."""
    assert finish(work_dir, world_size=1).digest == expected.digest


def test_killed_three_times_it_ends_as_if_never_killed(work_dir: Path, expected: Outcome) -> None:
    """The second time it is torchrun alone: ranks that it leaves end by themselves."""
    first, second, third = sorted(random.Random(0).sample(range(1, NUM_STEPS // 2), 3))
    run_and_kill(first, work_dir, world_size=2)
    with running_until(second, work_dir, world_size=2) as (torchrun, *_):
        os.kill(torchrun, signal.SIGKILL)
    run_and_kill(third, work_dir, world_size=2)
    outcome = finish(work_dir, world_size=2)
    assert outcome.digest == expected.digest
    assert 0 < len(outcome.losses) < NUM_STEPS
    assert outcome.losses.items() <= expected.losses.items()  # model and optimizer, too


def test_killed_it_goes_on_with_another_number_of_processes(
    work_dir: Path, expected: Outcome
) -> None:
    run_and_kill(50, work_dir, world_size=4)
    assert finish(work_dir, world_size=1).digest == expected.digest


def test_killed_while_the_corpora_are_written_it_writes_them_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from corpora import write_corpus

    (tmp_path / "code.partial").mkdir()
    (tmp_path / "code.partial" / "shard-00007.jsonl").write_text("cut in the mid")
    write_corpus(tmp_path, "code", [("here", "one\n"), ("there", "one\n")], max_bytes=100)
    assert [path.name for path in tmp_path.iterdir()] == ["code"]
    assert read_corpus(tmp_path / "code") == [
        [{"corpus": "code", "id": 0, "text": "one\n", "source": "here"}]
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--weights code=0.7,poetry=0.3", "name each dataset once: code, prose; got code, poetry"),
        ("--weights code=0.7,code=0.3", "code=0.7,code=0.3 names a dataset twice"),
        ("--weights code", "expected NAME=VALUE, got 'code'"),
        ("--data mine=/no/such/folder", "--data mine=/no/such/folder: no such file or folder"),
        ("--data mine=. --data mine=..", "--data names a dataset twice: mine, mine"),
        ("--steps 0", "0 is not a positive number"),
        ("--global-batch-size 9", "--global-batch-size 9 is not divisible by the 2 processes"),
        ("--width 50", "--width 50 is not a multiple of 4"),
    ],
)
def test_options_that_cannot_work_are_refused(
    arguments: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("WORLD_SIZE", "2")
    from mixture_options import parse_options

    with pytest.raises(SystemExit):
        parse_options(arguments.split())
    assert message in capsys.readouterr().err


def test_data_of_three_formats_partly_in_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """WebDataset shards on S3, Parquet and token rows on disk; killed, and then another world."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    bucket, disk = tmp_path / "buckets" / "data" / "tar", tmp_path / "disk"
    bucket.mkdir(parents=True)
    (disk / "rows").mkdir(parents=True)
    with webdataset.ShardWriter(f"{bucket}/%03d.tar", maxcount=30, verbose=0) as shards:
        for i in range(100):
            shards.write({"__key__": f"{i:03d}", "txt": f"a text of {i} words " * 3})
    texts = {"id": list(range(90)), "text": [f"row {i} of a table" for i in range(90)]}
    parquet.write_table(pyarrow.table(texts), disk / "table.parquet", row_group_size=20)
    for shard in range(2):
        rows = np.random.Generator(np.random.Philox(shard)).integers(0, 256, (40, 65))
        rows.astype(np.uint16).tofile(disk / "rows" / f"{shard}.bin")
    data = [
        "--data=web=s3://data/tar",
        f"--data=table={disk}/table.parquet",
        f"--data=rows={disk}/rows,dtype=uint16,row_length=65",
        "--weights=web=0.5,table=0.3,rows=0.2",
        "--steps=60",
    ]
    cache = [f"--cache-dir={tmp_path / 'cache'}", "--cache-limit=10MB"]
    with s3_server(tmp_path) as url:
        for name, value in {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        expected = finish(tmp_path / "whole", *data, world_size=2)
        run_and_kill(30, tmp_path / "killed", *data, *cache, "--num-workers=2", world_size=2)
        assert finish(tmp_path / "killed", *data, *cache, world_size=1).digest == expected.digest
    assert len(list((tmp_path / "cache").glob("*.shard"))) == 4
