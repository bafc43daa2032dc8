"""Decoders for the members of tar samples, by extension, as webdataset names them.

The list is closed, whatever the installed version of webdataset adds to its own: data comes from
anywhere, so a decoder that runs code, starts programs or takes memory without end is not run just
because a member has its name. Of webdataset's decoders

- ``pkl``, ``pickle``, ``pyd``, ``pth`` load pickles: only with ``allow_pickle=True``;
- ``npy`` and ``npz`` may hold pickles: likewise;
- ``gz`` and ``npz`` unpack to any size: at most `MAX_UNPACKED_BYTES`;
- ``ten`` and ``tb`` go round for ever where a length is negative: lengths are checked first;
- ``cbor`` overflows the stack of the process on deep nesting: never, a function can be given;
- images of PostScript start Ghostscript, under any extension: never, likewise;
- ``txt``, ``cls``, ``json``, ``mp`` and their other names do none of that.
"""

from __future__ import annotations

import gzip
import io
import json
import struct
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from zephon_torch.errors import ConfigurationError
from zephon_torch.io.formats.pickles import AllowPickle, NotLoaded, PickleRefused
from zephon_torch.support.extras import require

MAX_UNPACKED_BYTES = 1 << 30

# Called with "." and the extension, and the content; None passes both on to the next.
Handler = Callable[[str, bytes], Any]
Decode = bool | str | Handler | Sequence[str | Handler]

_PICKLES = ("pkl", "pickle", "pyd", "pth")
_POSTSCRIPT = (b"%!PS", b"\xc5\xd0\xd3\xc6")  # how files begin that PIL takes for it
_CHUNK = struct.Struct("<8sq")  # of .ten files: magic and length, then the bytes
_CHUNK_ALIGNMENT = 64


def make_decode(decode: Decode, allow_pickle: AllowPickle) -> Callable[[str, bytes], Any]:
    """Make a function that decodes one content by its extension.

    The function raises `PickleRefused` for pickles that are not allowed, ConfigurationError for
    what is never decoded, and anything for contents that cannot be decoded.
    """
    import webdataset

    named = (
        partial(_image, webdataset.imagehandler(handler)) if isinstance(handler, str) else handler
        for handler in handlers(decode)
    )
    basic = partial(_basic, _decoders(allow_pickle))
    decoder = webdataset.Decoder(list(named), pre=[_unpack], post=[basic])

    def decode_one(extension: str, content: bytes) -> Any:
        if not extension.startswith("__"):
            return decoder.decode1(extension, content)
        try:  # what webdataset takes for notes about a sample
            return content.decode()
        except UnicodeDecodeError:
            return content

    return decode_one


def handlers(decode: Any) -> Sequence[Any]:
    """Return what comes before the basic decoders; holds what `decode` must not be, too."""
    if isinstance(decode, bool):
        return ()
    is_several = isinstance(decode, Sequence) and not isinstance(decode, str | bytes)
    return decode if is_several else (decode,)


def check_handler(handler: object) -> None:
    """Refuse what is no decoder.

    Raises:
        ConfigurationError: Neither the name of an image decoder nor a function, or PIL is missing.
    """
    if isinstance(handler, str):
        _check_image_decoder(handler)
    elif not callable(handler):
        raise ConfigurationError(
            "decode must be True, False, the name of an image decoder, a function, or a "
            f"sequence of names and functions, got {handler!r}"
        )


def _check_image_decoder(name: str) -> None:
    import webdataset

    try:
        webdataset.imagehandler(name)
    except ValueError:
        raise ConfigurationError(
            f"webdataset has no image decoder {name!r}: decode= takes 'pil', 'rgb8', 'torchrgb' "
            "and the others of webdataset.imagehandler"
        ) from None
    require("PIL", "images", f"decode={name!r}")


def _decoders(allow_pickle: AllowPickle) -> dict[str, Callable[[bytes], Any]]:
    """Basic decoders by the last part of the extension."""
    known: dict[str, Callable[[bytes], Any]] = {"cbor": _refuse_cbor}
    known |= dict.fromkeys(("txt", "text", "transcript"), bytes.decode)
    known |= dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int)
    known |= dict.fromkeys(("json", "jsn"), json.loads)
    known |= dict.fromkeys(("ten", "tb"), _tensors)
    known |= dict.fromkeys(("mp", "msg"), _msgpack)
    known |= {name: partial(_pickled, allow_pickle, name) for name in _PICKLES}
    return known | {
        name: partial(_maybe_pickled, allow_pickle, load)
        for name, load in (("npy", _npy), ("npz", _npz))
    }


def _basic(decoders: dict[str, Callable[[bytes], Any]], key: str, content: bytes) -> Any:
    decode = decoders.get(key.rpartition(".")[2])
    return None if decode is None else decode(content)


def _unpack(key: str, content: bytes) -> Any:
    if not key.endswith(".gz"):
        return None
    from webdataset.autodecode import Continue

    with gzip.GzipFile(fileobj=io.BytesIO(content)) as stream:
        unpacked = stream.read(MAX_UNPACKED_BYTES + 1)
    _check_unpacked(len(unpacked))
    return Continue(key.removesuffix(".gz"), unpacked)


def _check_unpacked(num_bytes: int) -> None:
    if num_bytes > MAX_UNPACKED_BYTES:
        raise ValueError(f"it unpacks to more than {MAX_UNPACKED_BYTES:,} bytes")


def _pickled(allow_pickle: AllowPickle, extension: str, content: bytes) -> Any:
    """Load a pickle as webdataset does, which has switches of its own in the environment."""
    from webdataset.autodecode import decoders

    if allow_pickle:
        return decoders[extension](content)
    if allow_pickle is None:
        return NotLoaded(len(content))
    raise PickleRefused


def _maybe_pickled(
    allow_pickle: AllowPickle, load: Callable[[bytes, bool], Any], content: bytes
) -> Any:
    try:
        return load(content, allow_pickle is True)
    except ValueError as error:
        if "allow_pickle=False" not in str(error):  # numpy's words
            raise
        if allow_pickle is not None:
            raise PickleRefused from error
    return NotLoaded(len(content))


def _npy(content: bytes, allow_pickle: bool) -> Any:
    return np.lib.format.read_array(io.BytesIO(content), allow_pickle=allow_pickle)


def _npz(content: bytes, allow_pickle: bool) -> Any:
    with zipfile.ZipFile(io.BytesIO(content)) as files:
        _check_unpacked(sum(file.file_size for file in files.infolist()))
    with np.load(io.BytesIO(content), allow_pickle=allow_pickle) as arrays:
        return dict(arrays)


def _tensors(content: bytes) -> Any:
    """Arrays of webdataset's own kind (``webdataset/tenbin.py``)."""
    from webdataset import tenbin

    at = 0
    while at < len(content):
        _, num_bytes = _CHUNK.unpack_from(content, at)
        at += _CHUNK.size
        if not 0 <= num_bytes <= len(content) - at:
            raise ValueError(f"a part claims {num_bytes} bytes, {len(content) - at} are left")
        at += -(-num_bytes // _CHUNK_ALIGNMENT) * _CHUNK_ALIGNMENT
    return tenbin.decode_buffer(content)


def _msgpack(content: bytes) -> Any:
    return import_module("msgpack").unpackb(content)


def _refuse_cbor(content: bytes) -> Any:
    raise ConfigurationError(
        "the package cbor ends the process on content that is nested deep, so it is not used: give "
        "decode= a function for '.cbor', with cbor2.loads say, or decode=False"
    )


def _image(decode: Any, key: str, content: bytes) -> Any:
    """Decode an image by one of webdataset's handlers, but for what PIL starts a program."""
    if content.startswith(_POSTSCRIPT) and key.rpartition(".")[2] in decode.extensions:
        raise ConfigurationError(
            "it is PostScript, for which PIL starts Ghostscript: leave it out, or give decode= a "
            "function for it"
        )
    return decode(key, content)
