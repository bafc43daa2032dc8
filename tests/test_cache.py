"""The cache of shards: made once, whole or not at all, and never more bytes than allowed."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import signal
import stat
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import exit_code, forked, state, wait_until

from zephon_torch.errors import ConfigurationError, DatasetError, StorageError
from zephon_torch.io.cache import checksums
from zephon_torch.io.cache.checksums import DamagedCopyWarning
from zephon_torch.io.cache.shard_cache import Held, ShardCache
from zephon_torch.support import waits

SIZE = 1000
STUCK = 600  # seconds: until it is killed


def content(key: str, num_bytes: int = SIZE) -> bytes:
    return random.Random(key).randbytes(num_bytes)


def writes(key: str, num_bytes: int = SIZE) -> Callable[[BinaryIO], None]:
    def make(stream: BinaryIO) -> None:
        made = content(key, num_bytes)
        stream.write(made[:300])
        stream.write(made[300:])

    return make


def never(stream: BinaryIO) -> None:
    raise AssertionError("made again")


def hold(cache: ShardCache, key: str, num_bytes: int = SIZE) -> Held:
    held = cache.hold(key, num_bytes, writes(key, num_bytes))
    assert held is not None
    assert Path(held.path).read_bytes() == content(key, num_bytes)
    return held


def put(cache: ShardCache, *keys: str) -> None:
    for key in keys:
        hold(cache, key).close()


def kept(cache: ShardCache, *keys: str) -> str:
    """Those of the keys that are there."""
    names = {path.stem for path in entries(cache)}
    return "".join(key for key in keys if hashlib.sha256(key.encode()).hexdigest() in names)


def entries(cache: ShardCache) -> list[Path]:
    return sorted(Path(cache.folder).glob("*.shard"))


def parts(cache: ShardCache) -> list[Path]:
    return sorted(Path(cache.folder).glob("*.part"))


def used_bytes(cache: ShardCache) -> int:
    """Of entries and parts, while nobody makes room; a checksum takes a line beside."""
    total = 0
    with cache._locked():
        for file in os.scandir(cache.folder):
            if file.name.endswith((".sum", ".tmp")):
                continue
            try:
                total += file.stat().st_size
            except FileNotFoundError:
                continue
    return total


@pytest.fixture
def cache(tmp_path: Path) -> ShardCache:
    return ShardCache(tmp_path / "cache", 3 * SIZE)


def test_an_entry_is_made_once_and_then_found(cache: ShardCache) -> None:
    with hold(cache, "a") as first, hold(cache, "a") as second:
        assert (first.is_new, second.is_new) == (True, False)
        assert first.path == second.path
    again = pickle.loads(pickle.dumps(cache)).hold("a", SIZE, never)
    assert again is not None and not again.is_new
    again.close()
    again.close()
    assert not parts(cache)


def test_names_are_hashes_whatever_the_key(cache: ShardCache) -> None:
    put(cache, "../../x", "s3://b/ü #?%")
    held = cache.hold("\udcff\ud800", 0, lambda stream: None)
    assert held is not None
    os.unlink(held.path)
    assert [len(path.stem) for path in entries(cache)] == [64, 64]


def test_those_held_longest_ago_go_first(cache: ShardCache) -> None:
    put(cache, "a", "b", "c", "a", "d")
    assert kept(cache, "a", "b", "c", "d") == "acd"
    put(cache, "c", "e")
    assert kept(cache, "a", "c", "d", "e") == "cde"


def test_what_is_held_never_goes(cache: ShardCache) -> None:
    held = [hold(cache, key) for key in "ab"]
    put(cache, "c", "d", "e")
    assert kept(cache, "a", "b", "e") == "abe"
    held.append(hold(cache, "f"))
    assert cache.hold("g", SIZE, never) is None
    assert kept(cache, "a", "b", "e", "f", "g") == "abf"
    assert [Path(one.path).read_bytes() for one in held] == [content(key) for key in "abf"]
    held[0].close()
    hold(cache, "g").close()
    assert kept(cache, "a", "b", "f", "g") == "bfg"


def test_nothing_goes_in_vain(cache: ShardCache) -> None:
    put(cache, "a", "b")
    with hold(cache, "c"):
        assert cache.hold("large", 2 * SIZE + 1, never) is None
        assert kept(cache, "a", "b", "c") == "abc"
        hold(cache, "large", 2 * SIZE).close()
    assert used_bytes(cache) == 3 * SIZE


def test_what_is_dropped_is_no_longer_held(cache: ShardCache) -> None:
    held = [hold(cache, key) for key in "abc"]
    del held[0]
    put(cache, "d")


def test_larger_than_the_limit_is_refused(cache: ShardCache) -> None:
    with pytest.raises(ConfigurationError, match=r"3,001 bytes .* limit is 3,000 bytes"):
        cache.hold("a", 3 * SIZE + 1, never)


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "1"])
def test_a_limit_is_a_positive_number(tmp_path: Path, limit: int) -> None:
    with pytest.raises(ConfigurationError, match="limit of the cache"):
        ShardCache(tmp_path, limit)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"file/cache' cannot be used .*: name a folder"):
        ShardCache(tmp_path / "file" / "cache", 1)


def test_a_maker_that_fails_leaves_nothing(cache: ShardCache) -> None:
    def fails(stream: BinaryIO) -> None:
        stream.write(b"half")
        raise KeyError("network")

    with pytest.raises(KeyError, match="network"):
        cache.hold("a", SIZE, fails)
    assert not entries(cache) and not parts(cache)
    put(cache, "a")


@pytest.mark.parametrize("num_bytes", [0, SIZE - 1, SIZE + 1])
def test_a_maker_must_write_what_it_said(cache: ShardCache, num_bytes: int) -> None:
    with pytest.raises(DatasetError, match="bytes"):
        cache.hold("a", SIZE, writes("a", num_bytes))
    assert not entries(cache) and not parts(cache)


def test_an_empty_entry_is_one(cache: ShardCache) -> None:
    hold(cache, "a", 0).close()
    assert not hold(cache, "a", 0).is_new


def test_a_dirty_folder_is_adopted(cache: ShardCache) -> None:
    put(cache, "a", "b", "c")
    with hold(cache, "b") as b, hold(cache, "c") as c:
        Path(b.path).write_bytes(b"cut")
        dead = Path(c.path).with_name("0" * 64 + ".part")
    dead.write_bytes(b"x" * 500)
    foreign = Path(cache.folder, "0.shard")
    foreign.write_bytes(b"x" * 5000)
    smaller = ShardCache(cache.folder, 2 * SIZE)
    assert not dead.exists()
    assert kept(smaller, "a", "b", "c") == "bc"  # a was held longest ago
    with pytest.warns(DamagedCopyWarning, match="is damaged: it has 3 bytes, 1,000 when it was"):
        b = hold(smaller, "b")
    with b, hold(smaller, "c") as c:
        assert (b.is_new, c.is_new) == (True, False)  # b was too short
    assert foreign.stat().st_size == 5000


def test_threads_that_ask_at_once_get_what_one_of_them_made(cache: ShardCache) -> None:
    made: list[int] = []
    results: list[Held | None] = []

    def slow(stream: BinaryIO) -> None:
        made.append(threading.get_ident())
        time.sleep(0.1)
        writes("a")(stream)

    def ask() -> None:
        results.append(cache.hold("a", SIZE, slow))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert sorted(held.is_new for held in results if held is not None) == [False] * 7 + [True]


def killed(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert exit_code(pid) == -signal.SIGKILL


def stuck(stream: BinaryIO) -> None:
    stream.write(b"x" * 500)
    time.sleep(STUCK)


@pytest.mark.parametrize("is_waited_for", [False, True])
def test_after_a_killed_maker_another_one_makes_it(cache: ShardCache, is_waited_for: bool) -> None:
    with ExitStack() as children:
        maker = children.enter_context(forked(lambda: cache.hold("a", SIZE, stuck)))
        wait_until(lambda: [part.stat().st_size for part in parts(cache)] == [SIZE])
        if is_waited_for:
            waiter = children.enter_context(forked(lambda: put(cache, "a")))
            wait_until(lambda: state(waiter) == "S")
        killed(maker)
        assert not is_waited_for or exit_code(waiter) == 0
    put(cache, "a")
    assert not parts(cache)


def test_the_part_of_a_killed_maker_makes_room(cache: ShardCache) -> None:
    with forked(lambda: cache.hold("a", 3 * SIZE, stuck)) as maker:
        wait_until(lambda: used_bytes(cache) == 3 * SIZE)
        assert cache.hold("b", SIZE, never) is None  # counted in full from the beginning
        killed(maker)
    put(cache, "b")
    assert not parts(cache)


def test_a_killed_holder_holds_nothing(cache: ShardCache) -> None:
    read, write = os.pipe()

    def hold_for_ever() -> None:
        held = [hold(cache, key) for key in "abc"]
        os.write(write, b"%d" % len(held))
        time.sleep(STUCK)

    with forked(hold_for_ever) as holder:
        assert os.read(read, 1) == b"3"
        assert cache.hold("d", SIZE, never) is None
        killed(holder)
    put(cache, "d")


def test_a_forked_child_holds_nothing_and_lets_nothing_go(cache: ShardCache) -> None:
    held = [hold(cache, key) for key in "abc"]
    read, write = os.pipe()

    def lives_on() -> None:
        for one in held:
            one.close()
        assert cache.hold("d", SIZE, never) is None  # the parent's are still held
        os.write(write, b"1")
        time.sleep(STUCK)

    with forked(lives_on):
        assert os.read(read, 1) == b"1"
        assert cache.hold("d", SIZE, never) is None
        held.pop().close()
        put(cache, "d")  # although the child had a copy of the lock


def test_a_maker_that_forks_and_dies_is_not_waited_for(cache: ShardCache, tmp_path: Path) -> None:
    grandchild = tmp_path / "pid"

    def forks(stream: BinaryIO) -> None:
        with forked(lambda: time.sleep(STUCK)) as pid:
            written = tmp_path / "pid.tmp"
            written.write_text(str(pid))
            written.rename(grandchild)
            time.sleep(STUCK)

    with forked(lambda: cache.hold("a", SIZE, forks)) as maker:
        wait_until(grandchild.exists)
        try:
            killed(maker)
            put(cache, "a")
        finally:
            os.kill(int(grandchild.read_text()), signal.SIGKILL)


def visit(cache: ShardCache, seed: int) -> None:
    rng = random.Random(seed)
    held: list[Held] = []
    for _ in range(150):
        key = str(rng.randrange(12))
        size = 400 + 50 * int(key)
        one = cache.hold(key, size, writes(key, size))
        if one is not None:
            assert Path(one.path).read_bytes() == content(key, size)
            held.append(one)
        while len(held) > 2:
            held.pop(rng.randrange(len(held))).close()


def test_many_processes_never_exceed_the_limit(cache: ShardCache) -> None:
    """Some of them are killed; what is read is right, what is left is usable."""
    seeds: Iterator[int] = iter(range(1000))
    rng = random.Random(0)
    running: list[int] = []
    with ExitStack() as children:
        for _ in range(8):
            while len(running) < 3:
                visitor = partial(visit, cache, next(seeds))
                running.append(children.enter_context(forked(visitor)))
            for _ in range(20):
                assert used_bytes(cache) <= cache.limit_bytes
                time.sleep(0.001)
            killed_or_done = running.pop(rng.randrange(len(running)))
            os.kill(killed_or_done, signal.SIGKILL)
            assert exit_code(killed_or_done) in (0, -signal.SIGKILL)
        assert [exit_code(pid) for pid in running] == [0] * len(running)
    visit(cache, 0)
    assert not parts(cache)


steps = st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), max_size=25)


@settings(max_examples=25)
@given(steps=steps)
def test_any_sequence_keeps_what_is_held_and_the_limit(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, bool]]
) -> None:
    cache = ShardCache(tmp_path_factory.mktemp("cache"), 2500)
    sizes = {key: 300 * (at + 1) for at, key in enumerate("abcdef")}
    held: dict[str, Held] = {}
    for key, is_wanted in steps:
        if not is_wanted:
            if key in held:
                held.pop(key).close()
            continue
        one = cache.hold(key, sizes[key], writes(key, sizes[key]))
        others = sum(sizes[other] for other in held if other != key)
        assert (one is None) == (others + sizes[key] > 2500)
        if one is not None:
            held.setdefault(key, one)
        for other, entry in held.items():
            assert Path(entry.path).read_bytes() == content(other, sizes[other])
        assert used_bytes(cache) <= 2500


def test_waiting_for_a_maker_that_hangs_can_be_given_up(cache: ShardCache) -> None:
    """It may be another process, stopped or stalled, while this one has to end."""
    begun, stop = threading.Event(), threading.Event()

    def make(stream: Any) -> None:
        begun.set()
        stop.wait(20)
        stream.write(b"abc")

    maker = threading.Thread(target=lambda: cache.hold("k", 3, make))
    maker.start()
    assert begun.wait(10)
    with waits.wanted_until(begun.is_set), pytest.raises(StorageError, match="given up"):
        cache.hold("k", 3, lambda stream: None)
    stop.set()
    maker.join()
    held = cache.hold("k", 3, make)
    assert held is not None and not held.is_new


# --- entries that are damaged, and names that lead elsewhere -------------------------------------


def in_a_new_process(function: Callable[[], object]) -> None:
    """Run where nothing was compared yet."""

    def anew() -> None:
        checksums._compared.clear()
        function()

    with forked(anew) as pid:
        assert exit_code(pid) == 0


def damage(path: Path) -> None:
    """Change one bit; size and times stay."""
    status = path.stat()
    with open(path, "r+b") as stream:
        stream.seek(500)
        (byte,) = stream.read(1)
        stream.seek(500)
        stream.write(bytes([byte ^ 1]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_damaged_entry_is_made_anew_and_named(cache: ShardCache) -> None:
    put(cache, "a")
    (entry,) = entries(cache)
    damage(entry)

    def warns() -> None:
        told = rf"'{entry}', the copy of 's3://b/a', is damaged: its checksum is .* made anew"
        with pytest.warns(DamagedCopyWarning, match=told):
            held = cache.hold("a", SIZE, writes("a"), "s3://b/a")
        assert held is not None and held.is_new
        assert Path(held.path).read_bytes() == content("a")

    in_a_new_process(warns)
    in_a_new_process(lambda: hold(cache, "a"))  # sound again: no warning
    assert not hold(cache, "a").is_new


def test_a_damaged_entry_that_others_hold_goes_all_the_same(cache: ShardCache) -> None:
    with hold(cache, "a") as before:
        damage(Path(before.path))

        def warns() -> None:
            with pytest.warns(DamagedCopyWarning, match="is damaged"):
                assert hold(cache, "a").is_new

        in_a_new_process(warns)
        assert Path(before.path).read_bytes() == content("a")


def test_the_checksum_is_compared_once_per_process_and_entry(
    cache: ShardCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    crc32 = checksums._crc32
    monkeypatch.setattr(checksums, "_crc32", lambda *a: read.append(a[1]) or crc32(*a))  # type: ignore
    put(cache, "a", "a")
    assert read == []  # made here
    checksums._compared.clear()
    put(cache, "a", "a")
    assert read == [SIZE]
    in_a_new_process(lambda: put(cache, "b", "c", "d", "a"))
    put(cache, "a")
    assert read == [SIZE, SIZE]  # another entry under that name


def test_entries_without_a_checksum_are_used_and_get_one(cache: ShardCache) -> None:
    put(cache, "a")
    (entry,) = entries(cache)
    line = Path(f"{entry}.sum")
    line.unlink()
    in_a_new_process(lambda: cache.hold("a", SIZE, never))
    assert line.read_text().startswith(f"crc32 {zlib.crc32(content('a')):08x} {SIZE} ")
    damage(entry)
    with pytest.warns(DamagedCopyWarning, match=f"{entry}"):
        assert hold(cache, "a").is_new


@pytest.mark.parametrize("text", ["", "crc32 xyz", "\xff" * 500])
def test_a_checksum_that_is_none_makes_the_entry_anew(cache: ShardCache, text: str) -> None:
    put(cache, "a")
    Path(f"{entries(cache)[0]}.sum").write_text(text)
    with pytest.warns(DamagedCopyWarning, match="its checksum cannot be read"):
        assert hold(cache, "a").is_new


def test_checksums_can_be_left_out(cache: ShardCache, monkeypatch: pytest.MonkeyPatch) -> None:
    put(cache, "a")
    damage(entries(cache)[0])
    checksums._compared.clear()
    monkeypatch.setenv("ZEPHON_VERIFY_COPIES", "0")
    held = cache.hold("a", SIZE, never)
    assert held is not None
    held.close()
    monkeypatch.setenv("ZEPHON_VERIFY_COPIES", "no")
    with pytest.raises(ConfigurationError, match="ZEPHON_VERIFY_COPIES must be 0 or 1, got 'no'"):
        cache.hold("a", SIZE, never)
    monkeypatch.setenv("ZEPHON_VERIFY_COPIES", "1")
    with pytest.warns(DamagedCopyWarning):
        put(cache, "a")


def test_what_goes_takes_its_checksum_along(cache: ShardCache) -> None:
    put(cache, *"abcdefg")
    names = sorted(path.name for path in Path(cache.folder).iterdir())
    assert [name[64:] for name in names[:-1]] == [".shard", ".shard.sum"] * 3
    assert names[-1] == "zephon-cache.lock"


@pytest.mark.parametrize("kind", ["link", "hard link", "dead link", "folder", "pipe"])
@pytest.mark.parametrize("ending", [".part", ".shard", ".shard.sum", "lock"])
def test_nothing_is_written_through_what_has_the_name_of_a_file_of_the_cache(
    cache: ShardCache, tmp_path: Path, kind: str, ending: str
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious" * 125)
    stem = Path(cache.folder, hashlib.sha256(b"a").hexdigest())
    path = Path(f"{stem}{ending}")
    if ending == "lock":
        path = Path(cache.folder, "zephon-cache.lock")
    if ending == ".shard.sum":
        put(cache, "a")
        checksums._compared.clear()
    path.unlink(missing_ok=True)
    {
        "link": lambda: path.symlink_to(victim),
        "hard link": lambda: path.hardlink_to(victim),
        "dead link": lambda: path.symlink_to(tmp_path / "nowhere"),
        "folder": path.mkdir,
        "pipe": lambda: os.mkfifo(path),
    }[kind]()
    with pytest.raises(ConfigurationError, match=f"'{path}' is a folder, a link or something"):
        cache.hold("a", SIZE, writes("a"))
    assert victim.read_bytes() == b"precious" * 125 and not (tmp_path / "nowhere").exists()
    path.rmdir() if kind == "folder" else path.unlink()
    hold(cache, "a").close()


def test_a_folder_that_is_made_is_private_and_one_that_is_there_stays(tmp_path: Path) -> None:
    ShardCache(tmp_path / "a" / "b", SIZE)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a", "a/b")] == [0o700] * 2
    (tmp_path / "c").mkdir()
    (tmp_path / "c").chmod(0o755)
    put(ShardCache(tmp_path / "c", SIZE), "a")
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == 0o755
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "c").iterdir()]
    assert modes == [0o600] * 3
