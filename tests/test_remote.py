"""Files over HTTP from a server that fails: right, or an error in words."""

from __future__ import annotations

import io
import json
import os
import pickle
import sys
import threading
import traceback
import zipfile
from collections.abc import Iterator
from contextlib import closing, suppress
from email.utils import formatdate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import exit_code, forked
from stores import WebStore

from zephon_torch import DataLoader
from zephon_torch.errors import ConfigurationError, DatasetError
from zephon_torch.io import Dataset, ranges, retries
from zephon_torch.io.storage import connect

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
    text = retries.failure("u", ValueError(f"bad {secret} https://me:pw@h/x?q=1"), 1, options)
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
