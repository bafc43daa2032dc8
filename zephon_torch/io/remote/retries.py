"""Storage errors: which ones are worth another try, and how the last one is reported.

Known by their type, or by a status as HTTP has it, in whatever attribute a library keeps it.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from zephon_torch.errors import ConfigurationError, StorageError, ZephonError
from zephon_torch.io.remote.options import StorageOptions, masked
from zephon_torch.support import waits

# Seconds before the second try and so on, each made up to half longer or shorter by chance, so that
# ranks that failed together do not ask again together.
DELAYS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)

READ_SECONDS = "ZEPHON_READ_SECONDS"
_DEFAULT_READ_SECONDS = 120.0

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

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(?=::|://)")

_T = TypeVar("_T")


class ShortReadError(Exception):
    """A store gave fewer bytes than it has."""


class AnswerError(Exception):
    """An answer that is none to what was asked for; in words that follow the URL."""


def seconds_allowed() -> float:
    """Time that one read may take with all its tries: 120 s, or `$ZEPHON_READ_SECONDS`.

    Raises:
        ConfigurationError: The variable holds no number above 0.
    """
    text = os.environ.get(READ_SECONDS)
    if not text:
        return _DEFAULT_READ_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ConfigurationError(f"{READ_SECONDS} is {text!r}: expected seconds, above 0")
    return seconds


def until_answered(
    ask: Callable[[float], _T], url: str, options: StorageOptions, *, is_ours: bool, seconds: float
) -> _T:
    """Ask a store; again where that may help, as long as there is time.

    Nothing of what a library raised is kept, neither as a cause nor in a local variable: it may
    hold the headers of a request.

    Args:
        ask: Asks, until the time (of `time.monotonic`) that it is given at the latest.
        url: For people.
        options: Of the storage; none of their texts is shown.
        is_ours: False where the package behind the store tries again by itself.
        seconds: For all tries together.

    Raises:
        FileNotFoundError: There is no such file, folder or bucket.
        StorageError: It failed for good.
    """
    until = time.monotonic() + seconds
    for tries, delay in enumerate((*DELAYS, None), 1):
        failure = answer = _attempt(ask, until, options)
        if not isinstance(failure, Failure):
            return answer  # type: ignore[return-value]
        pause = None if delay is None else delay * (0.5 + secrets.randbelow(1024) / 1024)
        is_over = pause is None or time.monotonic() + pause >= until
        if is_over or not failure.is_passing or not (is_ours or failure.is_short):
            raise failure.error(url, tries)
        waits.pause(pause or 0.0)
    raise AssertionError("the last try returns or raises")


def _attempt(ask: Callable[[float], _T], until: float, options: StorageOptions) -> _T | Failure:
    try:
        return ask(until)
    except Exception as error:
        return describe(error, options)


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed try, as far as it may be shown.

    Attributes:
        told: The error in words, without credentials.
        remedy: Advice to the user.
        is_passing: Whether the same request may succeed a little later.
        is_short: Whether the store gave too few bytes.
        is_missing: Whether there is no such file.
        own: An error of this package, to be raised as it is.
    """

    told: str = ""
    remedy: str = ""
    is_passing: bool = False
    is_short: bool = False
    is_missing: bool = False
    own: ZephonError | None = None

    def error(self, url: str, tries: int) -> Exception:
        """Make the exception to raise in place of the library's."""
        if self.own is not None:
            return self.own
        if self.is_missing:
            return FileNotFoundError(errno.ENOENT, "no such file", url)
        if not self.remedy:
            return StorageError(f"the store of {url!r} {self.told}")
        tried = f" after {tries} tries" if tries > 1 else ""
        return StorageError(f"cannot read {url!r}{tried} ({self.told}): {self.remedy}")


def describe(raised: Exception, options: StorageOptions) -> Failure:
    """Describe what a library raised."""
    error = _behind(raised)
    if isinstance(error, ZephonError):
        error.__context__ = None  # and without frames of libraries, which hold options as they are
        return Failure(own=error.with_traceback(None))
    if isinstance(error, FileNotFoundError):
        return Failure(is_missing=True)
    if isinstance(error, AnswerError):
        return Failure(told=str(error))
    what = type(error).__name__
    if text := without_credentials(str(error), options):
        what += f": {text}"
    is_short = isinstance(error, ShortReadError)
    return Failure(what, _remedy(error), is_passing=is_passing(error), is_short=is_short)


def protocols(url: str) -> list[str]:
    """Protocols of a URL, which may be a chained one, the outermost first."""
    return _SCHEME.findall(url)


def retries_itself(url: str) -> bool:
    """Whether the package behind a URL, which may be a chained one, tries again by itself."""
    return not _RETRY_THEMSELVES.isdisjoint(protocols(url))


def is_passing(error: BaseException) -> bool:
    """Whether the same request may well succeed a little later."""
    if (status := _status(error)) is not None:
        return status in _PASSING_STATUS or status >= 500
    if isinstance(error, TimeoutError | ConnectionError | ShortReadError):
        return True
    return any(kind.__name__ in _PASSING_TYPES for kind in type(error).__mro__)


def _behind(error: Exception) -> Exception:
    """Find the real failure: fsspec's web client reports any failure as a missing file."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or not isinstance(cause, Exception):
        return error
    is_absence = _status(cause) in (None, 404, 410) and not is_passing(cause)
    # an option that the client does not know, an answer that was refused
    is_absence &= not isinstance(cause, TypeError | AnswerError)
    return error if is_absence else cause


def is_past_the_end(error: BaseException) -> bool:
    """Whether a range was asked for that begins behind the end of the file."""
    return _status(error) == _RANGE_NOT_SATISFIABLE or "InvalidRange" in str(error)


def extra_of(url: str) -> str | None:
    """The extra of this package that brings what a URL needs."""
    return next((_EXTRAS[name] for name in protocols(url) if name in _EXTRAS), None)


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


def without_credentials(text: str, options: StorageOptions) -> str:
    """A message without the texts in options, and without users and queries in URLs."""
    for secret in sorted(set(options.texts()), key=len, reverse=True):
        text = text.replace(secret, "***")
    return masked(text)
