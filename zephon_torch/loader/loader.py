"""DataLoader: torch's, over a plan. Composes the parts and hands batches to the training loop."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Self

import torch

from zephon_torch.loader.arguments import (
    OF_A_SOURCE,
    check_engine,
    check_functions,
    check_on_error,
    per_rank_batch_size,
    refuse_torch_arguments,
)
from zephon_torch.loader.cache_options import make_copies
from zephon_torch.loader.cursor import Cursor
from zephon_torch.loader.first_argument import as_source
from zephon_torch.loader.iteration import Iteration
from zephon_torch.loader.stats import InHand, LoaderStats
from zephon_torch.loader.torch_face import TorchFace
from zephon_torch.loader.uncounted import Uncounted, UncountedIteration, batch_of
from zephon_torch.nodes.map_style_view import PointedSamples
from zephon_torch.nodes.pipeline import make_pipeline
from zephon_torch.nodes.tolerate import OnError
from zephon_torch.nodes.transform import Functions
from zephon_torch.support import checks
from zephon_torch.support.keywords import explains_keywords
from zephon_torch.work.identity.progress import Progress
from zephon_torch.work.order.mixture import MixtureSpec
from zephon_torch.work.plan.plan import Pointers
from zephon_torch.work.sharing.splitter import ChunkSplitter
from zephon_torch.work.sharing.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class DataLoader(TorchFace):
    """Batches of a plan, in an order that no number of ranks, workers or restarts changes.

    Takes torch's arguments in torch's order, and some of its own.

    Args:
        dataset: a :class:`WorkSource`; a :class:`zephon_torch.io.Dataset`; a map-style torch
            dataset; or, with `mixture`, a mapping of name to any of the last two, or a list of
            :class:`zephon_torch.io.Dataset`.
        batch_size: samples per rank and step.
        shuffle: None: the source's own order (a dataset's: as stored); True: a global shuffle;
            False: as stored. A work source has its own, so giving it there raises.
        sampler: not taken, raises: the plan is the sampler.
        batch_sampler: not taken, raises.
        num_workers: worker processes. With 0, one background thread reads and decodes while
            transform and collate run in the caller's thread (datasets in memory and torch datasets:
            everything inline).
        collate_fn: list of samples -> batch. None: torch's ``default_collate``.
        pin_memory: as torch's.
        drop_last: drop the last *global* batch of an epoch if it is incomplete. False: with one
            rank the last batch is short; with several, every rank gets the same number of samples,
            missing ones repeat a real sample, and :attr:`valid` marks the real ones.
        timeout: as torch's, in seconds.
        worker_init_fn: as torch's.
        multiprocessing_context: as torch's.
        generator: not taken, raises: `seed` decides the order.
        prefetch_factor: batches in flight ahead of the loop, per worker where there are any. None:
            as many as pay: two groups of batches that are read at once, with several threads
            some more than these.
        persistent_workers: as torch's.
        pin_memory_device: not taken, raises.
        in_order: only True.
        mixture: weights by name, for several datasets.
        seed: seed of the order, for datasets (a work source has its own).
        lanes: sub-streams of the delivery order; None: 1, or those of a loaded state.
        global_batch_size: samples of a step over all ranks, in place of batch_size.
        transform: function of a sample; or for each dataset by name its own, None for none.
        takes_rng: transforms also take a numpy Generator that belongs to the sample: the same
            on any worker, rank and engine, new in every pass.
        on_error: "raise"; "skip": the batch comes without records that cannot be decoded or
            transformed; "substitute": another sample of the same dataset stands in for them.
            ``stats`` counts and lists them. Errors of the storage are raised always.
        provenance: add to each batch, which must be a dict then, "provenance": an int64[b, 3]
            tensor of dataset (its number in :attr:`datasets`), shard and sample.
        num_threads: None: as said above; 0: inline; N: N threads that also transform and collate.
        cache_dir: folder on this machine where whole shards of remote datasets are kept, shared by
            all its processes; ahead of the loop, as the plan says which ones come.
        cache_limit: bytes that it may take at most, as a number or like "200GB" or "64GiB".
        rank: data-parallel rank; None reads torch.distributed at the first use.
        num_replicas: number of data-parallel ranks; None likewise.
        mesh: a one-dimensional DeviceMesh of the data-parallel ranks instead.

    Attributes:
        datasets: the datasets that ``pointers.dataset`` counts in.
        stats: what was handed over and how long the loop waited.

    Raises:
        ConfigurationError: arguments that cannot work; the message says what to do instead.

    Examples:
        >>> from zephon_torch import DataLoader
        >>> loader = DataLoader(list(range(10)), batch_size=4, shuffle=True, seed=7)
        >>> len(loader), sorted(int(x) for batch in loader for x in batch)
        (3, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """

    @explains_keywords("DataLoader", OF_A_SOURCE)
    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: str | BaseContext | None = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        mixture: MixtureSpec | Mapping[str, float] | None = None,
        seed: int | None = None,
        lanes: int | None = None,
        global_batch_size: int | None = None,
        transform: Functions | None = None,
        takes_rng: bool = False,
        on_error: OnError = "raise",
        provenance: bool = False,
        num_threads: int | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        cache_limit: int | str | None = None,
        rank: int | None = None,
        num_replicas: int | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        refuse_torch_arguments(sampler, batch_sampler, generator, in_order, pin_memory_device)
        check_engine(num_workers, num_threads, prefetch_factor, timeout)
        check_functions(transform=transform, takes_rng=takes_rng, collate_fn=collate_fn)
        check_on_error(on_error)
        source = as_source(dataset, mixture=mixture, seed=seed, shuffle=shuffle)
        splitter = ChunkSplitter(
            source,
            batch_size=per_rank_batch_size(batch_size, global_batch_size),
            global_batch_size=global_batch_size,
            lanes=1 if lanes is None else lanes,
            drop_last=drop_last,
            world=World(rank, num_replicas, mesh),
        )
        self.source, self.datasets = source, source.datasets
        copies = make_copies(
            cache_dir, cache_limit, source.datasets, num_readers=num_workers or num_threads or 1
        )
        self._pipeline = make_pipeline(
            source, transform, takes_rng, collate_fn, on_error, provenance, copies
        )
        super().__init__(
            PointedSamples(self._pipeline, source),
            splitter,
            batch_size=None if global_batch_size else batch_size,
            num_workers=num_workers,
            num_threads=num_threads,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
        )
        self.stats = LoaderStats() if copies is None else LoaderStats(cache=copies.stats)
        self._in_hand = InHand()
        self._told: set[str] = set()  # of which warnings are given once
        self._splitter = splitter
        self._cursor = Cursor(splitter, lanes)
        splitter.on_set_epoch = self._cursor.set_epoch
        splitter.on_iter = self._cursor.refuse_uncounted
        self._live: weakref.ref[Iteration] | None = None
        self._uncounted: weakref.WeakSet[UncountedIteration] | None = None  # made for the first
        self._finish_init()

    def _settle(self) -> None:
        """Checks that need the world, at each use of the loader."""
        self._splitter.check()
        self._cursor.check()
        if self.batch_size is None:
            object.__setattr__(self, "batch_size", self._splitter.batch_size)

    def __iter__(self) -> Any:
        """An iterator over the rest of a loaded epoch, or over the current one from its start."""
        self._settle()
        return Iteration(self)

    def __len__(self) -> int:
        """Batches of a whole epoch, resumed or not.

        Raises:
            TypeError: the epoch never ends.
        """
        self._settle()
        return len(self._splitter)

    def batch(self, step: int, epoch: int | None = None) -> Any:
        """Batch of one step of an epoch, computed directly in this process; moves nothing.

        Args:
            step: from 0; negative ones count from the end.
            epoch: None: the current one, which after the last batch of an epoch is the next.

        Raises:
            IndexError: the epoch has no such step.
        """
        return batch_of(self, step, epoch)

    def peek(self, num_batches: int) -> Uncounted:
        """The batches that come next, to iterate without moving anything; see :meth:`uncounted`.

        They are those of the running loop, or of the next one where none runs, up to its end.
        """
        return Uncounted(self, num_batches=num_batches)

    def uncounted(self, epoch: int | None = None) -> Uncounted:
        """All batches of an epoch (None: the current one), to iterate without moving anything.

        For what goes through the training data beside the training, such as ``update_bn``:
        progress, ``pointers``, ``valid`` and ``stats`` stay as they are, also in the middle of a
        loop. The batches come from threads or worker processes of their own.
        """
        return Uncounted(self, epoch=epoch)

    @property
    def remaining(self) -> int | float:
        """Batches that are still to come in the current epoch; ``math.inf`` if it never ends.

        Where none is left (a state from near the end, with a larger batch now), the next epoch's.
        """
        self._settle()
        total = self.source.total_samples
        return self._splitter.steps_between(self._cursor.delivered_next, total)

    # Properties, so that a copy of the attributes (Lightning's _FabricDataLoader is one) has none
    # rather than those of another batch.

    @property
    def pointers(self) -> Pointers | None:
        """Pointers of the batch in hand; None before the first."""
        return self._in_hand.pointers

    @property
    def valid(self) -> torch.Tensor | None:
        """bool[b], which samples of the batch in hand are real (not padding); None before it."""
        return self._in_hand.valid

    @property
    def epoch(self) -> int:
        """Current epoch; after the last batch of one, the next."""
        return self._cursor.place[0]

    @property
    def delivered(self) -> int:
        """Samples of the current epoch handed over so far, over all ranks."""
        return self._cursor.place[1]

    def set_epoch(self, epoch: int) -> None:
        """Begin `epoch` at the next ``iter()``; no effect if it is the current one.

        Not needed: epochs follow each other by themselves. After a load it does not move the
        epoch: its caller's count goes on from the checkpoint's.
        """
        self._splitter.set_epoch(epoch)

    @property
    def progress(self) -> Progress:
        """Where the run stands."""
        return self._cursor.progress()

    @property
    def behind(self) -> int:
        """Batches that a wrapper around the loader has fetched beyond the one in use: 0 or 1.

        With 1, every state says where the batch in use ends: :meth:`state_dict` and the model's
        after :func:`zephon_torch.bind`. Set it where a wrapper fetches one batch ahead.
        """
        return self._cursor.behind

    @behind.setter
    def behind(self, value: int) -> None:
        self._cursor.behind = checks.integer("behind", value, minimum=0, maximum=1)

    def state_dict(self, behind: int | None = None) -> dict[str, Any]:
        """Where the run stands, as a fresh dict of ints and strings, the same on every rank.

        Args:
            behind: 1: the last batch came out of the loader but is not in use yet; 0: it is; None:
                as :attr:`behind` says. At the end of an iteration, no batch is held back.
        """
        if behind is not None:
            checks.integer("behind", behind, minimum=0, maximum=1)
        return self._cursor.progress(behind).to_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> None:
        """Go on from a state at the next ``iter()``, with any world, workers and batch size.

        Args:
            state_dict: what :meth:`state_dict` gave.
            strict: False also takes the state of another plan, and goes on at the same epoch and
                number of samples of this one: samples may then repeat or be missed.

        Raises:
            StateError: not a state of a loader; the loader is left as it was. Whether it belongs to
                this plan is checked at the next use, which raises
                :class:`~zephon_torch.PlanMismatch` if not.
        """
        self._cursor.stage(Progress.from_dict(state_dict), strict=strict)

    def stage_words(self, words: Sequence[int]) -> None:
        """Stage the progress a model carried (see :func:`zephon_torch.bind`); never raises."""
        self._cursor.stage(words, route="model")

    def close(self) -> None:
        """End threads and processes. The loader can be used again, with a new iterator."""
        live = self._live() if self._live is not None else None
        for one in [*(self._uncounted or ()), *([] if live is None else [live])]:
            one.close()
        self._live = None
        self._engine.close()
        self._pipeline.fetcher.close()

    def __getstate__(self) -> dict[str, Any]:
        """A copy or pickle stands where this one does and shares nothing that moves."""
        return self.__dict__ | {"_live": None, "_uncounted": None}

    def __copy__(self) -> Self:
        return copy.deepcopy(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"DataLoader({self.source!r}, {self.num_workers} workers)"
