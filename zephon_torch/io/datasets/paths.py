"""Many relative paths as one piece of bytes: a million are some tens of megabytes, not objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt


class Paths(Sequence[str]):
    """An immutable sequence of texts, each made when asked for.

    Args:
        content: The texts in UTF-8 (bytes that are none as ``surrogateescape`` has them), each with
            a NUL byte behind it.

    Attributes:
        content: The argument.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content
        ends = np.flatnonzero(np.frombuffer(content, np.uint8) == 0)
        self._starts: npt.NDArray[np.int64] = np.concatenate(([0], ends + 1)).astype(np.int64)

    @classmethod
    def of(cls, paths: Iterable[str]) -> Paths:
        """Pack texts.

        Raises:
            ValueError: One holds a NUL character.
        """
        texts = list(paths)
        content = "".join(f"{text}\0" for text in texts).encode("utf-8", "surrogateescape")
        packed = cls(content)
        if len(packed) != len(texts):
            bad = next(text for text in texts if "\0" in text)
            raise ValueError(f"the path {bad!r} holds a NUL character")
        return packed

    @property
    def num_bytes(self) -> npt.NDArray[np.int64]:
        """int64[n]: length of each text in bytes."""
        lengths: npt.NDArray[np.int64] = np.diff(self._starts) - 1
        return lengths

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._text(number) for number in range(len(self))[index]]
        return self._text(range(len(self))[index])

    def __iter__(self) -> Iterator[str]:
        texts = self.content.split(b"\0")
        return (text.decode("utf-8", "surrogateescape") for text in texts[:-1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Paths) and self.content == other.content

    def __hash__(self) -> int:
        return hash(self.content)

    def __repr__(self) -> str:
        return f"<{len(self):,} paths>"

    def __reduce__(self) -> tuple[type[Paths], tuple[bytes]]:
        return type(self), (self.content,)

    def _text(self, number: int) -> str:
        text = self.content[self._starts[number] : self._starts[number + 1] - 1]
        return text.decode("utf-8", "surrogateescape")
