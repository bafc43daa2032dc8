"""Progress: the integers that flow back, and their two forms.

A run stands at (epoch, delivered): so many samples of this epoch, over all ranks, have been handed
to the training loop. With the number of lanes and the fingerprint of the plan this is the whole
state; it is the same on every rank and says nothing about ranks, workers or batch size.

- **dict form** (``loader.state_dict()``): plain ints and strings under fixed keys, JSON-able.
- **words form** (:func:`zephon_torch.bind`): 16 signed 64-bit integers,
  ``[version, epoch, delivered, lanes, fingerprint x 4, digests x 4, datasets, shards, samples, 0,
  checksum]``; digests and the three counts are those of
  :class:`~zephon_torch.work.identity.identity.PlanIdentity`, so that a mismatch can still be told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zephon_torch.errors import PlanMismatch, StateError
from zephon_torch.support import checks
from zephon_torch.work.identity.identity import PARTS, PlanIdentity, signed
from zephon_torch.work.identity.mismatch import differences
from zephon_torch.work.identity.spellings import is_same_plan

STATE_VERSION = 1
NUM_WORDS = 16
MAX_EPOCH = (1 << 62) - 1
MAX_LANES = 1 << 30
_MAX_COUNT = (1 << 62) - 1


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands.

    Attributes:
        epoch: current epoch, from 0.
        delivered: samples of this epoch handed over so far, over all ranks.
        lanes: sub-streams of the delivery order.
        fingerprint: of the plan, 64 hexadecimal digits.
        description: JSON text of the plan, digests and sizes included; empty where the state came
            as words.
        digests: of the parts of the plan; empty where the state came as a dict.
        sizes: datasets, shards and samples of the plan; empty likewise.
    """

    epoch: int
    delivered: int
    lanes: int
    fingerprint: str
    description: str = field(default="", compare=False, repr=False)
    digests: tuple[int, ...] = field(default=(), compare=False, repr=False)
    sizes: tuple[int, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def at(cls, identity: PlanIdentity, *, epoch: int, delivered: int, lanes: int) -> Progress:
        """Progress on a plan."""
        return cls(
            epoch,
            delivered,
            lanes,
            identity.fingerprint,
            identity.description,
            identity.digests,
            identity.sizes,
        )

    def to_dict(self, counted: str = "delivered") -> dict[str, int | str]:
        """The dict form: a fresh dict of ints and strings.

        Args:
            counted: key of the count. States that count other things than delivered samples call
                them by another name, so that none is taken for another.
        """
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            counted: self.delivered,
            "lanes": self.lanes,
            "fingerprint": self.fingerprint,
            "description": self.description,
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], counted: str = "delivered") -> Progress:
        """Read the dict form.

        Args:
            state: what :meth:`to_dict` made.
            counted: key of the count.

        Raises:
            StateError: anything that :meth:`to_dict` cannot have made; the message names the key.
        """
        if not isinstance(state, Mapping):
            raise StateError(f"expected the dict that state_dict() gives, got {_type(state)}")
        texts = ("fingerprint", "description")
        missing = [
            key for key in ("version", "epoch", counted, "lanes", *texts) if key not in state
        ]
        if missing:
            raise StateError(
                f"the state has no {missing[0]!r}: it was written by something else (it has "
                f"{sorted(map(checks.shown, list(state)[:8]))})"
            )
        _check_version(_count("version", state["version"]))
        numbers = {key: _count(key, state[key]) for key in ("epoch", counted, "lanes")}
        for key in texts:
            if not isinstance(state[key], str):
                raise StateError(f"{key!r} in the state is {_type(state[key])}, expected a string")
        return cls(
            *_checked(numbers, counted),
            fingerprint=_hexadecimal(state["fingerprint"]),
            description=state["description"],
        )

    def to_words(self) -> list[int]:
        """The words form: 16 signed 64-bit integers."""
        data = bytes.fromhex(self.fingerprint)
        words = [
            STATE_VERSION,
            self.epoch,
            self.delivered,
            self.lanes,
            *(signed(data[i : i + 8]) for i in range(0, 32, 8)),
            *(self.digests or (0,) * len(PARTS)),
            *(self.sizes or (0, 0, 0)),
        ]
        words += [0] * (NUM_WORDS - 1 - len(words))
        return [*words, _checksum(words)]

    @classmethod
    def from_words(cls, words: Sequence[int]) -> Progress:
        """Read the words form.

        Raises:
            StateError: another length or version, or a checksum that does not hold (as after a
                cast of all tensors to bfloat16).
        """
        is_whole = len(words) == NUM_WORDS and all(
            type(word) is int and -(1 << 63) <= word < 1 << 63 for word in words
        )
        if not is_whole or _checksum(words[:-1]) != words[-1]:
            raise StateError(
                f"the data progress in the state is not {NUM_WORDS} integers whose checksum holds: "
                "they were changed, for example by casting every tensor of a checkpoint to a float "
                "type, or written by something else"
            )
        _check_version(words[0])
        numbers = {"epoch": words[1], "delivered": words[2], "lanes": words[3]}
        fingerprint = b"".join(w.to_bytes(8, "little", signed=True) for w in words[4:8]).hex()
        return cls(
            *_checked(numbers, "delivered"),
            fingerprint=fingerprint,
            digests=tuple(words[8:12]),
            sizes=tuple(words[12:15]),
        )

    def on(self, identity: PlanIdentity) -> Progress:
        """The same as a state of a plan if it is one under another spelling, else itself."""
        if self.fingerprint == identity.fingerprint or not is_same_plan(
            identity, self.fingerprint, self.description
        ):
            return self
        return self.at(identity, epoch=self.epoch, delivered=self.delivered, lanes=self.lanes)

    def check(self, identity: PlanIdentity) -> None:
        """Compare with a plan.

        Raises:
            PlanMismatch: another plan; the message names all parts that differ.
        """
        if is_same_plan(identity, self.fingerprint, self.description):
            return
        lines = differences(identity, self.description, self.digests, self.sizes)
        if not lines:
            lines = [f"fingerprint {self.fingerprint[:12]} then, {identity.fingerprint[:12]} now"]
        told = (
            f" {lines[0]}. " if len(lines) == 1 else "".join(f"\n- {one}" for one in lines) + "\n"
        )
        raise PlanMismatch(
            f"the checkpoint belongs to another plan:{told}Build the loader as it was; or accept "
            "the new plan, to go on at the same epoch and number of samples of its order (samples "
            "of this epoch may then repeat or be missed), with "
            "loader.load_state_dict(loader.state_dict(), strict=False)"
        )


def _checked(numbers: dict[str, int], counted: str) -> tuple[int, int, int]:
    return (
        _count("epoch", numbers["epoch"], 0, MAX_EPOCH),
        _count(counted, numbers[counted], 0, _MAX_COUNT),
        _count("lanes", numbers["lanes"], 1, MAX_LANES),
    )


def _count(key: str, value: object, minimum: int | None = None, maximum: int | None = None) -> int:
    name = f"{key!r} in the state"
    return checks.integer(name, value, minimum=minimum, maximum=maximum, error=StateError)


def _check_version(version: int) -> None:
    if version != STATE_VERSION:
        raise StateError(
            f"the state has version {checks.shown(version)}, this zephon_torch reads version "
            f"{STATE_VERSION}"
        )


def _hexadecimal(fingerprint: str) -> str:
    if len(fingerprint) != 64 or set(fingerprint) - set("0123456789abcdef"):
        raise StateError(
            f"the fingerprint in the state is {checks.shown(fingerprint)}, expected 64 hex digits"
        )
    return fingerprint


def _checksum(words: Sequence[int]) -> int:
    data = b"".join(int(word).to_bytes(8, "little", signed=True) for word in words)
    return signed(hashlib.sha256(b"zephon_torch/progress" + data).digest()[:8])


def _type(value: object) -> str:
    return type(value).__name__
