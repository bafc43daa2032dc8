"""Runs the user's functions on each sample, with randomness that belongs to the sample.

The generator a function is given is keyed by (seed, dataset, epoch, pass, shard, sample): it is the
same on any worker, rank and engine and after any resume, and new in every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np

from zephon_torch.arithmetic.permutation import U, UInt64Array, subkeys, text_key
from zephon_torch.errors import ConfigurationError, WorkerError
from zephon_torch.work.plan.plan import Pointers

Function: TypeAlias = Callable[..., Any]
Functions: TypeAlias = Function | Mapping[str, Function | None]


@dataclass(frozen=True, slots=True)
class Transform:
    """A user function over samples.

    Attributes:
        function: ``function(sample)``, or with `takes_rng` ``function(sample, rng)`` where rng is a
            numpy ``Generator`` over Philox; or such a function for each dataset by name, None where
            samples stay as they are.
        takes_rng: whether functions want a generator.
        seed: the run's seed.
        names: names of the datasets that ``Pointers.dataset`` counts in.

    Raises:
        ConfigurationError: functions by name that are not those of the datasets.
    """

    function: Functions
    takes_rng: bool
    seed: int
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if isinstance(self.function, Mapping) and set(self.function) != set(self.names):
            raise ConfigurationError(
                f"transform has functions for {sorted(map(str, self.function))}, the datasets are "
                f"{sorted(self.names)}: give one for each, None to leave its samples as they are"
            )

    def __call__(
        self,
        samples: Iterable[Any],
        pointers: Pointers,
        epoch: int,
        in_words: Callable[[int, int, int], str],
    ) -> list[Any]:
        """Transformed samples.

        Raises:
            WorkerError: the function raised StopIteration. Anything else it raises comes as it is,
                with a note that names the sample.
        """
        keys = self._keys(pointers, epoch).tolist() if self.takes_rng else None
        done = []
        functions = self._functions(pointers)
        for i, (sample, function) in enumerate(zip(samples, functions, strict=False)):
            try:
                if function is None:
                    done.append(sample)
                elif keys is None:
                    done.append(function(sample))
                else:
                    rng = np.random.Generator(np.random.Philox(key=keys[i]))
                    done.append(function(sample, rng))
            except Exception as error:
                where = (int(a[i]) for a in (pointers.dataset, pointers.shard, pointers.sample))
                name = in_words(*where)
                if isinstance(error, StopIteration):
                    raise WorkerError(
                        f"transform raised StopIteration on {name}: a plain next() in it ran dry; "
                        "give next() a default"
                    ) from error
                error.add_note(f"in transform, on {name}")
                raise
        return done

    def _functions(self, pointers: Pointers) -> Iterable[Function | None]:
        """The function of each sample."""
        if not isinstance(self.function, Mapping):
            return repeat(self.function)
        of_datasets = [self.function[name] for name in self.names]
        return [of_datasets[number] for number in pointers.dataset.tolist()]

    def _keys(self, pointers: Pointers, epoch: int) -> UInt64Array:
        keys = [text_key("zephon_torch/transform/1", str(self.seed), name) for name in self.names]
        of_dataset = subkeys(np.array(keys, U), np.array([epoch]))[pointers.dataset]
        return subkeys(
            subkeys(subkeys(of_dataset, pointers.pass_index), pointers.shard), pointers.sample
        )
