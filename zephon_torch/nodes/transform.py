"""Runs the user's function on each sample, with randomness that belongs to the sample.

The generator a function is given is keyed by (seed, dataset, epoch, pass, shard, sample): it is the
same on any worker, rank and engine and after any resume, and new in every pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from zephon_torch.arithmetic.permutation import U, UInt64Array, subkeys, text_key
from zephon_torch.errors import WorkerError
from zephon_torch.work.plan import Pointers


@dataclass(frozen=True, slots=True)
class Transform:
    """A user function over samples.

    Attributes:
        function: ``function(sample)``, or with `takes_rng` ``function(sample, rng)`` where rng is a
            numpy ``Generator`` over Philox.
        takes_rng: whether the function wants a generator.
        seed: the run's seed.
        names: names of the datasets that ``Pointers.dataset`` counts in.
    """

    function: Callable[..., Any]
    takes_rng: bool
    seed: int
    names: tuple[str, ...]

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
        for i, sample in enumerate(samples):
            try:
                if keys is None:
                    done.append(self.function(sample))
                else:
                    rng = np.random.Generator(np.random.Philox(key=keys[i]))
                    done.append(self.function(sample, rng))
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

    def _keys(self, pointers: Pointers, epoch: int) -> UInt64Array:
        keys = [text_key("zephon_torch/transform/1", str(self.seed), name) for name in self.names]
        of_dataset = subkeys(np.array(keys, U), np.array([epoch]))[pointers.dataset]
        return subkeys(
            subkeys(subkeys(of_dataset, pointers.pass_index), pointers.shard), pointers.sample
        )
