"""Loaders with a cache of shards: copied once, ahead of the loop, and never wrong."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import environment, forked, wait_until
from stores import WebStore

from zephon_torch import DataLoader, PlanMismatch
from zephon_torch.engines import look_ahead as ahead
from zephon_torch.engines.worker_side import Batches, Counted, Task
from zephon_torch.errors import ConfigurationError, DatasetError
from zephon_torch.io import Dataset
from zephon_torch.io.cache import checksums
from zephon_torch.io.cache import shard_cache as cache
from zephon_torch.io.cache.checksums import DamagedCopyWarning
from zephon_torch.io.cache.copies import ShardCopies
from zephon_torch.io.remote import retries
from zephon_torch.loader.cache_options import parse_size

pytest.importorskip("aiohttp")
NUM_SHARDS, SIZE = 6, 12
IDS = list(range(NUM_SHARDS * SIZE))


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEPHON_CACHE_DIR", str(tmp_path / "indexes"))
    monkeypatch.setattr(retries, "DELAYS", (0.001,) * 4)


@pytest.fixture
def store() -> Iterator[WebStore]:
    with WebStore() as store:
        names = [f"{number}.jsonl" for number in range(NUM_SHARDS)]
        for number, name in enumerate(names):
            store.files[f"/d/{name}"] = lines(range(number * SIZE, (number + 1) * SIZE))
        listing = "".join(f'<a href="{name}">{name}</a> ' for name in names).encode()
        store.files |= {"/d": listing, "/d/": listing}
        yield store


def lines(ids: Any) -> bytes:
    return "".join(json.dumps({"id": i, "pad": "." * 80}) + "\n" for i in ids).encode()


def dataset_of(store: WebStore) -> Dataset:
    dataset = Dataset.from_path("x", f"{store.url}/d/*.jsonl")
    assert dataset.num_shards == NUM_SHARDS
    store.asked.clear()
    return dataset


def loader_of(dataset: Dataset, folder: Path, **options: Any) -> DataLoader[Any]:
    given: dict[str, Any] = {"cache_dir": folder, "cache_limit": "1MB", "batch_size": 4}
    return DataLoader(dataset, **(given | options))


def ids_of(loader: DataLoader[Any]) -> list[int]:
    return [int(i) for batch in loader for i in batch["id"]]


def num_got(store: WebStore) -> list[int]:
    return [store.num_asked("GET", f"/d/{number}.jsonl") for number in range(NUM_SHARDS)]


def files_in(folder: Path) -> list[str]:
    return sorted({path.suffix for path in folder.glob("*")})


def test_shards_are_copied_once_and_need_no_request_again(store: WebStore, tmp_path: Path) -> None:
    dataset = dataset_of(store)
    with loader_of(dataset, tmp_path / "c", shuffle=True) as loader:
        first = ids_of(loader)
        stats = loader.stats.cache
        assert stats.downloads == NUM_SHARDS and stats.bypassed == 0
        assert stats.downloaded_bytes == int(dataset.shard_num_bytes.sum())
    assert sorted(first) == IDS
    assert num_got(store) == [1] * NUM_SHARDS
    store.asked.clear()
    with loader_of(dataset, tmp_path / "c", shuffle=True) as loader:
        assert ids_of(loader) == first
        assert (loader.stats.cache.downloads, loader.stats.cache.hits) == (0, NUM_SHARDS)
    assert not store.asked
    assert files_in(tmp_path / "c") == [".lock", ".shard", ".sum"]  # indexes are where they were


def test_the_order_is_the_same_without_a_cache(store: WebStore, tmp_path: Path) -> None:
    dataset = dataset_of(store)
    with loader_of(dataset, tmp_path / "c", shuffle=True, seed=3) as loader:
        expected = ids_of(loader)
    with DataLoader(dataset, batch_size=4, shuffle=True, seed=3) as loader:
        assert ids_of(loader) == expected


def test_a_copy_that_rots_is_downloaded_again(store: WebStore, tmp_path: Path) -> None:
    dataset = dataset_of(store)
    with loader_of(dataset, tmp_path / "c", shuffle=True) as loader:
        first = ids_of(loader)
    rotten = sorted((tmp_path / "c").glob("*.shard"))[1]
    content, status = rotten.read_bytes(), rotten.stat()
    rotten.write_bytes(content.replace(b"1", b"7", 1))
    os.utime(rotten, ns=(status.st_atime_ns, status.st_mtime_ns))
    checksums._compared.clear()  # as in another process
    store.asked.clear()
    with (
        pytest.warns(DamagedCopyWarning, match=f"'{rotten}', the copy of 'http.*/d/.*jsonl', is"),
        loader_of(dataset, tmp_path / "c", shuffle=True) as loader,
    ):
        assert ids_of(loader) == first
        assert loader.stats.cache.downloads == sum(num_got(store)) == 1
    assert rotten.read_bytes() == content


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_workers_share_one_copy(store: WebStore, tmp_path: Path, context: str) -> None:
    dataset = dataset_of(store)
    options = {"num_workers": 2, "multiprocessing_context": context, "shuffle": True}
    with loader_of(dataset, tmp_path / "c", **options) as loader:
        loader.batch(0)  # this process has used the store before it forks
        assert sorted(ids_of(loader)) == IDS
    assert num_got(store) == [1] * NUM_SHARDS


def test_local_shards_are_not_copied(folder: Path, tmp_path: Path) -> None:
    with loader_of(Dataset.from_path("x", folder), tmp_path / "c") as loader:
        assert ids_of(loader) == list(range(38))
    assert files_in(tmp_path / "c") == [".lock"]


def test_without_room_records_are_read_where_they_are(store: WebStore, tmp_path: Path) -> None:
    dataset = dataset_of(store)
    largest = int(dataset.shard_num_bytes.max())
    held = cache.ShardCache(tmp_path / "c", largest).hold(
        "other", largest, lambda stream: [stream.write(b"x" * largest)] and None
    )
    assert held is not None
    with loader_of(dataset, tmp_path / "c", cache_limit=largest) as loader:
        assert ids_of(loader) == IDS
        assert loader.stats.cache.bypassed == NUM_SHARDS * SIZE // 4
        assert loader.stats.cache.downloads == 0
        held.close()
        assert ids_of(loader) == IDS


def test_a_limit_of_one_shard_is_enough(store: WebStore, tmp_path: Path) -> None:
    dataset = dataset_of(store)
    largest = int(dataset.shard_num_bytes.max())
    with loader_of(dataset, tmp_path / "c", cache_limit=largest) as loader:
        assert ids_of(loader) == IDS
    used = sum(path.stat().st_size for path in (tmp_path / "c").glob("*.shard"))
    assert used <= largest


def test_files_without_any_stamp_are_not_copied(store: WebStore, tmp_path: Path) -> None:
    for path in store.files:
        store.headers[path] = {}
    with loader_of(dataset_of(store), tmp_path / "c") as loader:
        assert ids_of(loader) == IDS
        assert loader.stats.cache.downloads == 0 and loader.stats.cache.bypassed


def test_limits_that_cannot_work_are_refused(store: WebStore, tmp_path: Path) -> None:
    dataset = dataset_of(store)
    with pytest.raises(ConfigurationError, match=r"cache_limit is 1,000 bytes, but shard 'http.*'"):
        loader_of(dataset, tmp_path / "c", cache_limit="1kB")
    largest = int(dataset.shard_num_bytes.max())
    with pytest.raises(ConfigurationError, match="2 readers have one open each: raise"):
        loader_of(dataset, tmp_path / "c", cache_limit=2 * largest - 1, num_workers=2)
    for options in ({"cache_limit": None}, {"cache_dir": None}):
        with pytest.raises(ConfigurationError, match="give both"):
            loader_of(dataset, tmp_path / "c", **options)
    for limit in ("", "GB", "-1GB", "1XB", "1e9", 0, 1.5):
        with pytest.raises(ConfigurationError, match="cache_limit is"):
            loader_of(dataset, tmp_path / "c", cache_limit=limit)


def test_sizes() -> None:
    sizes = {"20GB": 20 * 10**9, "500MiB": 500 << 20, "1.5 kB": 1500, "7": 7, "2T": 2 * 10**12}
    assert [parse_size("x", text) for text in sizes] == list(sizes.values())


def test_a_copy_of_a_loader_counts_for_itself(store: WebStore, tmp_path: Path) -> None:
    loader = loader_of(dataset_of(store), tmp_path / "c")
    other = copy.deepcopy(loader)
    with other:
        assert ids_of(other) == IDS
    assert (loader.stats.cache.downloads, other.stats.cache.downloads) == (0, NUM_SHARDS)


# --- ahead ---------------------------------------------------------------------------------------


def ahead_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "zephon-ahead"]


@pytest.mark.parametrize("options", [{"num_threads": 0}, {}, {"num_workers": 1}])
def test_what_comes_is_copied_ahead_of_the_loop(
    store: WebStore, tmp_path: Path, options: dict[str, Any]
) -> None:
    with loader_of(dataset_of(store), tmp_path / "c", prefetch_factor=1, **options) as loader:
        batches = iter(loader)
        next(batches)
        wait_until(lambda: num_got(store) == [1] * NUM_SHARDS)
        assert [int(i) for batch in batches for i in batch["id"]] == IDS[4:]
        assert not ahead_threads()


def test_no_more_is_held_ahead_than_half_of_the_limit(store: WebStore, tmp_path: Path) -> None:
    dataset = dataset_of(store)
    largest = int(dataset.shard_num_bytes.max())
    options = {"cache_limit": 4 * largest, "num_threads": 0}
    with loader_of(dataset, tmp_path / "c", **options) as loader:
        batches = iter(loader)
        next(batches)
        wait_until(lambda: num_got(store)[:2] == [1, 1])
        time.sleep(0.1)
        assert num_got(store) == [1, 1, 0, 0, 0, 0]
        for _ in range(SIZE // 4):
            next(batches)
        wait_until(lambda: num_got(store)[:3] == [1, 1, 1])
        assert [int(i) for batch in batches for i in batch["id"]] == IDS[SIZE + 4 :]
        assert loader.stats.cache.bypassed == 0
    assert max(num_got(store)) == 1


def test_no_more_shards_are_held_ahead_than_there_are_descriptors_for(
    store: WebStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "_MAX_WANTED", 2)
    with loader_of(dataset_of(store), tmp_path / "c", num_threads=0) as loader:
        batches = iter(loader)
        next(batches)
        wait_until(lambda: num_got(store)[:2] == [1, 1])
        time.sleep(0.1)
        assert num_got(store) == [1, 1, 0, 0, 0, 0]
        for _ in range(SIZE // 4):
            next(batches)
        wait_until(lambda: num_got(store)[:3] == [1, 1, 1])
        assert [int(i) for batch in batches for i in batch["id"]] == IDS[SIZE + 4 :]
    assert max(num_got(store)) == 1


def test_a_shard_that_is_too_large_to_be_held_ahead_keeps_no_other_from_it(
    store: WebStore, tmp_path: Path
) -> None:
    store.files["/d/0.jsonl"] = lines(range(SIZE * 8))
    dataset = dataset_of(store)
    limit = int(dataset.shard_num_bytes.max())
    with loader_of(dataset, tmp_path / "c", cache_limit=limit, num_threads=0) as loader:
        batches = iter(loader)
        for _ in range(SIZE * 8 // 4 - 1):
            next(batches)
        assert ahead_threads()
        assert len(list(batches)) == 1 + (NUM_SHARDS - 1) * SIZE // 4


def test_a_shared_machine_is_shared(
    store: WebStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "100")
    with loader_of(dataset_of(store), tmp_path / "c", cache_limit=10_000) as loader:
        batches = iter(loader)
        next(batches)
        assert not ahead_threads()


@pytest.mark.parametrize(
    ("way", "num_workers"), [("close", 0), ("drop", 0), ("drop", 1), ("end", 0)]
)
def test_threads_end_with_the_iteration_and_leave_no_part(
    store: WebStore, tmp_path: Path, way: str, num_workers: int
) -> None:
    dataset = dataset_of(store)
    store.fault = lambda method, path, count: "slow" if path[3] > "1" else None
    loader = loader_of(dataset, tmp_path / "c", num_workers=num_workers)
    batches = iter(loader)
    next(batches)
    assert ahead_threads()
    if way == "close":
        loader.close()
    elif way == "drop":
        del batches
    else:
        list(batches)
    wait_until(lambda: not ahead_threads())
    assert files_in(tmp_path / "c") == [".lock", ".shard", ".sum"]
    loader.close()


def test_a_copy_that_nobody_wants_any_more_is_given_up(store: WebStore, tmp_path: Path) -> None:
    dataset = dataset_of(store)
    copies = ShardCopies(cache.ShardCache(tmp_path / "c", 10_000))
    file = dataset.remote_file(0)
    assert file is not None
    assert copies.hold(file, is_wanted=lambda: False) is None
    assert files_in(tmp_path / "c") == [".lock"]
    shutil.rmtree(tmp_path / "c")
    held = copies.hold(file)
    assert held is not None and held.is_new
    held.close()


def test_failures_ahead_are_left_to_the_reader(store: WebStore, tmp_path: Path) -> None:
    dataset = dataset_of(store)
    store.fault = lambda method, path, count: "500" if path == "/d/2.jsonl" else None
    with loader_of(dataset, tmp_path / "c") as loader:
        seen: list[int] = []
        with pytest.raises(DatasetError, match=r"cannot read '.*/d/2.jsonl' after 5 tries"):
            for batch in loader:
                seen += batch["id"].tolist()
        assert seen == IDS[: 2 * SIZE]
    assert files_in(tmp_path / "c") == [".lock", ".shard", ".sum"]


@pytest.mark.parametrize(
    ("context", "is_persistent"), [("fork", False), ("fork", True), ("spawn", True)]
)
def test_counts_come_home_from_workers(
    store: WebStore, tmp_path: Path, context: str, is_persistent: bool
) -> None:
    dataset = dataset_of(store)
    given = {"multiprocessing_context": context, "persistent_workers": is_persistent}
    with loader_of(dataset, tmp_path / "c", num_workers=2, **given) as loader:
        for epoch in (1, 2):
            assert sorted(ids_of(loader)) == IDS
            counts = loader.stats.cache
            assert (counts.downloads, counts.bypassed) == (NUM_SHARDS, 0)
            assert counts.downloaded_bytes == int(dataset.shard_num_bytes.sum())
            # a shard has three batches: both workers open it, and again where they are new ones
            opened = 2 * NUM_SHARDS * (1 if is_persistent else epoch)
            assert counts.hits + counts.downloads >= opened and counts.hits <= 2 * opened
            assert counts.wait_seconds > 0


def test_a_worker_counts_nothing_that_the_trainer_has_counted(
    store: WebStore, tmp_path: Path
) -> None:
    with loader_of(dataset_of(store), tmp_path / "c", num_threads=0) as loader:
        assert ids_of(loader) == IDS
        before = loader.stats.cache.counts()
        batches = Batches(loader._pipeline, None)
        batches.begin()
        items = list(loader._splitter.items(0, 0))
        first, second = batches[Task(0, items[:1])], batches[Task(1, items[:1])]
        assert before[0] == NUM_SHARDS
        assert isinstance(first, Counted) and first.counts[:3] == (1, 0, 0)  # one shard, opened
        assert isinstance(second, list)  # nothing to tell


# --- interrupted, and changed --------------------------------------------------------------------


def test_downloads_that_are_cut_are_made_whole(store: WebStore, tmp_path: Path) -> None:
    """C15."""
    dataset = dataset_of(store)
    store.fault = lambda method, path, count: "cut" if method == "GET" and not count else None
    with loader_of(dataset, tmp_path / "c", shuffle=True) as loader:
        assert sorted(ids_of(loader)) == IDS
    assert files_in(tmp_path / "c") == [".lock", ".shard", ".sum"]


SCRIPT = """
import sys
from zephon_torch import DataLoader
from zephon_torch.io import Dataset

url, folder = sys.argv[1:]
dataset = Dataset.from_path("x", url)
loader = DataLoader(dataset, batch_size=4, cache_dir=folder, cache_limit="1MB", num_workers=1)
for step, batch in enumerate(loader):
    print(*batch["id"].tolist(), flush=True)
    if step == 3:
        break
"""


def test_a_run_killed_while_it_downloads_and_one_that_leaves_early(
    store: WebStore, tmp_path: Path
) -> None:
    """C15: the second run works on what the first one left; it exits in the middle, and cleanly."""
    dataset = dataset_of(store)
    store.fault = lambda method, path, count: "slow" if path > "/d/2" else None
    store.slow_seconds = 600
    with forked(lambda: ids_of(loader_of(dataset, tmp_path / "c"))):
        wait_until(lambda: files_in(tmp_path / "c") == [".lock", ".part", ".shard", ".sum"])
    assert files_in(tmp_path / "c") == [".lock", ".part", ".shard", ".sum"]
    store.slow_seconds = 0.8
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, f"{store.url}/d/*.jsonl", str(tmp_path / "c")],
        env=environment(), capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert [int(word) for word in done.stdout.split()] == IDS[:16]
    assert files_in(tmp_path / "c") == [".lock", ".shard", ".sum"]


def test_a_copy_of_another_version_is_never_used(store: WebStore, tmp_path: Path) -> None:
    dataset = dataset_of(store)
    with loader_of(dataset, tmp_path / "c") as loader:
        assert ids_of(loader) == IDS
    store.files["/d/2.jsonl"] = store.files["/d/2.jsonl"].replace(b'"id": 2', b'"id": 7')
    with loader_of(dataset, tmp_path / "c") as loader:
        assert ids_of(loader) == IDS  # the dataset as it was made: its copies are all there
    with pytest.warns(UserWarning, match="anew"):
        changed = dataset_of(store)
    with loader_of(changed, tmp_path / "c") as loader:
        assert ids_of(loader) != IDS
        assert loader.stats.cache.downloads == 1


def test_a_file_replaced_while_it_is_copied_is_refused(store: WebStore, tmp_path: Path) -> None:
    dataset = dataset_of(store)

    def replaced(method: str, path: str, count: int) -> str | None:
        if method == "GET" and path == "/d/2.jsonl":
            store.headers[path] = {"ETag": '"other"'}
        return None

    store.fault = replaced
    with loader_of(dataset, tmp_path / "c") as loader:
        with pytest.raises(DatasetError, match=r"/d/2.jsonl' changed since the dataset was made"):
            ids_of(loader)


def test_changed_data_is_another_plan(store: WebStore, tmp_path: Path) -> None:
    """C16, over HTTP; the same files at another place are the same."""
    loader = loader_of(dataset_of(store), tmp_path / "c")
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    loader.close()
    for number in range(NUM_SHARDS):
        path = tmp_path / "local" / f"{number}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(store.files[f"/d/{number}.jsonl"])
    local = DataLoader(Dataset.from_path("x", tmp_path / "local"), batch_size=4)
    local.load_state_dict(state)
    assert ids_of(local) == IDS[4:]
    store.files["/d/5.jsonl"] += lines([999])
    with pytest.warns(UserWarning, match="anew"):
        changed = loader_of(dataset_of(store), tmp_path / "c")
    changed.load_state_dict(state)
    with pytest.raises(PlanMismatch, match="dataset 'x'"):
        len(changed)
    changed.load_state_dict(state, strict=False)
    assert ids_of(changed) == [*IDS[4:], 999]
    changed.close()
