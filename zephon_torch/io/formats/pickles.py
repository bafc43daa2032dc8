"""Pickles inside of data: loading one runs whatever code it holds, so nobody does unless asked to.

The word is numpy's: ``allow_pickle``. False refuses, True loads, None puts a :class:`NotLoaded` in
the place of each pickle, for those who only look.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from zephon_torch.errors import ConfigurationError

AllowPickle: TypeAlias = bool | None

REMEDY = (
    "loading a pickle runs whatever code it holds: give allow_pickle=True if you trust whoever "
    "made the file"
)


class PickleRefused(Exception):
    """A pickle where none is allowed; readers catch it and name file and record."""


@dataclass(frozen=True, slots=True, repr=False)
class NotLoaded:
    """Stands in a sample for a pickle that was not loaded.

    Attributes:
        num_bytes: size of the pickle.
    """

    num_bytes: int

    def __repr__(self) -> str:
        return f"<pickle of {self.num_bytes:,} bytes, not loaded>"


def check_allow_pickle(value: object) -> None:
    """Refuse anything but True, False and None.

    Raises:
        ConfigurationError: It is something else.
    """
    if value is not None and not isinstance(value, bool):
        raise ConfigurationError(f"allow_pickle is {value!r}: expected True or False")
