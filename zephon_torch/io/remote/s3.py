"""Ranges of files over S3: nothing but the bytes that were asked for.

Each answer of s3fs's clients is checked as soon as its headers are there (``answers.py``), by
handlers of botocore's events, whoever asked.
"""

from __future__ import annotations

from typing import Any

from zephon_torch.io.remote.answers import Body, checked_size, with_prepared

S3 = ("s3", "s3a")
_ASKED = "zephon_torch_range"


def with_checks(options: dict[str, Any], protocols: list[str]) -> dict[str, Any]:
    """Options for fsspec whose S3 clients check what they are sent.

    Args:
        options: Options of the user; taken over.
        protocols: Protocols of the URL, the outermost first.
    """
    try:
        import aiobotocore.hooks  # noqa: F401
    except ImportError:  # fsspec says what is missing
        return options
    return with_prepared(options, protocols, S3, _prepared)


def _prepared(options: dict[str, Any]) -> dict[str, Any]:
    events: Any = options.get("session")  # of the user, or one that s3fs makes of these options
    if events is None:
        events = options.get("event_hooks") or _emitter()
        options["event_hooks"] = events
    events.register("before-call.s3.GetObject", _note_range, unique_id="zephon-torch-range")
    events.register("after-call.s3.GetObject", _check_answer, unique_id="zephon-torch-answer")
    return options


def _emitter() -> Any:
    """One for each client: botocore adds handlers of its own."""
    from aiobotocore.hooks import AioHierarchicalEmitter

    class Emitter(AioHierarchicalEmitter):  # type: ignore[misc]
        def __repr__(self) -> str:
            return "zephon_torch's checks"  # fsspec knows a client again by its options' texts

    return Emitter()


def _note_range(params: dict[str, Any], context: dict[str, Any], **_: Any) -> None:
    context[_ASKED] = params["headers"].get("Range", "")


def _check_answer(
    http_response: Any, parsed: dict[str, Any], context: dict[str, Any], **_: Any
) -> None:
    if http_response.status_code >= 300:
        return
    headers = {name.title(): value for name, value in http_response.headers.items()}
    if headers.get("Content-Length", "").isdecimal():
        # said of what is stored: bytes and ranges are those of the stored object, and their
        # number is compared. What is packed on its way has another one, or tells none
        headers.pop("Content-Encoding", None)
    # some servers (gofakes3, which is rclone's) say which range they send, as 200
    status = 206 if "Content-Range" in headers else http_response.status_code
    try:
        num_bytes = checked_size(status, headers, context.get(_ASKED, ""))
    except Exception:
        parsed["Body"].close()  # not to be read
        raise
    if num_bytes:
        parsed["Body"] = Body(parsed["Body"], num_bytes)
