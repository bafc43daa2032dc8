"""The options of a plan, checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from zephon_torch.errors import ConfigurationError
from zephon_torch.support import checks
from zephon_torch.work.order.composition import Interleave
from zephon_torch.work.order.sample_order import ShuffleLevels
from zephon_torch.work.order.stopping import StopRules, per_dataset

_LARGEST_CHUNK = 1 << 30
LEVELS = ("shuffle_shards", "shuffle_within_shard", "shuffle_block_size")
RULES = ("stop_after_passes", "exhausted_policy", "max_repeats", "max_samples")
GROUPS = (LEVELS, RULES, ("chunk_size",), ("reshuffle_on_repeat",), ("interleave",))
"""Names of the options; those of a group act together, and apart from those of other groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options that the order of a plan depends on, besides its datasets and weights.

    Attributes:
        seed: any integer.
        chunk_size: positions in a chunk, 1 .. 2**30.
        levels: shuffle levels, see :mod:`zephon_torch.work.order.sample_order`.
        rules: stop options, see :mod:`zephon_torch.work.order.stopping`.
        reshuffle_on_repeat: whether passes and epochs get orders of their own; one value, or a
            mapping by dataset name (True for those it does not name).
        interleave: "balanced" or "shuffle", see :mod:`zephon_torch.work.order.interleave`.

    Raises:
        ConfigurationError: an option that cannot work.
    """

    seed: int
    chunk_size: int
    levels: ShuffleLevels
    rules: StopRules
    reshuffle_on_repeat: bool | Mapping[str, bool]
    interleave: Interleave

    def __post_init__(self) -> None:
        chunk_size = checks.integer(
            "chunk_size", self.chunk_size, minimum=1, maximum=_LARGEST_CHUNK
        )
        # plain ints from here on, whatever integers were given
        object.__setattr__(self, "seed", checks.integer("seed", self.seed))
        object.__setattr__(self, "chunk_size", chunk_size)
        if self.interleave not in get_args(Interleave):
            raise ConfigurationError(
                f'interleave is {self.interleave!r}: expected "balanced" or "shuffle"'
            )
        for where, value in _flags(self):
            if not isinstance(value, bool):
                raise ConfigurationError(f"{where} is {value!r}: expected True or False")

    def check_names(self, names: Sequence[str]) -> None:
        """Refuse options by dataset name that name a dataset which does not exist."""
        for option, value in (
            ("exhausted_policy", self.rules.exhausted_policy),
            ("max_repeats", self.rules.max_repeats),
            ("reshuffle_on_repeat", self.reshuffle_on_repeat),
        ):
            for name in value if isinstance(value, Mapping) else ():
                if name not in names:
                    raise ConfigurationError(
                        f"{option} names dataset {name!r}, which is not among {sorted(names)}"
                    )

    def reshuffles(self, name: str) -> bool:
        """Whether passes and epochs of a dataset get orders of their own."""
        return per_dataset(self.reshuffle_on_repeat, name, True)

    @classmethod
    def from_dict(cls, seed: int, options: Mapping[str, Any]) -> PlanOptions:
        """Options from what :meth:`as_dict` gave.

        Raises:
            ConfigurationError: an option that cannot work.
            KeyError: an option is missing.
        """
        return cls(
            seed=seed,
            chunk_size=options["chunk_size"],
            levels=ShuffleLevels(*(options[name] for name in LEVELS)),
            rules=StopRules(*(options[name] for name in RULES)),
            reshuffle_on_repeat=options["reshuffle_on_repeat"],
            interleave=options["interleave"],
        )

    def as_dict(self) -> dict[str, Any]:
        """All but the seed, as plain JSON values under the names of the user's arguments."""
        return {
            "chunk_size": self.chunk_size,
            "shuffle_shards": self.levels.shards,
            "shuffle_within_shard": self.levels.within_shard,
            "shuffle_block_size": self.levels.block_size,
            "stop_after_passes": self.rules.stop_after_passes,
            "exhausted_policy": _plain(self.rules.exhausted_policy),
            "max_repeats": _plain(self.rules.max_repeats),
            "max_samples": self.rules.max_samples,
            "reshuffle_on_repeat": _plain(self.reshuffle_on_repeat),
            "interleave": self.interleave,
        }


def _flags(options: PlanOptions) -> list[tuple[str, object]]:
    flags: list[tuple[str, object]] = [
        ("shuffle_shards", options.levels.shards),
        ("shuffle_within_shard", options.levels.within_shard),
    ]
    value = options.reshuffle_on_repeat
    if isinstance(value, Mapping):
        return flags + [(f"reshuffle_on_repeat[{name!r}]", v) for name, v in value.items()]
    return [*flags, ("reshuffle_on_repeat", value)]


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value
