"""A data loader for TorchTitan's trainer: resumed exactly, also on another data-parallel degree.

TorchTitan builds its loader from a config, iterates over it once, and saves its state with DCP
under "dataloader". Ours says the same on every rank, so any data-parallel degree can load it.
Contract: ``BaseDataLoader`` and ``Configurable`` of torchtitan 0.3, in
``torchtitan/components/dataloader.py``; and as its main branch had them in summer 2026, with
``close()``, in ``torchtitan/components/data/loader.py``. Versions that measure batches in tokens
(``max_context_length=``) have another contract.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from torchtitan.components.loss import IGNORE_INDEX

from zephon_torch.errors import ConfigurationError, RecordError
from zephon_torch.loader.arguments import check_functions
from zephon_torch.loader.loader import DataLoader
from zephon_torch.nodes.tolerate import OnError

try:
    from torchtitan.components.dataloader import BaseDataLoader
except ModuleNotFoundError:  # later versions
    from torchtitan.components.data.loader import BaseDataLoader


class TitanDataLoader(BaseDataLoader):  # type: ignore[misc]
    """Batches of token rows for a TorchTitan trainer.

    Put its ``Config`` where the trainer's config, or the validator's, has ``dataloader=``; they
    build the loader from it.

    Each sample, after `transform`, is a row of ``seq_len + 1`` token ids: a list, array or tensor
    of integers. A batch is ``({"input": ids, "positions": places}, labels)``, three int64 tensors
    of shape [local_batch_size, seq_len]. Labels are the row shifted by one; positions count from 0
    in each row.

    Where an epoch does not fill its last batch, rows are repeated with all labels
    ``IGNORE_INDEX``, which the loss leaves out. So batches have one shape, and an epoch has each of
    its samples once, on any data-parallel degree.

    Args:
        config: a :class:`Config`.
        dp_world_size: data-parallel degree.
        dp_rank: data-parallel rank.
        tokenizer: the trainer's tokenizer.
        seq_len: tokens of a row that go into the model.
        local_batch_size: rows per rank and batch.

    Attributes:
        loader: the :class:`zephon_torch.DataLoader` behind it.

    Raises:
        ConfigurationError: options that cannot work.
        RecordError: while iterating, a sample that is not such a row; a note names dataset, shard
            and sample.

    Examples:
        With files of JSON lines ``{"tokens": [...]}``, each of ``seq_len + 1`` integers::

            source = StaticMixtureWorkSource(
                [Dataset.from_path("web", "data/web"), Dataset.from_path("code", "data/code")],
                {"web": 0.7, "code": 0.3},
                shuffle_block_size="auto",
            )
            config.dataloader = TitanDataLoader.Config(
                dataset=source, transform=operator.itemgetter("tokens")
            )
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """Options of the loader. The others are those of :class:`zephon_torch.DataLoader`.

        Attributes:
            dataset: first argument of :class:`zephon_torch.DataLoader`, most often a work source.
            transform: function of a sample that gives a row; None: samples are rows.
            takes_tokenizer: the transform also takes the trainer's tokenizer, as ``tokenizer=``.
            infinite: False ends the iteration with the epoch, as a validator wants it; True goes on
                with the next one.
        """

        dataset: Annotated[Any, tyro.conf.Suppress]
        transform: Annotated[Callable[..., Any] | None, tyro.conf.Suppress] = None
        takes_rng: Annotated[bool, tyro.conf.Suppress] = False
        takes_tokenizer: Annotated[bool, tyro.conf.Suppress] = False
        infinite: bool = True
        lanes: int | None = None
        on_error: OnError = "raise"
        num_workers: int = 0
        num_threads: int | None = None
        prefetch_factor: int | None = None
        persistent_workers: bool = False
        pin_memory: bool = False

        def to_dict(self) -> dict[str, Any]:
            """The options for a log: numbers and strings as they are, anything else as text."""
            values = ((field.name, getattr(self, field.name)) for field in fields(self))
            plain = (str, int, type(None))
            return {
                name: value if isinstance(value, plain) else repr(value) for name, value in values
            }

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int,
        local_batch_size: int,
        **_: Any,  # such as snapshot_every_n_steps: our state is exact at any step
    ) -> None:
        function = config.transform
        check_functions(transform=function, takes_rng=config.takes_rng, collate_fn=None)
        if config.takes_tokenizer:
            if function is None:
                raise ConfigurationError("takes_tokenizer=True needs a transform")
            function = partial(function, tokenizer=tokenizer)
        self._is_infinite, self._local_batch_size = config.infinite, local_batch_size
        self.loader = DataLoader(
            config.dataset,
            local_batch_size,
            num_workers=config.num_workers,
            pin_memory=config.pin_memory,
            prefetch_factor=config.prefetch_factor,
            persistent_workers=config.persistent_workers,
            lanes=config.lanes,
            transform=_Row(function, seq_len + 1),
            takes_rng=config.takes_rng,
            on_error=config.on_error,
            num_threads=config.num_threads,
            rank=dp_rank,
            num_replicas=dp_world_size,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Batches from where the run stands: of this epoch, or of this and all that follow."""
        return _Batches(self.loader, self._local_batch_size, self._is_infinite)

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands, the same on every rank: see :class:`zephon_torch.DataLoader`."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state at the next ``iter()``, on any data-parallel degree.

        Raises:
            StateError: not a state of ours; a state of another plan raises
                :class:`~zephon_torch.PlanMismatch` at the next ``iter()``.
        """
        self.loader.load_state_dict(state_dict)

    def close(self) -> None:
        """End threads and processes."""
        self.loader.close()


class _Batches(Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]):
    """Batches of one epoch or of all that follow; goes on after an error."""

    def __init__(self, loader: DataLoader, size: int, is_infinite: bool) -> None:
        self._loader, self._size, self._is_infinite = loader, size, is_infinite
        self._epoch = iter(loader)

    def __next__(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        try:
            rows = next(self._epoch)
        except StopIteration:
            if not self._is_infinite:
                raise
            self._epoch = iter(self._loader)
            rows = next(self._epoch)
        assert self._loader.valid is not None
        return _batch(rows, self._loader.valid, self._size)


@dataclass(frozen=True, slots=True)
class _Row:
    """The user's transform, checked: its result has to be a row of `size` token ids."""

    function: Callable[..., Any] | None
    size: int

    def __call__(self, sample: Any, *rng: np.random.Generator) -> torch.Tensor:
        """The row as an int32[size] tensor: half as much to hand over from a worker."""
        row = np.asarray(sample if self.function is None else self.function(sample, *rng))
        if row.shape != (self.size,) or row.dtype.kind not in "iu":
            raise RecordError(
                f"expected a row of seq_len + 1 = {self.size} integer token ids, got shape "
                f"{row.shape} of {row.dtype}: give a transform that makes such rows of the samples"
            )
        return torch.from_numpy(row.astype(np.int32))


def _batch(
    rows: torch.Tensor, valid: torch.Tensor, size: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """`size` rows of inputs, positions and labels, from int32[n, seq_len + 1] with n <= size."""
    missing = size - len(rows)
    if missing:
        rows = torch.cat([rows, rows[-1:].expand(missing, -1)])
        valid = torch.cat([valid, valid.new_zeros(missing)])
    inputs, labels = rows[:, :-1].long(), rows[:, 1:].long()
    labels[~valid] = IGNORE_INDEX
    positions = torch.arange(inputs.shape[1]).repeat(size, 1)
    return {"input": inputs, "positions": positions}, labels
