"""Stamps of remote files, made of whatever a store says about their versions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any


def stamp_of(info: Mapping[str, Any]) -> int:
    """Make a stamp, as `FileInfo` describes it, of what a store says about a version of a file."""
    for key in ("ETag", "etag"):
        if tag := info.get(key):
            # Listings and single look-ups differ in quotes.
            digest = hashlib.sha256(str(tag).removeprefix("W/").strip('"').encode()).digest()
            return -1 - (int.from_bytes(digest[:8]) >> 1)
    for key in ("mtime", "LastModified", "last_modified", "Last-Modified", "updated", "created"):
        if time := info.get(key):
            return _microseconds(time) * 1000
    return 0


def _microseconds(time: datetime | float | str) -> int:
    """Since 1970. One store gives the same time as number, object or text in different calls."""
    if isinstance(time, str):
        is_iso = time[:1].isdecimal()
        time = datetime.fromisoformat(time) if is_iso else parsedate_to_datetime(time)
    return round((time.timestamp() if isinstance(time, datetime) else time) * 1e6)
