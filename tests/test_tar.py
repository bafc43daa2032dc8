"""The members of a tar file: those that Python's tarfile finds, or a refusal in words."""

from __future__ import annotations

import tarfile
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tars import END, FORMATS, files_of_tarfile, header, padded, special, summed, tar

from zephon_torch.errors import DatasetError
from zephon_torch.io.formats.tar.members import TarError, TarWalk
from zephon_torch.io.formats.tar.samples import find_samples, parse_sample, split_name
from zephon_torch.io.storage.files import StoredFile

LONG = "folder/" * 5 + "x" * 90
LONGER = "/".join(["y" * 90] * 6)


class Memory:
    """A storage of one file, which counts what is asked of it."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.reads: list[tuple[int, int]] = []

    def read(self, path: str, start: int, stop: int) -> bytes:
        self.reads.append((start, stop))
        return self.content[start:stop]

    def url(self, path: str) -> str:
        return f"memory://{path}"

    def local_path(self, path: str) -> None:
        return None


def stored(content: bytes) -> StoredFile:
    return StoredFile(Memory(content), "a.tar", len(content), 0)  # type: ignore[arg-type]


def files(content: bytes) -> list[tuple[str, bytes]]:
    walk = TarWalk(lambda start, stop: content[start:stop], 0, len(content))
    return [(m.name, content[m.content_start : m.content_stop]) for m in walk if m.is_file]


def samples(content: bytes, block_bytes: int | None = None) -> list[tuple[str, dict[str, bytes]]]:
    """All samples, each parsed from its range alone."""
    starts = find_samples(stored(content), int, block_bytes).tolist()
    last = len(starts) - 2
    return [
        parse_sample(content[starts[i] : starts[i + 1]], starts[i], i == last)
        for i in range(last + 1)
    ]


def refusal(content: bytes) -> str:
    with pytest.raises(DatasetError) as raised:
        find_samples(stored(content), int)
    assert str(raised.value).startswith("'memory://a.tar', at byte ")
    return str(raised.value)


# --- headers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_members_are_those_of_tarfile(format: int) -> None:
    names = ["a.txt", "./b.txt", "ö ü.txt", LONG, "p/" * 60 + "q.txt", "../../x", "/abs/z.txt"]
    if format != tarfile.USTAR_FORMAT:
        names += [LONGER, "n" * 300 + ".x"]
    content = tar(
        [
            special("d.e", tarfile.DIRTYPE),
            *((name, name.encode() * 31 * i) for i, name in enumerate(names)),
            special("ln", tarfile.SYMTYPE, linkname=LONG[30:]),
            ("last", b"!"),
        ],
        format,
    )
    assert files(content) == files_of_tarfile(content)
    assert [name for name, _ in files(content)] == [*names, "last"]


def test_pax_headers_with_other_fields_and_for_all_members_are_passed_over() -> None:
    members: list[Any] = [special("a.x", b"0", pax_headers={"comment": "=\n" * 99}), ("b.x", b"b")]
    content = tar(members, pax_headers={"comment": "0123abc"})
    assert files(content) == files_of_tarfile(content) == [("a.x", b""), ("b.x", b"b")]


def test_a_size_may_stand_in_a_pax_header_or_in_binary() -> None:
    binary = header(b"a", size=b"\x80" + bytes(9) + b"\x02\x03", magic=b"ustar  \0")
    pax = header(b"p", b"x", b"12") + padded(b"10 size=3\n") + header(b"b", size=b"7")
    content = binary + padded(b"a" * 515) + pax + padded(b"bbb") + header(b"c") + END
    expected = [("a", b"a" * 515), ("b", b"bbb"), ("c", b"")]
    assert files(content) == files_of_tarfile(content) == expected


def test_headers_of_old_programs_are_read() -> None:
    """Sums of signed bytes; folders that are files with a slash; numbers in spaces."""
    block = header("ö".encode(), size=b"      1 ")
    signed = 256 + sum(np.frombuffer(block[:148] + block[156:], np.int8).tolist())
    block = block[:148] + b"%06o\0 " % signed + block[156:]
    content = header(b"folder/", b"\0") + block + padded(b"1") + header(b"v7", b"\0") + END
    assert files(content) == files_of_tarfile(content) == [("ö", b"1"), ("v7", b"")]


def test_times_in_a_gnu_header_are_no_prefix_of_its_name() -> None:
    block = bytearray(header(b"a", magic=b"ustar  \0"))
    block[345:357] = b"14741234567\0"
    assert files(summed(block) + END) == [("a", b"")]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "at byte 0: the file is empty, which no tar file is"),
        (b"hello", "at byte 0: a header is cut off by the end of the file"),
        (b"x" * 600, "at byte 0: no sound header stands there"),
        (b"\x1f\x8b" + bytes(30), "the file is compressed with gzip, no plain tar file; unpack"),
        (b"\x28\xb5\x2f\xfd" + bytes(600), "the file is compressed with zstd"),
        (b"PK\3\4" + bytes(600), "the file is a zip archive"),
        (header(b"a.x") + b"?" * 512 + END, "at byte 512: no sound header stands there"),
        (header(b"a.x", size=b"8") + END, "at byte 0: no sound header"),
        (header(b"a.x", size=b"-1") + END, "at byte 0: no sound header"),
        (header(b"a.x", size=b"\xff" * 12) + END, "at byte 0: no sound header"),
        (header(b"a.x", size=b"\x80" + b"\x7f" * 11) + END, "bytes, which reach beyond the end"),
        (header(b"a.x", size=b"1") + END[:512], "the file ends without the mark"),
        (header(b"a.x", b"S") + END, "at byte 0: a member is stored sparse"),
        (header(b"a.x", b"M") + END, "member 'a.x' is of type b'M', which is not supported"),
        (header(b"a.x", b"L", b"2") + padded(b"b.x") + END, "a long name is longer than its"),
        (header(b"a.x", b"L", b"3"), "at byte 512: a name or pax header is cut off"),
        (header(b"a.x", b"L", b"3") + padded(b"b.x") + END, "are followed by none"),
        (header(b"a.x", b"x", b"77777777777") + END, "claims to have 8,589,934,591 bytes"),
        (header(b"a.x", b"x", b"1") + padded(b"0") + END, "at byte 0: a pax header is damaged"),
        (header(b"a.x", b"x", b"2") + padded(b"0 ") + END, "a pax header is damaged"),
        (header(b"a.x", b"x", b"7") + padded(b"7 a=bc\n") + END, "are followed by none"),
        (header(b"a.x", b"x", b"7") + padded(b"8 a=bc\n") + END, "a pax header is damaged"),
        (header(b"a.x", b"x", b"13") + padded(b"11 size=-1\n") + END, "gives a size of b'-1'"),
        (
            (header(b"p", b"x", b"12") + padded(b"10 path=a\n")) * 2 + header(b"b.x") + END,
            "at byte 1,024: two headers describe one member",
        ),
        (
            header(b"p", b"g", b"12") + padded(b"10 size=1\n") + END,
            "global pax header gives a size",
        ),
        (
            header(b"p", b"x", b"26") + padded(b"22 GNU.sparse.major=1\n") + END,
            "a member is stored sparse",
        ),
        (
            header(b"a.x") + END + header(b"b.x") + END,
            "at byte 512: the archive ends, but data fol",
        ),
        (header(b"a.x") + bytes(17 << 20), "at byte 512: 17,825,792 bytes follow the archive's"),
    ],
)
def test_what_is_no_whole_tar_file_is_refused_in_words(content: bytes, reason: str) -> None:
    assert reason in refusal(content)


def test_a_tar_cut_anywhere_before_its_mark_is_refused() -> None:
    content = tar([("a.x", b"1" * 700), (LONGER + ".x", b"22"), ("c.x", b"")])
    mark = len(content.rstrip(b"\0")) + -len(content.rstrip(b"\0")) % 512
    for stop in range(0, mark + 512, 64):
        assert "at byte" in refusal(content[:stop])
    assert samples(content[: mark + 512]) == samples(content)


def test_an_archive_without_members_has_no_samples() -> None:
    assert samples(bytes(10_240)) == []


# --- samples -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("a.b", ("a", "b")),
        ("v1.0/a.b.c", ("v1.0/a", "b.c")),
        ("./a.PNG", ("./a", "png")),
        ("../../x", None),
        ("../../x.y", ("../../x", "y")),
        ("d.e/file", None),
        ("d/", None),
        ("._a.b", None),
        ("d/._a.b", None),
        ("d/.hidden", None),
        ("a.", ("a", "")),
        ("__meta__", None),
        ("__index__/a.b", None),
        ("d/__index__/a.b", ("d/__index__/a", "b")),
        ("__a.b", ("__a", "b")),
        ("___/a.b", ("___/a", "b")),
    ],
)
def test_a_name_is_cut_at_the_first_dot_of_its_base_name(name: str, named: Any) -> None:
    assert split_name(name) == named


def test_members_of_one_key_that_follow_each_other_are_one_sample() -> None:
    content = tar(
        [
            special("d", tarfile.DIRTYPE),
            ("__index__/x.json", b"?"),
            ("d/a.txt", b"1"),
            ("d/._a.TXT", b"?"),
            special("d", tarfile.DIRTYPE),
            ("d/a.SEG.txt", b"2"),
            ("README", b"?" * 3000),
            ("d/b.txt", b""),
            ("a.txt", b"4" * 3000),
            ("c", b"?"),
        ]
    )
    expected = [
        ("d/a", {"txt": b"1", "seg.txt": b"2"}),
        ("d/b", {"txt": b""}),
        ("a", {"txt": b"4" * 3000}),
    ]
    for block_bytes in (1, 512, 1024, 5000, None):
        assert samples(content, block_bytes) == expected


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([("a.x", b""), ("a.X", b"")], "member 'a.X' is the second of its sample with this ext"),
        ([("a.x", b""), ("b.x", b""), ("a.y", b"")], "member 'a.y' has a key that came before"),
        ([("a.__key__", b"")], "member 'a.__key__' has an extension that is reserved"),
        ([("a.__url__", b"")], "reserved"),
        ([special("a.x", tarfile.SYMTYPE, linkname="b")], "member 'a.x' is a link or a device"),
        ([special("a.x", tarfile.LNKTYPE, linkname="b")], "member 'a.x' is a link or a device"),
    ],
)
def test_samples_that_would_lose_a_member_are_refused(members: list[Any], reason: str) -> None:
    assert reason in refusal(tar([("first.x", b"1" * 600), *members]))


def test_only_blocks_with_headers_are_read() -> None:
    content = tar([(f"{i}.x", bytes(5000)) for i in range(20)], tarfile.USTAR_FORMAT)
    file = stored(content)
    done: list[int] = []
    find_samples(file, done.append, 1024)
    assert sum(done) == len(content)
    starts = [start for start, _ in file.storage.reads]  # type: ignore[attr-defined]
    assert starts == [*range(0, 20 * 5632, 5632), 20 * 5632, 20 * 5632]
    file = stored(content)
    find_samples(file, int)
    assert file.storage.reads == [(0, len(content))]  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", ["name", "cut", "more", "less", "end"])
def test_a_range_that_is_not_just_one_sample_is_refused(change: str) -> None:
    content = tar([("a.x", b"1"), ("a.y", b"2"), ("b.z", b"3")], tarfile.USTAR_FORMAT)
    start, stop = {
        "name": (512, 2048),
        "cut": (0, 2000),
        "more": (0, 3072),
        "less": (0, 1536),
        "end": (2048, 3072),
    }[change]
    with pytest.raises(TarError):
        parse_sample(content[start:stop], start, change == "end")
    assert parse_sample(content[:2048], 0, False) == ("a", {"x": b"1", "y": b"2"})


# --- any bytes -----------------------------------------------------------------------------------

CLEAN = {
    name: tar(
        [
            ("a.txt", b"1" * 600),
            ("a.x.json", b"{}"),
            special("d", tarfile.DIRTYPE),
            (LONG + ".txt", b"2"),
            special("ln", tarfile.SYMTYPE, linkname="a.txt"),
            *([] if name == "ustar" else [(LONGER + ".txt", "ö".encode() * 300)]),
            ("z.txt", b"3"),
        ],
        format,
    )
    for name, format in FORMATS.items()
}


def headers(content: bytes) -> list[int]:
    """Where blocks stand that have the sum of a header."""
    starts = range(0, len(content), 512)
    return [
        at
        for at in starts
        if content[at] and summed(content[at : at + 512])[148:155] == content[at + 148 : at + 155]
    ]


# The fields that both readers look at; what one reads laxly the other may refuse.
FIELDS = [*range(100), *range(124, 136), *[156] * 20]
edits = st.lists(
    st.tuples(
        st.sampled_from(FIELDS), st.integers(0, 20), st.sampled_from(b"\0 .014789/LKxgDVS7\xc3\x80")
    ),
    min_size=1,
    max_size=3,
)


def grouped_by_tarfile(content: bytes) -> list[tuple[str, dict[str, bytes]]]:
    named = [(split_name(name), value) for name, value in files_of_tarfile(content)]
    kept = [(*name, value) for name, value in named if name is not None]
    return [
        (key, {extension: value for _, extension, value in group})
        for key, group in groupby(kept, key=lambda member: member[0])
    ]


@settings(max_examples=200)
@given(edits=edits, format=st.sampled_from(list(CLEAN)))
def test_a_tar_with_other_headers_is_read_as_tarfile_does_or_refused(
    edits: list[tuple[int, int, int]], format: str
) -> None:
    content = bytearray(CLEAN[format])
    starts = headers(content)
    for field, number, byte in edits:
        start = starts[number % len(starts)]
        content[start + field] = byte
        content[start : start + 512] = summed(content[start : start + 512])
    agree(bytes(content))


@settings(max_examples=100)
@given(
    moves=st.lists(st.tuples(*[st.integers(0, 40)] * 3), max_size=2),
    format=st.sampled_from(list(CLEAN)),
)
def test_a_tar_with_blocks_in_other_places_is_read_as_tarfile_does_or_refused(
    moves: list[tuple[int, int, int]], format: str
) -> None:
    content = CLEAN[format]
    blocks = [content[at : at + 512] for at in range(0, len(content), 512)]
    for start, count, to in moves:
        moved = blocks[start : start + count % 4]
        if to % 2:
            del blocks[start : start + count % 4]
        blocks[to:to] = moved
    agree(b"".join(blocks))


@settings(max_examples=200)
@given(
    edits=st.lists(st.tuples(st.integers(0, 5000), st.binary(min_size=1, max_size=8)), max_size=4),
    format=st.sampled_from(list(CLEAN)),
    size=st.none() | st.integers(0, 5000),
)
def test_any_bytes_are_samples_or_refused(
    edits: list[tuple[int, bytes]], format: str, size: int | None
) -> None:
    content = bytearray(CLEAN[format][:size])
    for at, change in edits:
        content[at : at + len(change)] = change
    try:
        found = samples(bytes(content))
    except DatasetError:
        return
    assert all(fields for _, fields in found)


def agree(content: bytes) -> None:
    try:
        found = samples(content)
    except DatasetError:
        return
    assert found == grouped_by_tarfile(content)
