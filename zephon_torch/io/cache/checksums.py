"""Checksums of cache entries, in a small file beside each.

``<entry>.sum`` is one line: ``crc32``, eight hexadecimal digits, the number of bytes, and a random
word, which tells one entry from another that is made under its name later. An entry is read once by
each process that holds it, before anything of it is used, and compared. Entries of versions that
wrote no checksum get theirs when they are first held.
"""

from __future__ import annotations

import os
import re
import secrets
import warnings
import zlib
from contextlib import suppress

from zephon_torch.errors import ConfigurationError
from zephon_torch.io.storage.local import write_atomically
from zephon_torch.support.locks import open_own

VERIFY_VARIABLE = "ZEPHON_VERIFY_COPIES"
_LINE = re.compile(r"crc32 ([0-9a-f]{8}) (\d+) [0-9a-f]{16}\n")
_MAX_LINE_BYTES = 100
_STEP_BYTES = 1 << 20

# Lines of the entries that this process made or compared, by path.
_compared: dict[str, str] = {}


class DamagedCopyWarning(UserWarning):
    """A file in the cache was not as it was made; it was removed, and is made anew."""


def warn_damaged(entry: str, name: str, fault: str) -> None:
    """Warn of an entry that is a copy of something, and of what is wrong with it."""
    warnings.warn(
        f"{entry!r}, the copy of {name!r}, is damaged: {fault}. It is made anew; if this happens "
        "again, look after the disk",
        DamagedCopyWarning,
        stacklevel=2,
    )


def write(entry: str, num_bytes: int, crc32: int) -> None:
    """Keep the checksum of an entry that is right; without, where the disk is full, say."""
    line = f"crc32 {crc32:08x} {num_bytes} {secrets.token_hex(8)}\n"
    with suppress(OSError):
        _remove(entry)
        write_atomically(entry + ".sum", [line.encode()], 0o600)
        _compared[entry] = line


def remove_entry(entry: str) -> None:
    """Remove an entry. Its checksum goes first: without the entry, another may be made."""
    _remove(entry)
    os.unlink(entry)


def find_fault(entry: str, descriptor: int, num_bytes: int) -> str:
    """Compare an entry with its size, and once per process with its checksum.

    Args:
        entry: Its path.
        descriptor: The open entry, locked so that nobody makes another one.
        num_bytes: The size that it must have.

    Returns:
        The difference in words; "" where there is none.

    Raises:
        ConfigurationError: The variable that leaves checksums out is neither 0 nor 1.
    """
    if (size := os.fstat(descriptor).st_size) != num_bytes:
        return f"it has {size:,} bytes, {num_bytes:,} when it was made"
    if not _is_wanted():
        return ""
    line = _read(entry)
    if line is not None and _compared.get(entry) == line:
        return ""
    crc32 = _crc32(descriptor, num_bytes)
    if line is None:
        write(entry, num_bytes, crc32)
        return ""
    found = _LINE.fullmatch(line)
    if found is None:
        return "its checksum cannot be read"
    if (int(found[1], 16), int(found[2])) != (crc32, num_bytes):
        return f"its checksum is {crc32:08x}, {found[1]} when it was made"
    _compared[entry] = line
    return ""


def _is_wanted() -> bool:
    text = os.environ.get(VERIFY_VARIABLE, "").strip()
    if text not in ("", "0", "1"):
        raise ConfigurationError(f"{VERIFY_VARIABLE} must be 0 or 1, got {text!r}")
    return text != "0"


def _remove(entry: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(entry + ".sum")


def _read(entry: str) -> str | None:
    try:
        descriptor = open_own(entry + ".sum", os.O_RDONLY)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb", buffering=0) as file:
        return file.read(_MAX_LINE_BYTES).decode("latin-1")


def _crc32(descriptor: int, num_bytes: int) -> int:
    crc32, buffer = 0, memoryview(bytearray(min(_STEP_BYTES, num_bytes)))
    for start in range(0, num_bytes, _STEP_BYTES):
        got = os.preadv(descriptor, [buffer], start)
        crc32 = zlib.crc32(buffer[: min(got, num_bytes - start)], crc32)
    return crc32
