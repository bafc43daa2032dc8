"""Files over HTTP from a server that fails: right, or an error in words."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import sys
import threading
import time
import traceback
import tracemalloc
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from email.utils import formatdate
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import exit_code, forked, wait_until
from stores import LIES, WebStore

from zephon_torch import DataLoader
from zephon_torch.errors import ConfigurationError, DatasetError, StorageError
from zephon_torch.io import Dataset
from zephon_torch.io.remote import retries
from zephon_torch.io.remote.answers import checked_size
from zephon_torch.io.remote.options import StorageOptions
from zephon_torch.io.remote.storage import connect
from zephon_torch.io.storage import ranges

aiohttp = pytest.importorskip("aiohttp")
IDS = list(range(40))


@pytest.fixture(autouse=True)
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEPHON_CACHE_DIR", str(tmp_path / "indexes"))
    monkeypatch.setattr(retries, "DELAYS", (0.001,) * 4)


@pytest.fixture
def store() -> Iterator[WebStore]:
    with WebStore() as store:
        store.files["/d/x.jsonl"] = lines(IDS)
        yield store


def lines(ids: list[int]) -> bytes:
    return "".join(json.dumps({"id": i, "pad": "ü" * 50}) + "\n" for i in ids).encode()


def dataset_of(store: WebStore, path: str = "/d/x.jsonl", **options: Any) -> Dataset:
    return Dataset.from_path("x", store.url + path, storage_options=options or None)


def ids_of(samples: Any) -> list[int]:
    return [sample["id"] for sample in samples]


def quick_client() -> dict[str, Any]:
    return {"client_kwargs": {"timeout": aiohttp.ClientTimeout(total=0.5)}}


@pytest.mark.parametrize("fault", ["500", "503", "429", "408", "reset", "cut", "short", "slow"])
def test_what_fails_at_first_is_asked_for_again(store: WebStore, fault: str) -> None:
    def at_first(method: str, path: str, count: int) -> str | None:
        is_size = method == "HEAD" and fault in ("cut", "short")  # has no body
        return fault if count == 0 and not is_size else None

    store.fault = at_first
    dataset = dataset_of(store, **quick_client())
    assert ids_of(dataset) == IDS
    order = np.random.Generator(np.random.Philox(1)).permutation(40)
    with closing(dataset.open(0)) as reader:
        assert ids_of(reader.read(order[:5])) == order[:5].tolist()


@pytest.mark.parametrize("fault", ["500", "reset", "cut", "short", "slow"])
def test_what_fails_for_good_is_told_with_url_and_tries(store: WebStore, fault: str) -> None:
    dataset = dataset_of(store, **quick_client())
    store.fault = lambda method, path, count: fault if method == "GET" else None
    before = store.num_asked("GET", "/d/x.jsonl")
    with closing(dataset.open(0)) as reader:
        with pytest.raises(
            DatasetError, match=rf"cannot read '{store.url}/d/x.jsonl' after 5 tries \(.*saved"
        ):
            reader.read(np.array([3]))
        # aiohttp itself may ask once more where a connection that it kept was closed
        num_tries = store.num_asked("GET", "/d/x.jsonl") - before
        assert 5 <= num_tries <= (10 if fault == "reset" else 5)
        store.fault = lambda method, path, count: None
        assert ids_of(reader.read(np.array([3]))) == [3]


FAULTS = st.sampled_from(["500", "429", "cut", "reset", "short", "whole", "404", "403", None, None])


def test_whatever_fails_it_is_right_or_an_error(store: WebStore) -> None:
    dataset = dataset_of(store)
    order = np.random.Generator(np.random.Philox(7)).permutation(40)[:20]

    def read() -> None:
        with closing(dataset.open(0)) as reader:
            assert ids_of(reader.read(order)) == order.tolist()

    @settings(max_examples=25)
    @given(faults=st.lists(FAULTS, max_size=8))
    def check(faults: list[str | None]) -> None:
        left = iter(faults)
        store.fault = lambda method, path, count: next(left, None)
        for _ in range(3):
            with suppress(DatasetError):
                read()
        store.fault = lambda method, path, count: None
        read()

    check()


@pytest.mark.parametrize("status", ["401", "403"])
def test_what_is_forbidden_is_told_at_once(store: WebStore, status: str) -> None:
    dataset = dataset_of(store)
    store.fault = lambda method, path, count: status
    for ask in (lambda: dataset.open(0), lambda: dataset_of(store)):
        before = len(store.asked)
        with pytest.raises(DatasetError, match=r"d/x.jsonl' \(.*check the credentials"):
            ask()
        assert len(store.asked) == before + 2  # fsspec asks with HEAD, then with GET


def test_a_file_that_is_gone_is_named(store: WebStore) -> None:
    with pytest.raises(DatasetError, match=f"no file or folder '{store.url}/none.jsonl'"):
        dataset_of(store, "/none.jsonl")
    dataset = dataset_of(store)
    with closing(dataset.open(0)) as reader:
        del store.files["/d/x.jsonl"]
        for ask in (lambda: dataset.open(0), lambda: reader.read(np.array([0]))):
            with pytest.raises(DatasetError, match=r"x.jsonl' is gone since the dataset was made"):
                ask()


def test_an_option_that_the_client_does_not_know_is_no_missing_file(store: WebStore) -> None:
    with pytest.raises(DatasetError, match=r"TypeError.*check the URL and storage_options="):
        dataset_of(store, sesame=1)


def test_credentials_are_in_no_error_state_or_repr(store: WebStore) -> None:
    secret = "s3cr3t-of-mine"
    options = {"headers": {"Authorization": secret}}
    dataset = dataset_of(store, f"/d/x.jsonl?signature={secret}", **options)
    loader = DataLoader(dataset, batch_size=4)
    plain = dataset_of(store)
    assert plain.fingerprint == dataset.fingerprint
    errors = []
    for fault in ("500", "403", "404", "reset", "short", "whole"):
        store.fault = lambda method, path, count, fault=fault: fault  # type: ignore[misc]
        for ask in (lambda: dataset[0], lambda: dataset_of(store, f"/d/?k={secret}", **options)):
            try:
                ask()
            except DatasetError as error:
                errors.append("".join(traceback.format_exception(error)))
    assert len(errors) >= 10
    shown = [*errors, repr(dataset), repr(loader), json.dumps(loader.state_dict())]
    assert not [text for text in shown if secret in text.replace(f"signature={secret}", secret)]
    raised = ValueError(f"bad {secret} https://me:pw@h/x?q=1")
    text = retries.describe(raised, StorageOptions(options)).error("u", 1)
    assert (
        str(text)
        == "cannot read 'u' (ValueError: bad *** https://h/x?***): "
        + str(text).rpartition("): ")[2]
    )


def test_a_server_without_ranges_is_refused(store: WebStore, tmp_path: Path) -> None:
    dataset = dataset_of(store)
    store.fault = lambda method, path, count: "whole"
    with closing(dataset.open(0)) as reader:
        with pytest.raises(DatasetError, match=r"sent 12,870 bytes where 322 .*simplecache::"):
            reader.read(np.array([3]))
    url = f"simplecache::{store.url}/d/x.jsonl"
    options = {"simplecache": {"cache_storage": str(tmp_path / "simple")}}
    assert ids_of(Dataset.from_path("x", url, storage_options=options)) == IDS


# --- answers that are none ------------------------------------------------------------------------

TOLD = {
    "same size": "does not serve ranges", "whole": "does not serve ranges",
    "shifted": "another range .Content-Range: bytes 1-", "unsaid": "another range .*none",
    "longer": "sent 650 bytes as a range of 642", "endless": "sent more than 642 bytes",
    "gzip": "compressed .Content-Encoding: gzip",
}  # fmt: skip


def tokens_of(store: WebStore) -> tuple[Dataset, np.ndarray[Any, Any]]:
    """Rows of 321 tokens, each of 642 bytes."""
    rows = np.arange(20 * 321, dtype="<u2").reshape(20, 321)
    store.files["/t.bin"] = rows.tobytes()
    return Dataset.from_path("t", f"{store.url}/t.bin", dtype="uint16", row_length=321), rows


@pytest.mark.parametrize("lie", ["whole", *LIES])
def test_only_the_bytes_that_were_asked_for_are_used(store: WebStore, lie: str) -> None:
    dataset, rows = tokens_of(store)
    with closing(dataset.open(0)) as reader:
        store.fault = lambda method, path, count: lie if method == "GET" else None
        before = store.num_asked("GET", "/t.bin")
        with pytest.raises(StorageError, match=f"the store of '{store.url}/t.bin' .*{TOLD[lie]}"):
            reader.read(np.array([7]))
        assert store.num_asked("GET", "/t.bin") == before + 1  # it would be the same again
        assert store.num_sent < 16 << 20  # what was sent beyond it was not waited for
        store.fault = lambda method, path, count: None
        assert np.array_equal(reader.read(np.array([7])), rows[7:8])


@pytest.mark.parametrize("lie", ["whole", *LIES])
def test_a_copy_is_made_of_nothing_else(store: WebStore, tmp_path: Path, lie: str) -> None:
    """But a file that is sent whole where all of it was asked for is what was asked for."""
    dataset, rows = tokens_of(store)
    store.fault = lambda method, path, count: lie if method == "GET" else None
    with DataLoader(dataset, 20, cache_dir=tmp_path / "c", cache_limit="1MB") as loader:
        if lie in ("whole", "same size"):
            assert np.array_equal(next(iter(loader)), rows)
        else:
            with pytest.raises(StorageError, match=r"the store of .*t.bin' sent"):
                next(iter(loader))
            assert not list((tmp_path / "c").glob("*.shard"))


@pytest.mark.parametrize("lie", ["whole", *LIES])
def test_answers_are_checked_behind_other_file_systems(store: WebStore, lie: str) -> None:
    """fsspec's own file takes any of them for the range."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("other", bytes(9_000_000))
        archive.writestr("x.jsonl", lines(IDS))
    store.files["/a.zip"] = buffer.getvalue()
    url = f"zip://x.jsonl::{store.url}/a.zip"
    store.fault = lambda method, path, count: lie if method == "GET" else None
    with pytest.raises(StorageError, match=r"the store of 'zip://x.jsonl::.*' sent"):
        Dataset.from_path("x", url)
    assert store.num_sent < 16 << 20
    store.fault = lambda method, path, count: None
    assert ids_of(Dataset.from_path("x", url)) == IDS


@pytest.mark.parametrize(
    ("status", "content_range", "asked", "is_right"),
    [
        (206, "bytes 7-9/10", "bytes=7-", True), (200, "", "bytes=0-", True),
        (200, "", "", True), (200, "", "bytes=7-", False), (206, "", "bytes=7-", False),
        (206, "bytes 8-9/10", "bytes=7-", False),
    ],
)  # fmt: skip
def test_the_rest_of_a_file_begins_where_it_was_asked_for(
    status: int, content_range: str, asked: str, is_right: bool
) -> None:
    """So s3fs goes on with a copy that broke off."""
    headers = {"Content-Range": content_range}
    if is_right:
        assert checked_size(status, headers, asked) == 0
    else:
        with pytest.raises(retries.AnswerError, match="all from byte 7 on was asked for"):
            checked_size(status, headers, asked)


def test_a_client_of_the_user_is_checked_too(store: WebStore) -> None:
    made: list[Any] = []

    async def get_client(**options: Any) -> Any:
        made.append(aiohttp.ClientSession(**options))
        return made[-1]

    dataset = dataset_of(store, get_client=get_client, headers={"accept-encoding": "gzip"})
    store.fault = lambda method, path, count: "gzip" if method == "GET" else None
    with pytest.raises(StorageError, match="compressed"):
        dataset[0]
    assert made


@pytest.mark.parametrize("lie", ["endless", "gzip"])
def test_memory_is_that_of_what_was_asked_for(store: WebStore, lie: str) -> None:
    """Of 64 MB that come for 642 bytes."""
    dataset, _ = tokens_of(store)
    with closing(dataset.open(0)) as reader:
        store.fault = lambda method, path, count: lie
        tracemalloc.start()
        try:
            with pytest.raises(StorageError):
                reader.read(np.array([7]))
            assert tracemalloc.get_traced_memory()[1] < 8 << 20
        finally:
            tracemalloc.stop()


# --- names, secrets ------------------------------------------------------------------------------


def test_names_with_two_colons_are_names(store: WebStore) -> None:
    store.files["/d::e/a::b.jsonl"] = lines(IDS)
    assert ids_of(dataset_of(store, "/d::e/a::b.jsonl")) == IDS
    page = b'<a href="a::b.jsonl">x</a>'
    store.files |= {"/d::e": page, "/d::e/": page}
    dataset = dataset_of(store, "/d::e/*.jsonl")
    assert [shard.path for shard in dataset.shards] == ["a::b.jsonl"] and ids_of(dataset) == IDS


def test_hosts_and_queries_with_two_colons(store: WebStore) -> None:
    assert ids_of(dataset_of(store, "/d/x.jsonl?sig=a::b")) == IDS
    try:
        other = WebStore("::1")
    except OSError:
        pytest.skip("no IPv6 here")
    with other:
        other.files = {"/x.jsonl": lines(IDS), "/a.zip": zipped(lines(IDS))}
        port = other.url.rpartition(":")[2]
        for url in (f"http://[::1]:{port}/x.jsonl", f"simplecache::http://[::1]:{port}/x.jsonl"):
            assert ids_of(Dataset.from_path("x", url)) == IDS
        with pytest.raises(ConfigurationError, match=r"another '::'.*write \[0:0:0:0:0:0:0:1\]"):
            Dataset.from_path("x", f"zip://x.jsonl::http://[::1]:{port}/a.zip")
        url = f"zip://x.jsonl::http://[0:0:0:0:0:0:0:1]:{port}/a.zip"
        assert ids_of(Dataset.from_path("x", url)) == IDS


def test_names_of_archives_with_two_colons_are_refused(store: WebStore, tmp_path: Path) -> None:
    (tmp_path / "a::b.zip").write_bytes(zipped(lines(IDS)))
    (tmp_path / "ab.zip").write_bytes(zipped(lines(IDS)))
    for before in (
        "zip://x.jsonl::",
        "zip://x.jsonl::file://",
        "zip://x.jsonl::simplecache::file://",
    ):
        assert ids_of(Dataset.from_path("x", f"{before}{tmp_path}/ab.zip")) == IDS
        with pytest.raises(ConfigurationError, match=r"a::b.zip' stands behind '::'.*rename"):
            Dataset.from_path("x", f"{before}{tmp_path}/a::b.zip")
    with pytest.raises(ConfigurationError, match="stands behind '::'") as caught:
        Dataset.from_path("x", f"zip://x.jsonl::{store.url}/a.zip?s3cr3t::1")
    assert "s3cr3t" not in str(caught.value)
    assert not [name for name, text in shown_by(caught.value) if "s3cr3t" in text]


def zipped(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("x.jsonl", content)
    return buffer.getvalue()


def test_frames_of_errors_hold_no_secret(store: WebStore) -> None:
    """What a crash reporter shows: the repr of all local variables of all frames of all causes."""
    secret = "s3cr3t-of-mine"
    options = {"headers": {"Authorization": secret}, "nested": {"keys": [secret]}}
    errors: list[BaseException] = []
    dataset = dataset_of(store, headers=options["headers"])
    for fault in ("500", "403", "404", "reset", "short", "whole", "unsaid"):
        store.fault = lambda method, path, count, fault=fault: fault  # type: ignore[misc]
        for ask in (lambda: dataset[0], lambda: dataset_with(store, options)):
            try:
                ask()
            except DatasetError as error:
                errors.append(error)
    with pytest.raises(ConfigurationError) as caught:
        Dataset.from_path("x", "nosuch://x", storage_options=options)
    errors.append(caught.value)
    assert len(errors) >= 14
    for error in errors:
        assert not [name for name, text in shown_by(error) if secret in text]


def test_frames_of_errors_hold_no_user_and_no_query_of_a_url(
    store: WebStore, tmp_path: Path
) -> None:
    secret = "s3cr3t-of-mine"
    host = store.url.replace("//", f"//me:{secret}@")
    urls = [f"{store.url}/d/x.jsonl?signature={secret}", f"{host}/d/x.jsonl"]
    urls += [f"simplecache::{url}" for url in urls]
    datasets = [Dataset.from_path("x", url) for url in urls[:2]]
    readers = [lambda d=d: d[0] for d in datasets]
    readers += [lambda d=d: copied(d, tmp_path) for d in datasets]
    asks: list[Any] = [
        *readers,
        *(lambda url=url: Dataset.from_path("x", url) for url in urls),
        *(lambda url=url: Dataset.from_manifest("x", url) for url in urls),
        *(lambda url=url: Dataset.from_manifest("x", url, root=url) for url in urls),
        *(lambda url=url: Dataset.from_path(0, url) for url in urls),
        *(lambda url=url: Dataset.from_path("x", url, format="none") for url in urls),
        lambda: Dataset.from_path("x", f"nosuch://u:{secret}@x/"),
        lambda: datasets[0].save_manifest(f"nosuch://u:{secret}@x/m.zman"),
    ]
    for fault in ("500", "404", "reset", "unsaid"):
        store.fault = lambda method, path, count, fault=fault: fault  # type: ignore[misc]
        for ask in asks if fault != "unsaid" else readers:
            with pytest.raises((DatasetError, ConfigurationError)) as caught:
                ask()
            assert secret not in str(caught.value)
            assert not [name for name, text in shown_by(caught.value) if secret in text]


def copied(dataset: Dataset, folder: Path) -> None:
    with DataLoader(dataset, 4, cache_dir=folder / "c", cache_limit="1MB") as loader:
        next(iter(loader))


def dataset_with(store: WebStore, options: dict[str, Any]) -> Dataset:
    return Dataset.from_path("x", f"{store.url}/d/x.jsonl", storage_options=options)


def shown_by(error: BaseException | None) -> Iterator[tuple[str, str]]:
    """Names and texts of local variables, but for those of this file."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename != __file__:
                for name, value in frame.f_locals.items():
                    yield f"{frame.f_code.co_qualname}: {name}", repr(value)
                    yield (
                        f"{frame.f_code.co_qualname}: {name}.",
                        repr(getattr(value, "__dict__", 0)),
                    )
        error = error.__cause__ or error.__context__


def test_options_travel_and_compare_without_being_shown() -> None:
    options = StorageOptions({"key": "s3cr3t", "client_kwargs": {"a": ["s3cr3t"]}})
    again = pickle.loads(pickle.dumps(options))
    assert again == options and again.plain() == options.plain()
    assert options != StorageOptions({"key": "another"}) and not StorageOptions(None)
    assert repr(options) == "StorageOptions(client_kwargs=***, key=***)"
    options.plain()["client_kwargs"]["a"].append("changed by fsspec")
    assert options == again
    assert not isinstance(options, Mapping)  # which reporters walk through


# --- how long it may take -------------------------------------------------------------------------


def test_a_server_that_stalls_is_told_in_the_stated_time(
    store: WebStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEPHON_READ_SECONDS", "2")
    dataset = dataset_of(store)
    store.fault = lambda method, path, count: "stall" if method == "GET" else None
    with closing(dataset.open(0)) as reader:
        begun = time.monotonic()
        with pytest.raises(StorageError, match=r"after [2-4] tries .*Timeout.* saved state"):
            reader.read(np.array([3]))
        assert 1 < time.monotonic() - begun < 3
        store.fault = lambda method, path, count: "stall" if not count else None
        store.files["/d/x.jsonl"] += b"\n"  # a range that was not asked for yet
        assert ids_of(reader.read(np.array([39]))) == [39]  # another try, another connection


def test_the_time_is_refused_if_it_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert retries.seconds_allowed() == 120
    for text in ("soon", "0", "-1", "nan"):
        monkeypatch.setenv("ZEPHON_READ_SECONDS", text)
        with pytest.raises(ConfigurationError, match=f"ZEPHON_READ_SECONDS is '{text}'"):
            retries.seconds_allowed()


class Stalled(MemoryFileSystem):  # type: ignore[misc]
    """A file system that is not asynchronous, and hangs."""

    protocol = "stalled"
    store: dict[str, Any] = {}  # noqa: RUF012 - as the base class has it
    hangs = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.removeprefix("stalled://")))

    def cat_file(self, path: str, *given: Any, **options: Any) -> bytes:
        while self.hangs:
            time.sleep(0.05)
        return bytes(super().cat_file(path, *given, **options))


def test_a_file_system_that_hangs_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("stalled", Stalled, clobber=True)
    fsspec.filesystem("stalled").pipe("/x.jsonl", lines(IDS))
    dataset = Dataset.from_path("x", "stalled://x.jsonl")
    monkeypatch.setenv("ZEPHON_READ_SECONDS", "0.5")
    monkeypatch.setattr(Stalled, "hangs", True)
    begun = time.monotonic()
    with pytest.raises(StorageError, match="no answer in time"):
        dataset[0]
    assert time.monotonic() - begun < 2


def test_pauses_differ_and_leave_global_generators_alone(
    store: WebStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that fail together do not ask again together."""
    monkeypatch.setattr(retries, "DELAYS", (0.1, 0.2, 0.4))
    dataset = dataset_of(store)
    store.fault = lambda method, path, count: "503" if method == "GET" else None
    paused: list[float] = []
    monkeypatch.setattr(retries.waits, "pause", paused.append)
    state = random.getstate()
    for _ in range(20):
        with pytest.raises(StorageError, match="after 4 tries"):
            dataset[0]
    assert random.getstate() == state
    rows = np.array(paused).reshape(20, 3) / retries.DELAYS
    assert (rows >= 0.5).all() and (rows < 1.5).all()
    assert len(set(paused)) > 40 and 0.8 < rows.mean() < 1.2


@pytest.mark.parametrize("engine", [{}, {"num_threads": 0}, {"num_threads": 2}, {"num_workers": 1}])
def test_an_outage_is_told_after_one_read_with_its_tries(
    store: WebStore, engine: dict[str, Any]
) -> None:
    """Not after those of every batch, and of every file, that was to be read with it."""
    for number in range(8):
        store.files[f"/d/{number}.jsonl"] = lines(list(range(number * 40, number * 40 + 40)))
    page = "".join(f'<a href="{number}.jsonl">x</a>' for number in range(8)).encode()
    store.files |= {"/d": page, "/d/": page}
    dataset = dataset_of(store, "/d/[0-7].jsonl")
    with DataLoader(dataset, 4, shuffle=True, collate_fn=ids_of, **engine) as loader:
        batches = iter(loader)
        seen = [next(batches) for _ in range(3)]
        store.fault = lambda method, path, count: "503"
        store.asked.clear()
        with pytest.raises(StorageError, match="after 5 tries"):
            seen.extend(islice(batches, 80))
        loader.close()
        # 5 tries of the files of a window: not for each of its batches; windows ahead fail alike
        assert len(store.asked) <= 3 * 8 * 5
        store.fault = lambda method, path, count: None
        state = loader.state_dict()
        loader.load_state_dict(state)
        assert sorted(i for batch in [*seen, *loader] for i in batch) == list(range(320))


@pytest.mark.parametrize(
    "engine", [{}, {"num_threads": 2}, {"num_workers": 1}, {"cache_limit": "1MB"}]
)
def test_close_ends_requests_and_pauses(
    store: WebStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: dict[str, Any]
) -> None:
    """The store is asked no more, whether it stalls or fails."""
    monkeypatch.setattr(retries, "DELAYS", (20.0,) * 4)
    for number in range(8):
        store.files[f"/d/{number}.jsonl"] = lines(list(range(number * 40, number * 40 + 40)))
    page = "".join(f'<a href="{number}.jsonl">x</a>' for number in range(8)).encode()
    store.files |= {"/d": page, "/d/": page}
    dataset = dataset_of(store, "/d/[0-7].jsonl")
    for fault in ("stall", "503"):
        folder = {"cache_dir": tmp_path / fault} if "cache_limit" in engine else {}
        store.fault = lambda method, path, count, fault=fault: (  # type: ignore[misc]
            fault if path > "/d/2" and path != "/d/" and method == "GET" else None
        )
        loader = DataLoader(dataset, 4, collate_fn=ids_of, prefetch_factor=2, **engine, **folder)
        batches = iter(loader)
        store.asked.clear()
        assert [next(batches) for _ in range(8)][-1] == [28, 29, 30, 31]
        caller = threading.Thread(target=list, args=(suppressed(batches),))
        caller.start()
        wait_until(lambda: any(path > "/d/2" for _, path in store.asked))
        begun = time.monotonic()
        loader.close()
        assert time.monotonic() - begun < 3
        caller.join(5)
        assert not caller.is_alive()
        asked = len(store.asked)
        time.sleep(0.3)
        assert len(store.asked) == asked


def suppressed(batches: Iterator[Any]) -> Iterator[Any]:
    with suppress(Exception):
        yield from batches


@pytest.mark.parametrize("tag", ["ETag", "Last-Modified"])
def test_a_file_that_was_replaced_is_noticed(
    store: WebStore, monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    values = {
        "ETag": ("1", "2"),
        "Last-Modified": [f"Mon, 0{i} Jun 2026 10:00:00 GMT" for i in (1, 8)],
    }
    store.headers["/d/x.jsonl"] = {tag: values[tag][0]}
    dataset = dataset_of(store)
    with closing(dataset.open(0)) as reader:
        store.headers["/d/x.jsonl"] = {tag: values[tag][1]}
        with pytest.raises(DatasetError, match=r"x.jsonl' changed since .*(modified|ETag)"):
            dataset.open(0)
        reader.read(np.array([0]))  # not asked again yet
        monkeypatch.setattr(ranges, "_TRUSTED_SECONDS", 0)
        with pytest.raises(DatasetError, match=r"x.jsonl' changed since .*(modified|ETag)"):
            reader.read(np.array([0]))


def test_no_request_is_made_for_nothing(store: WebStore) -> None:
    storage = connect(f"{store.url}/d")
    nothing = np.array([5, 100_000])
    assert storage.read_ranges("x.jsonl", nothing, nothing) == [b"", b""]
    assert not store.asked
    assert storage.read_ranges("x.jsonl", np.array([5, 1]), np.array([5, 3])) == [b"", b'"i']
    assert store.asked == [("GET", "/d/x.jsonl")]


def test_a_file_cut_short_is_noticed_at_the_next_read(store: WebStore) -> None:
    dataset = dataset_of(store)
    with closing(dataset.open(0)) as reader:
        for content in (store.files["/d/x.jsonl"][:-30], b"{}\n"):
            store.files["/d/x.jsonl"] = content
            with pytest.raises(DatasetError, match=r"was cut short: .* [\d,]+ now"):
                reader.read(np.array([39]))


def test_sizes_that_a_listing_does_not_tell_are_asked_for(store: WebStore) -> None:
    store.files["/d/y.jsonl"] = lines([40])
    store.files["/d/"] = b'<a href="x.jsonl">x</a> <a href="y.jsonl">y</a> <a href="z.txt">z</a>'
    store.files["/d"] = store.files["/d/"]
    dataset = dataset_of(store, "/d/*.jsonl")
    assert [shard.path for shard in dataset.shards] == ["x.jsonl", "y.jsonl"]
    assert ids_of(dataset) == [*IDS, 40]


def test_a_file_in_an_archive_of_a_store(store: WebStore) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("in/x.jsonl", lines(IDS))
    store.files["/a.zip"] = buffer.getvalue()
    dataset = Dataset.from_path("x", f"zip://in/x.jsonl::{store.url}/a.zip")
    assert ids_of(dataset) == IDS


@pytest.mark.parametrize(("url", "extra"), [("gs://b/x", "gcs"), ("zip://x::abfs://b/x", "azure")])
def test_a_missing_package_names_the_extra(
    url: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("gcsfs", "adlfs"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigurationError, match=rf"pip install 'zephon-torch\[{extra}\]'"):
        Dataset.from_path("x", url)


def read_all(dataset: Dataset) -> None:
    order = np.random.Generator(np.random.Philox(2)).permutation(40)
    with closing(dataset.open(0)) as reader:
        assert ids_of(reader.read(order)) == order.tolist()


def test_clients_work_in_forked_children_and_their_threads(store: WebStore) -> None:
    """After the parent used them, also in threads that are still using them."""
    dataset = dataset_of(store)
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            read_all(pickle.loads(pickle.dumps(dataset)))

    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            with forked(lambda: read_in_threads(dataset)) as child:
                assert exit_code(child) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def read_in_threads(dataset: Dataset) -> None:
    read_all(dataset)
    errors: list[Exception] = []
    threads = [threading.Thread(target=caught, args=(dataset, errors)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def caught(dataset: Dataset, errors: list[Exception]) -> None:
    try:
        read_all(dataset)
    except Exception as error:
        errors.append(error)


def test_a_manifest_stands_for_a_web_folder_that_cannot_be_listed(
    store: WebStore, tmp_path: Path
) -> None:
    content = store.files.pop("/d/x.jsonl")
    local = tmp_path / "local"
    local.mkdir()
    for number in range(2):
        (local / f"{number}.jsonl").write_bytes(content)
        store.files[f"/w/{number}.jsonl"] = content
        modified = os.stat(local / f"{number}.jsonl").st_mtime
        store.headers[f"/w/{number}.jsonl"] = {"Last-Modified": formatdate(modified, usegmt=True)}
    with pytest.raises(DatasetError, match="no file or folder"):
        Dataset.from_path("x", f"{store.url}/w")
    Dataset.from_path("x", local).save_manifest(tmp_path / "x.zman")
    dataset = Dataset.from_manifest("x", tmp_path / "x.zman", root=f"{store.url}/w")
    assert ids_of(dataset) == IDS * 2
