"""Bytes that change on a disk by themselves: size and times say nothing, only checksums do."""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from format_files import mds_folder

from zephon_torch import DataLoader
from zephon_torch.errors import DatasetError, RecordError, WorkerError
from zephon_torch.io import Dataset
from zephon_torch.io.codecs import decoded, unpacked
from zephon_torch.io.codecs import decoded_files as whole
from zephon_torch.io.storage import ranges
from zephon_torch.support.lru import Recent

pytestmark = pytest.mark.timeout(120)

Compress = Callable[[bytes], bytes]
CODECS: dict[str, Compress] = {
    ".gz": lambda content: gzip.compress(content, mtime=0),
    ".zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}
BOTH = pytest.mark.parametrize("codec", CODECS)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("ZEPHON_CACHE_DIR", str(folder))
    return folder


@pytest.fixture(params=["small", "middle", "large"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The three ways to decode a block, none of them through a decoded copy."""
    monkeypatch.setattr(decoded, "PIECE_BYTES", 50)  # a block has many
    monkeypatch.setenv("ZEPHON_DECODED_LIMIT", "0")
    monkeypatch.setattr(whole, "_warned", True)
    if request.param != "small":
        monkeypatch.setattr(decoded, "_ALWAYS_WHOLE_BYTES", 0)
    if request.param == "large":
        monkeypatch.setattr(decoded, "LARGE_BLOCK_BYTES", 0)
        monkeypatch.setattr(whole, "LARGE_BLOCK_BYTES", 0)
    return str(request.param)


def lines(start: int, stop: int) -> bytes:
    return b"".join(b'{"id": %d, "text": "story %d"}\n' % (i, i * i) for i in range(start, stop))


def samples(*ids: int) -> list[dict[str, Any]]:
    return [{"id": i, "text": f"story {i * i}"} for i in ids]


def rot(path: Path, at: int, bit: int = 0) -> None:
    """Flip a bit; size and time stay."""
    status = path.stat()
    with open(path, "r+b") as stream:
        stream.seek(at)
        (byte,) = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte ^ 1 << bit]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def ask(reader: Any, ids: Sequence[int]) -> list[Any] | str:
    """What is read, or the error."""
    try:
        return list(reader.read(np.array(ids)))
    except RecordError as error:
        raise AssertionError("rot of a block is no bad record") from error
    except DatasetError as error:
        return str(error)


def bits(path: Path, second: int) -> Iterator[tuple[int, int]]:
    """All bits of headers and trailers, one of each other byte."""
    size = path.stat().st_size
    edges = [*range(20), *range(second - 10, second + 20), *range(size - 10, size)]
    for at in range(size):
        yield from ((at, bit) for bit in (range(8) if at in edges else [at % 8]))


@BOTH
def test_any_bit_that_flips_gives_the_same_error_each_time_or_changes_nothing(
    tmp_path: Path, codec: str, way: str
) -> None:
    path, first = tmp_path / f"a.jsonl{codec}", CODECS[codec](lines(0, 40))
    path.write_bytes(first + CODECS[codec](lines(40, 60)))
    dataset, num_refused = Dataset.from_path("a", path), 0
    for at, bit in bits(path, len(first)):
        rot(path, at, bit)
        with closing(dataset.open(0)) as reader:
            told = [ask(reader, ids) for ids in ([0], [39, 1], [59], [45, 2], [0], [39, 1])]
            rot(path, at, bit)
            # what has become right again is read again
            assert ask(reader, [0, 50, 39]) == samples(0, 50, 39)
        errors = {error for error in told if isinstance(error, str)}
        assert told == samples_or(errors), (at, bit)
        assert all(f"'{path}' cannot be decoded: " in error for error in errors)
        num_refused += bool(errors)
    assert num_refused > 0.6 * path.stat().st_size


def samples_or(errors: set[str]) -> list[Any]:
    """All blocks are one here, so that one error is all that may come of them."""
    if errors:
        (error,) = errors
        return [error] * 6
    return [samples(*ids) for ids in ([0], [39, 1], [59], [45, 2], [0], [39, 1])]


@BOTH
def test_text_that_decodes_to_other_text_is_never_served(tmp_path: Path, codec: str) -> None:
    """A block of many pieces whose first error is its checksum: the first pieces look right."""
    path = tmp_path / f"a.jsonl{codec}"
    content = b"".join(b'{"text": "%d"}\n' % i for i in range(40_000))
    # stored, not compressed: any changed byte decodes
    stored = zstandard.ZstdCompressor(level=-100, write_checksum=True).compress
    packed = gzip.compress(content, 0, mtime=0) if codec == ".gz" else stored(content)
    path.write_bytes(packed)
    dataset = Dataset.from_path("a", path)
    at = packed.rindex(b"399") + 1 if codec == ".zst" else packed.index(b"30000") + 2
    rot(path, at, 1)
    asked = [0, 1, 30_000, 0, 39_999, 30_000, 2]
    with closing(dataset.open(0)) as reader:
        told = [ask(reader, [number]) for number in asked]
    assert len(set(map(str, told))) == 1
    assert isinstance(told[0], str) and "that begins at byte 0 is damaged" in told[0]


@pytest.mark.parametrize("on_error", ["skip", "substitute"])
@BOTH
def test_rot_of_a_block_is_no_bad_record(tmp_path: Path, codec: str, on_error: Any) -> None:
    path = tmp_path / f"a.jsonl{codec}"
    path.write_bytes(CODECS[codec](lines(0, 400)))
    dataset = Dataset.from_path("a", path)
    rot(path, path.stat().st_size // 2)
    with DataLoader(dataset, 8, shuffle=True, on_error=on_error) as loader:
        for _ in range(3):
            with pytest.raises(DatasetError, match=f"'{path}' cannot be decoded") as raised:
                next(iter(loader))
            assert not isinstance(raised.value, RecordError)


@BOTH
def test_a_large_block_is_verified_before_any_of_it_and_again_after_an_error(
    tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage that comes after the first check is found at the latest where it stands."""
    monkeypatch.setattr(decoded, "PIECE_BYTES", 50)
    monkeypatch.setattr(decoded, "_ALWAYS_WHOLE_BYTES", 0)
    monkeypatch.setattr(decoded, "_pieces", Recent())
    path = tmp_path / f"a.jsonl{codec}"
    path.write_bytes(CODECS[codec](lines(0, 400)))
    dataset = Dataset.from_path("a", path)
    with closing(dataset.open(0)) as reader:
        assert ask(reader, [0]) == samples(0)
        rot(path, path.stat().st_size - 3)
        monkeypatch.setattr(decoded, "_pieces", Recent())
        assert "damaged" in ask(reader, [399])
        monkeypatch.setattr(decoded, "_pieces", Recent())
        assert "damaged" in ask(reader, [0])


@pytest.mark.parametrize("codec", ["gz", "zstd"])
def test_any_bit_of_a_compressed_mds_shard(
    tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacked, "_kept", Recent())
    records = [{"id": struct.pack("<q", i), "text": b"text %d" % i} for i in range(20)]
    mds_folder(tmp_path, [records], {"id": ("int", 8), "text": ("str", None)}, [codec])
    (path,) = tmp_path.glob("*.mds.*")
    dataset, sound = Dataset.from_path("a", tmp_path), [{"id": 3, "text": "text 3"}]
    num_refused, num_bytes = 0, path.stat().st_size
    for at in range(num_bytes):
        rot(path, at, at % 8)
        for _ in range(2):
            monkeypatch.setattr(unpacked, "_kept", Recent())
            try:
                with closing(dataset.open(0)) as reader:
                    assert ask(reader, [3]) == sound
            except DatasetError as error:
                assert str(path) in str(error) and not isinstance(error, RecordError)
                num_refused += 1
        rot(path, at, at % 8)
    assert num_refused > num_bytes


def cuts(path: Path) -> Callable[[Any], Any]:
    def transform(sample: Any) -> Any:
        os.truncate(path, 0)
        return sample

    return transform


def test_a_worker_that_a_cut_file_kills_is_told_with_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch alone says that shared memory may be short."""
    monkeypatch.setattr(ranges, "_SIZES_TRUSTED_SECONDS", 1e9)  # it comes between check and touch
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.zeros((20_000, 64), np.uint16))
    path, dataset = tmp_path / "b.npy", Dataset.from_path("a", tmp_path)
    options: Any = {"num_workers": 1, "multiprocessing_context": "fork", "transform": cuts(path)}
    told = rf"(?s)worker process died .* cut short or .*'{path}' changed since .* 0 now"
    with (
        DataLoader(dataset, 8, shuffle=True, **options) as loader,
        pytest.raises(WorkerError, match=told),
    ):
        list(loader)
