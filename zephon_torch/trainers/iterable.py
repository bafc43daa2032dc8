"""A plan for code that wants an IterableDataset: plain torch DataLoader, StatefulDataLoader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch.utils.data

from zephon_torch.errors import StaleIteratorError, StateError
from zephon_torch.io.datasets.dataset import samples_of
from zephon_torch.nodes.fetch import Fetcher
from zephon_torch.nodes.transform import Functions, Transform
from zephon_torch.support import checks
from zephon_torch.work.identity.progress import MAX_EPOCH, Progress
from zephon_torch.work.sharing.world import World
from zephon_torch.work.sources.static_mixture import WorkSource

_WINDOW = 256  # samples read at once
_COUNTED = "taken"


class WorkSourceDataset(torch.utils.data.IterableDataset[Any]):
    """Samples of a plan, shared out among ranks and the worker processes of a torch DataLoader.

    Of W ranks with N workers each, every one of the W * N consumers takes every W * N-th position
    of the plan: disjoint, complete, and the same number of samples up to one. Every iteration is an
    epoch. Where a loader starts new workers for each epoch, they do not know of the epochs before:
    call :meth:`set_epoch` (or use persistent workers, or ``num_workers=0``). The state is a
    consumer's own, so it resumes on the same number of ranks and workers (StatefulDataLoader keeps
    it); :class:`zephon_torch.DataLoader` has neither limit.

    Args:
        source: the work source.
        transform: function of a sample; or for each dataset by name its own, None for none.
        takes_rng: transforms also take a numpy Generator that belongs to the sample.
        rank: data-parallel rank; None reads torch.distributed at the first use.
        num_replicas: number of data-parallel ranks; None likewise.

    Examples:
        >>> import torch
        >>> from zephon_torch import StaticMixtureWorkSource, WorkSourceDataset
        >>> from zephon_torch.io import Dataset
        >>> source = StaticMixtureWorkSource([Dataset.from_samples("a", range(4))], {"a": 1})
        >>> dataset = WorkSourceDataset(source)
        >>> [int(x) for x in torch.utils.data.DataLoader(dataset, batch_size=None)]
        [0, 1, 2, 3]
    """

    def __init__(
        self,
        source: WorkSource,
        *,
        transform: Functions | None = None,
        takes_rng: bool = False,
        rank: int | None = None,
        num_replicas: int | None = None,
    ) -> None:
        super().__init__()
        self.source = source
        self._fetcher = Fetcher(source.datasets)
        self._transform = (
            None
            if transform is None
            else Transform(transform, takes_rng, source.seed, source.names)
        )
        self._world = World(rank, num_replicas)
        self._world_of_parent: tuple[int, int] | None = None
        self._epoch = self._taken = self._iteration = 0
        self._resumes = False

    def __getstate__(self) -> dict[str, Any]:
        # spawned workers have no process group: they get the numbers
        return self.__dict__ | {"_world_of_parent": self._resolve()}

    def __iter__(self) -> Iterator[Any]:
        """This consumer's samples of an epoch, or the rest of it after a load."""
        consumer, num_consumers = self._consumer()
        if not self._resumes:
            self._taken = 0
        self._resumes = False
        self._iteration += 1
        iteration = self._iteration
        total, epoch = self.source.total_samples, self._epoch
        while consumer + self._taken * num_consumers < total:
            for sample in self._window(consumer, num_consumers, epoch):
                if iteration != self._iteration:
                    raise StaleIteratorError(
                        "this iterator cannot go on: a newer one of the same dataset has begun"
                    )
                self._taken += 1
                yield sample
        self._epoch, self._taken = epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` at the next iteration; no effect if it is the current one."""
        epoch = checks.integer("epoch", epoch, minimum=0, maximum=MAX_EPOCH)
        if epoch != self._epoch:
            self._epoch, self._taken, self._resumes = epoch, 0, False

    def state_dict(self) -> dict[str, Any]:
        """Where this consumer stands: a fresh dict of ints and strings.

        After the last sample it says the next epoch; but not in one of several workers, for the
        others may still be at this one. There a state from the very end of an epoch, before the
        loader has noticed the end, gives an empty loop first.
        """
        consumer, num_consumers = self._consumer()
        epoch, taken = self._epoch, self._taken
        worker = torch.utils.data.get_worker_info()
        is_alone = worker is None or worker.num_workers == 1
        left = self.source.total_samples - (consumer + taken * num_consumers)
        if taken and left <= 0 and is_alone:
            epoch, taken = epoch + 1, 0
        progress = Progress.at(self.source.identity, epoch=epoch, delivered=taken, lanes=1)
        return progress.to_dict(_COUNTED) | {"consumer": consumer, "num_consumers": num_consumers}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state at the next iteration.

        Raises:
            StateError: not a state of this consumer, or of another number of consumers;
                :class:`~zephon_torch.PlanMismatch`: it belongs to another plan.
        """
        progress = Progress.from_dict(state_dict, _COUNTED)
        progress.check(self.source.identity)
        then = state_dict.get("consumer"), state_dict.get("num_consumers")
        if then != self._consumer():
            raise StateError(
                f"the state is of consumer {then[0]} of {then[1]} (ranks x workers), this is "
                "consumer {} of {}: resume on as many, or use zephon_torch.DataLoader, whose state "
                "has no such limit".format(*self._consumer())
            )
        self._epoch, self._taken, self._resumes = progress.epoch, progress.delivered, True

    def _window(self, consumer: int, num_consumers: int, epoch: int) -> list[Any]:
        start = consumer + self._taken * num_consumers
        stop = int(min(start + _WINDOW * num_consumers, self.source.total_samples))
        pointers = self.source.pointers(np.arange(start, stop, num_consumers), epoch)
        samples = samples_of(self._fetcher.read(pointers))
        if self._transform is None:
            return list(samples)
        return self._transform(samples, pointers, epoch, self._fetcher.name)

    def _consumer(self) -> tuple[int, int]:
        rank, num_replicas = self._resolve()
        worker = torch.utils.data.get_worker_info()
        if worker is None:
            return rank, num_replicas
        return rank * worker.num_workers + worker.id, num_replicas * worker.num_workers

    def _resolve(self) -> tuple[int, int]:
        return self._world_of_parent or self._world.resolve()
