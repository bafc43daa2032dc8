"""The command: what it builds, what it shows, how it ends."""

from __future__ import annotations

import configparser
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import started, wait_until
from toys import write_shards

from zephon_torch.audit import cli
from zephon_torch.errors import DatasetError, WorkerError
from zephon_torch.io import Dataset
from zephon_torch.io.datasets import counting as indexing
from zephon_torch.io.datasets.discovery import Found, find_shards
from zephon_torch.io.formats.json import jsonl
from zephon_torch.io.remote.options import HiddenPath
from zephon_torch.io.storage.files import FileInfo, StoredFile
from zephon_torch.io.storage.local import LocalStorage

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEPHON_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


def run(*arguments: object) -> int:
    return cli.main([str(argument) for argument in arguments])


def sidecars(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*.zidx"))


def no_scan(*arguments: Any) -> int:
    raise AssertionError("read to be indexed")


# --- index ---------------------------------------------------------------------------------------


def test_index_builds_what_is_missing_and_says_what_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    web, code = write_shards(tmp_path / "web", [3, 0, 5]), write_shards(tmp_path / "code", [2])
    Dataset.from_path("web", web / "00.jsonl")
    assert run("index", web, code, "--jobs", 1) == 0
    out, err = capsys.readouterr()
    first, second = out.splitlines()
    assert first.startswith(
        f"{web}: jsonl, 3 shards, 8 samples, 80 bytes; 2 indexed, 1 needed no indexing, "
    )
    assert second.startswith(f"{code}: jsonl, 1 shard, 2 samples, 20 bytes; 1 indexed, 0 needed")
    assert err == ""
    monkeypatch.setattr(jsonl, "scan", no_scan)
    assert len(Dataset.from_path("web", web)) == 8


def test_index_uses_processes_and_gives_what_one_process_gives(tmp_path: Path) -> None:
    """Real processes; several chunks, of which one has many small files."""
    web = write_shards(tmp_path / "a b#ü%20", [1] * 1100)
    manifest = tmp_path / "web.zman"
    command = [sys.executable, "-m", "zephon_torch", "index", str(web), "--jobs", "2"]
    done = subprocess.run(
        [*command, "--manifest", str(manifest)],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    assert "1,100 shards, 1,100 samples" in done.stdout and "1,100 indexed, 0 needed" in done.stdout
    assert done.stdout.endswith(f"{manifest}: manifest of {web}\n")
    assert len(sidecars(web)) == 1100
    dataset = Dataset.from_path("web", web)
    made = Dataset.from_manifest("web", manifest, root=web)
    assert made.fingerprint == dataset.fingerprint
    assert made[777] == dataset[777]


def test_index_names_stale_sidecars(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    web = write_shards(tmp_path / "web", [3, 4])
    assert run("index", web, "--jobs", 1) == 0
    os.utime(web / "01.jsonl", ns=(5, 5))
    capsys.readouterr()
    assert run("index", web, "--jobs", 1) == 0
    out, err = capsys.readouterr()
    assert "1 indexed, 1 needed no indexing" in out
    assert err.startswith(f"zephon-torch: building the index of '{web}/01.jsonl' anew, not using")
    assert err.count("\n") == 1


def test_chunks_have_some_bytes_and_not_too_many_files() -> None:
    def cut(sizes: list[int]) -> list[int]:
        files = [FileInfo(f"{number}.jsonl", size, 1) for number, size in enumerate(sizes)]
        chunks = list(indexing._chunks(Found(LocalStorage("/"), "jsonl", files, ())))
        assert [file for chunk in chunks for file in chunk.files] == files
        return [len(chunk) for chunk in chunks]

    mb = 1 << 20
    assert cut([]) == []
    assert cut([1] * 2500) == [1024, 1024, 452]
    assert cut([40 * mb] * 3) == [1, 1, 1]
    assert cut([30 * mb] * 5) == [2, 2, 1]
    assert cut([mb, 500 * mb, mb, 0]) == [1, 1, 2]


def die(*arguments: Any) -> int:
    os._exit(7)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_process_that_dies_is_an_error_and_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forked, so that the processes have the function that is replaced here."""
    forking = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda name: forking)
    monkeypatch.setattr(indexing, "_CHUNK_FILES", 1)
    monkeypatch.setattr(jsonl, "scan", die)
    found = find_shards(HiddenPath(write_shards(tmp_path / "web", [1] * 4)), None, None)
    with pytest.raises(WorkerError, match=r"a process that built indexes died.*try fewer jobs"):
        indexing.count_in_processes("web", found, jsonl.Options(), 2)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_the_error_of_a_file_comes_from_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: StoredFile, *arguments: Any) -> int:
        raise DatasetError(f"{file.name!r} is bad")

    forking = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda name: forking)
    monkeypatch.setattr(indexing, "_CHUNK_FILES", 1)
    monkeypatch.setattr(jsonl, "scan", refuse)
    found = find_shards(HiddenPath(write_shards(tmp_path / "web", [1] * 40)), None, None)
    with pytest.raises(DatasetError, match="is bad"):
        indexing.count_in_processes("web", found, jsonl.Options(), 2)


@pytest.mark.parametrize("is_killed", [False, True], ids=["ctrl-c", "kill -9"])
def test_its_end_ends_all_processes_and_leaves_no_temporary_file(
    tmp_path: Path, is_killed: bool
) -> None:
    web = write_shards(tmp_path / "web", [1])
    for name in ("a", "b"):  # holes on the disk, that take many seconds to read
        with (web / f"{name}.jsonl").open("wb") as file:
            file.truncate(40 << 30)
    command = [sys.executable, "-m", "zephon_torch", "index", str(web), "--jobs", "2"]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_until(lambda: (web / ".00.jsonl.zidx").exists() or process.poll() is not None)
        assert process.poll() is None
        if is_killed:
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=200)  # to the end: nobody holds the pipe any more
    assert (process.returncode, out) == (-signal.SIGKILL if is_killed else 130, "")
    assert is_killed or err.splitlines()[-1] == "zephon-torch: interrupted"
    assert "Traceback" not in err
    assert sidecars(web) == [".00.jsonl.zidx"] and not list(web.rglob("*.tmp"))


# --- inspect -------------------------------------------------------------------------------------


def test_inspect_shows_what_a_dataset_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", folder, "--samples", 2) == 0
    assert capsys.readouterr().out.splitlines() == [
        "name        'data'",
        "format      jsonl",
        "shards      4",
        "samples     38 (a shard: 0 to 30, median 7)",
        "bytes       408 (a shard: 0 to 327, median 70)",
        f"fingerprint {Dataset.from_path('data', folder).fingerprint}",
        "sample 0: {'id': 0}",
        "sample 1: {'id': 1}",
    ]
    assert run("inspect", folder / "b.jsonl", "--name", "web") == 0
    out = capsys.readouterr().out
    assert "samples     0 (a shard: 0 to 0, median 0)" in out and "sample 0" not in out
    assert Dataset.from_path("web", folder / "b.jsonl").fingerprint in out


def test_inspect_cuts_long_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample = {f"{i}": "x\n" * 5000 for i in range(50)} | {"list": list(range(10**4))}
    (tmp_path / "a.jsonl").write_text(json.dumps(sample) + "\n")
    assert run("inspect", tmp_path) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("sample 0: {'0': 'x") and len(last) == 400


# --- how it ends ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["index", "{}/none"], 1, "no file or folder '{}/none'"),
        (["inspect", "{}/none"], 1, "no file or folder '{}/none'"),
        (["index", "{}/web", "--manifest", "{}/none/x"], 1, "No such file or directory"),
        (["index", "{}/web", "--format", "csv"], 2, "unknown format 'csv'; known are"),
        (["index", "{}/web", "--option", "depth=3"], 2, "'jsonl' has no option 'depth'"),
        (["index", "{}/web", "{}/web", "--manifest", "x"], 2, "is of one dataset: give one PATH"),
        (["index", "{}/web", "--option", "depth"], 2, "'depth' is not like key=value"),
        (["index", "{}/web", "--jobs", "0"], 2, "'0' is no integer >= 1"),
        (["inspect", "{}/web", "--samples", "x"], 2, "'x' is no integer >= 0"),
        (["index"], 2, "the following arguments are required: PATH"),
        ([], 2, "the following arguments are required: COMMAND"),
        (["plant"], 2, "invalid choice: 'plant'"),
    ],
)
def test_errors_are_one_line_and_a_code(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    write_shards(tmp_path / "web", [3])
    try:
        ended: Any = run(*(argument.format(tmp_path) for argument in arguments))
    except SystemExit as error:
        ended = error.code
    err = capsys.readouterr().err
    assert ended == code
    assert err.startswith("zephon-torch") and err.count("\n") == 1
    assert message.format(tmp_path) in err


def test_options_are_json_or_texts() -> None:
    given = [cli._option(text) for text in ("a=3", "b=[1, null]", "c=x=y", 'd="3"', "e=", "f=true")]
    expected = {"a": 3, "b": [1, None], "c": "x=y", "d": "3", "e": "", "f": True}
    assert dict(given) == expected


def test_the_command_is_installed_under_its_name() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    scripts = setup["options.entry_points"]["console_scripts"].split("\n")
    assert "zephon-torch = zephon_torch.audit.cli:main" in scripts


def test_a_path_that_fails_does_not_keep_the_others_from_their_index(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write_shards(tmp_path / "good", [3])
    assert run("index", tmp_path / "none", good) == 1
    out, err = capsys.readouterr()
    assert "1 indexed" in out and sidecars(good)
    assert err.splitlines() == [
        f"zephon-torch: no file or folder '{tmp_path}/none'",
        "zephon-torch: 1 of 2 paths failed",
    ]
