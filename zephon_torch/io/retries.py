"""Which failures of a store are worth another try, and what is said of those that last.

Known by their type, or by a status as HTTP has it, in whatever attribute a library keeps it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from zephon_torch.errors import DatasetError

# Seconds before the second try and so on. Always the same: so many processes never ask at once
# that they would have to be spread by chance.
DELAYS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)

# Their packages try again by themselves.
_RETRY_THEMSELVES = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl"}

_EXTRAS = {
    "s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure",
    "az": "azure", "adl": "azure", "http": "http", "https": "http", "hf": "hub",
}  # fmt: skip

_PASSING_STATUS = {408, 425, 429}
# By name, because their packages may not be there to import from.
_PASSING_TYPES = {
    "ClientConnectionError", "ClientPayloadError", "ConnectionError", "HTTPClientError",
    "IncompleteRead", "ProtocolError",
}  # fmt: skip
_RANGE_NOT_SATISFIABLE = 416

_SHOWN_OPTIONS = {"endpoint_url", "region_name"}

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(?=::|://)")
_USER_INFO = re.compile(r"://[^/@\s]*@")
_QUERY = re.compile(r"\?[^\s'\")>]+")


class ShortReadError(Exception):
    """A store gave fewer bytes than it has."""


def retries_itself(url: str) -> bool:
    """Whether the package behind a URL, which may be a chained one, tries again by itself."""
    return not _RETRY_THEMSELVES.isdisjoint(_SCHEME.findall(url))


def is_passing(error: BaseException) -> bool:
    """Whether the same request may well succeed a little later."""
    if (status := _status(error)) is not None:
        return status in _PASSING_STATUS or status >= 500
    if isinstance(error, TimeoutError | ConnectionError | ShortReadError):
        return True
    return any(kind.__name__ in _PASSING_TYPES for kind in type(error).__mro__)


def behind(error: Exception) -> Exception:
    """What really failed: fsspec's web client says of any failure that there is no such file."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or not isinstance(cause, Exception):
        return error
    is_absence = _status(cause) in (None, 404, 410) and not is_passing(cause)
    is_absence &= not isinstance(cause, TypeError)  # an option that the client does not know
    return error if is_absence else cause


def is_past_the_end(error: BaseException) -> bool:
    """Whether a range was asked for that begins behind the end of the file."""
    return _status(error) == _RANGE_NOT_SATISFIABLE or "InvalidRange" in str(error)


def extra_of(url: str) -> str | None:
    """The extra of this package that brings what a URL needs."""
    return next((_EXTRAS[name] for name in _SCHEME.findall(url) if name in _EXTRAS), None)


def failure(url: str, error: BaseException, tries: int, options: Mapping[str, Any]) -> DatasetError:
    """The error to raise in place of a library's, in words and without credentials.

    Args:
        url: for people.
        error: what the library raised last.
        tries: how often it was tried.
        options: of the storage; none of their texts is shown.
    """
    what = type(error).__name__
    if text := without_credentials(str(error), options):
        what += f": {text}"
    tried = f" after {tries} tries" if tries > 1 else ""
    return DatasetError(f"cannot read {url!r}{tried} ({what}): {_remedy(error)}")


def _remedy(error: BaseException) -> str:
    name = type(error).__name__
    if isinstance(error, PermissionError) or _status(error) in (401, 403) or "Credential" in name:
        return "check the credentials in storage_options= or the environment, and what they allow"
    if is_passing(error):
        return "the store or the network to it fails; a saved state goes on at the next sample"
    return "check the URL and storage_options="


def _status(error: BaseException) -> int | None:
    for name in ("status", "status_code", "code"):
        status = getattr(error, name, None)
        if isinstance(status, str) and status.isdecimal():
            status = int(status)
        if isinstance(status, int) and 100 <= status < 600:
            return status
    return None


def without_credentials(text: str, options: Mapping[str, Any]) -> str:
    """A message without the texts in options, and without users and queries in URLs."""
    for secret in sorted(set(_texts(options)), key=len, reverse=True):
        text = text.replace(secret, "***")
    return _QUERY.sub("?***", _USER_INFO.sub("://", text))


def _texts(value: object) -> Iterator[str]:
    """All texts in options, but for those so short that they stand in any message."""
    if isinstance(value, str):
        if len(value) > 3:
            yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in _SHOWN_OPTIONS:
                yield from _texts(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
