"""How the columns of MDS records are encoded, by the names that MosaicML Streaming gives them.

Numbers come as Python's, arrays with the type they are stored in and in memory of their own, images
as PIL images. Pickles are refused unless they are asked for.

Source: ``streaming/base/format/mds/encodings.py`` of mosaicml-streaming 0.13.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from zephon_torch.errors import DatasetError
from zephon_torch.io.formats.pickles import REMEDY, AllowPickle, NotLoaded
from zephon_torch.support.extras import require

Decode: TypeAlias = Callable[[bytes], Any]

_SCALARS = {
    "int": "<q",
    "uint8": "<B", "uint16": "<H", "uint32": "<I", "uint64": "<Q",
    "int8": "<b", "int16": "<h", "int32": "<i", "int64": "<q",
    "float16": "<e", "float32": "<f", "float64": "<d",
}  # fmt: skip
_ARRAY_DTYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32",
    34: "float32", 64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip
# "jpeg" columns hold whatever bytes were given for them; formats whose decoders start programs or
# open other files are no images of ours.
_IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")


@cache
def decoder_of(encoding: str, allow_pickle: AllowPickle = False) -> Decode:
    """From the bytes of a value to the value; raises anything if they are no such value.

    Args:
        encoding: By its name.
        allow_pickle: See ``pickles.py``.

    Raises:
        DatasetError: An encoding that is not read.
        ConfigurationError: Its package is not installed.
    """
    name, _, parameters = encoding.partition(":")
    if name in _SCALARS and not parameters:
        unpack = struct.Struct(_SCALARS[name]).unpack
        return lambda data: unpack(data)[0]
    if name == "ndarray":
        return _array_decoder(encoding, parameters)
    if name in _IMAGES:
        require("PIL.Image", "images", f"a column of {encoding!r}")
        return _IMAGES[name]
    if name in _OTHERS and not parameters:
        return _OTHERS[name]
    if name == "pkl":
        return _pickle_decoder(allow_pickle)
    raise DatasetError(f"encoding {encoding!r} is not read: write the column anew as 'bytes', say")


def _pickle_decoder(allow_pickle: AllowPickle) -> Decode:
    if allow_pickle is None:
        return lambda data: NotLoaded(len(data))
    if not allow_pickle:
        raise DatasetError(
            f"encoding 'pkl' holds pickles; {REMEDY}, or write the column anew, as 'json' or "
            "'bytes' say"
        )
    return pickle.loads


def _text(data: bytes) -> str:
    return data.decode()


_OTHERS: dict[str, Decode] = {
    "bytes": lambda data: data,
    "str": _text,
    "json": lambda data: json.loads(_text(data)),
    "str_int": lambda data: int(_text(data)),
    "str_float": lambda data: float(_text(data)),
    "str_decimal": lambda data: Decimal(_text(data)),
}


def _image(data: bytes) -> Any:
    from PIL import Image

    image = Image.open(io.BytesIO(data), formats=_IMAGE_FORMATS)
    image.load()  # now, where the record is known if it is broken
    return image


def _raw_image(data: bytes) -> Any:
    """Width, height, length of the mode, mode, pixels."""
    from PIL import Image

    width, height, mode_bytes = struct.unpack_from("<III", data)
    pixels = data[12 + mode_bytes :]
    if width * height > 8 * len(pixels):  # before memory is taken; a pixel has a bit at least
        raise ValueError(f"{len(pixels):,} bytes for {width} x {height} pixels")
    return Image.frombytes(_text(data[12 : 12 + mode_bytes]), (width, height), pixels)


_IMAGES: dict[str, Decode] = {"jpeg": _image, "png": _image, "pil": _raw_image}


@dataclass(frozen=True, slots=True)
class _ArrayDecoder:
    """Values of an array; what is not in the encoding's name stands before them.

    Attributes:
        dtype: None for a byte in front of each array, a key of `_ARRAY_DTYPES`.
        shape: None for a byte of 4 * axes + size (0 to 3: uint8 to uint64), then the lengths.
    """

    dtype: np.dtype[Any] | None
    shape: tuple[int, ...] | None

    def __call__(self, data: bytes) -> npt.NDArray[Any]:
        at, dtype, shape = 0, self.dtype, self.shape
        if dtype is None:
            name = _ARRAY_DTYPES.get(data[0]) if data else None
            if name is None:
                raise ValueError(f"no type of values has the code {data[:1].hex() or 'none'}")
            at, dtype = 1, np.dtype(name).newbyteorder("<")
        if shape is None:
            num_axes, kind = divmod(data[at], 4) if at < len(data) else (len(data), 0)
            start, at = at + 1, at + 1 + (num_axes << kind)
            if at > len(data):
                raise ValueError("it ends within its shape")
            shape = tuple(np.frombuffer(data[start:at], f"<u{1 << kind}").tolist())
        if (wanted := math.prod(shape) * dtype.itemsize) != len(data) - at:
            raise ValueError(
                f"{len(data) - at:,} bytes of values, {wanted:,} for shape {shape} of {dtype}"
            )
        values = np.frombuffer(data, dtype, offset=at) if wanted else np.empty(0, dtype)
        return values.reshape(shape).astype(dtype.newbyteorder("="))


def _array_decoder(encoding: str, parameters: str) -> Decode:
    """Of ``ndarray``, ``ndarray:dtype`` or ``ndarray:dtype:4,5``."""
    name, _, lengths = parameters.partition(":")
    try:
        shape = tuple(map(int, lengths.split(","))) if lengths else None
    except ValueError:
        shape = (0,)
    if name not in ("", *_ARRAY_DTYPES.values()) or (shape is not None and min(shape) < 1):
        raise DatasetError(f"encoding {encoding!r} is none of the arrays that MDS knows")
    return _ArrayDecoder(np.dtype(name).newbyteorder("<") if name else None, shape)
