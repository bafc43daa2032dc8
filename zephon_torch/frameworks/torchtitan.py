"""A data loader for TorchTitan's trainer: resumed exactly, also on another data-parallel degree.

TorchTitan builds its loader from a config, iterates over it once, and saves its state with DCP
under "dataloader". Ours says the same on every rank, so any data-parallel degree can load it.
Contract: ``BaseDataLoader`` and ``Configurable`` of torchtitan 0.3; the same classes with
``close()`` in ``torchtitan.components.data.loader`` of later versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from torchtitan.components.loss import IGNORE_INDEX

from zephon_torch.errors import DatasetError
from zephon_torch.loader import DataLoader
from zephon_torch.nodes.tolerate import OnError

try:
    from torchtitan.components.dataloader import BaseDataLoader
except ModuleNotFoundError:  # later versions
    from torchtitan.components.data.loader import BaseDataLoader


class TitanDataLoader(BaseDataLoader):
    """Batches of token rows for a TorchTitan trainer.

    Put its ``Config`` where the trainer's config has ``dataloader=`` (or the validator's). The
    trainer builds the loader from it.

    Each sample, after `transform`, is a row of ``seq_len + 1`` token ids: a list, array or tensor
    of integers. A batch is ``({"input": int64[b, s], "positions": int64[b, s]}, labels)`` with
    labels int64[b, s], where b is ``local_batch_size`` and s is ``seq_len``. Labels are the row
    shifted by one; positions count from 0 in each row.

    Every batch has b rows. Where an epoch does not fill the last one, rows are repeated with all
    labels ``IGNORE_INDEX``, which the loss leaves out: each epoch has each of its samples once, on
    any data-parallel degree.

    Args:
        config: a :class:`Config`.
        dp_world_size: data-parallel degree.
        dp_rank: data-parallel rank.
        tokenizer: the trainer's tokenizer.
        seq_len: tokens of a row that go into the model.
        local_batch_size: rows per rank and batch.

    Raises:
        DatasetError: while iterating, a sample that is not such a row; a note names dataset, shard
            and sample.

    Example:
        With a folder of JSON lines ``{"tokens": [...]}``, each of ``seq_len + 1`` integers::

            source = StaticMixtureWorkSource(
                [Dataset.from_path("web", "data/web")], {"web": 1}, shuffle_block_size="auto"
            )
            config.dataloader = TitanDataLoader.Config(
                dataset=source, transform=operator.itemgetter("tokens")
            )
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """What to load. All but the first two and the last are as in :class:`~zephon_torch.DataLoader`.

        Attributes:
            dataset: first argument of :class:`~zephon_torch.DataLoader`, most often a work source.
            transform: function of a sample that gives a row; None: samples are rows.
            takes_tokenizer: the transform also takes the trainer's tokenizer, ``tokenizer=``.
            infinite: False ends the iteration with the epoch, as for validation; True goes on with
                the next one.
        """

        dataset: Annotated[Any, tyro.conf.Suppress]
        transform: Annotated[Callable[..., Any] | None, tyro.conf.Suppress] = None
        takes_rng: bool = False
        takes_tokenizer: bool = False
        on_error: OnError = "raise"
        lanes: int | None = None
        num_workers: int = 0
        num_threads: int | None = None
        prefetch_factor: int | None = None
        persistent_workers: bool = False
        pin_memory: bool = False
        infinite: bool = True

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: Any,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        function = config.transform
        if config.takes_tokenizer and function is not None:
            function = partial(function, tokenizer=tokenizer)
        self._infinite, self._local_batch_size = config.infinite, local_batch_size
        self.loader = DataLoader(
            config.dataset,
            local_batch_size,
            transform=_Row(function, seq_len + 1),
            takes_rng=config.takes_rng,
            on_error=config.on_error,
            lanes=config.lanes,
            num_workers=config.num_workers,
            num_threads=config.num_threads,
            prefetch_factor=config.prefetch_factor,
            persistent_workers=config.persistent_workers,
            pin_memory=config.pin_memory,
            rank=dp_rank,
            num_replicas=dp_world_size,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Batches from where the run stands: of this epoch, or of this and all that follow."""
        while True:
            for rows in self.loader:
                assert self.loader.valid is not None
                yield _aligned(rows, self.loader.valid, self._local_batch_size)
            if not self._infinite:
                return

    def state_dict(self) -> dict[str, Any]:
        """Where the run stands: :meth:`zephon_torch.DataLoader.state_dict`."""
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a state at the next ``iter()``, with any data-parallel degree."""
        self.loader.load_state_dict(state_dict)

    def close(self) -> None:
        """End threads and processes."""
        self.loader.close()


@dataclass(frozen=True, slots=True)
class _Row:
    """The user's transform, whose result has to be a row of `size` token ids."""

    function: Callable[..., Any] | None
    size: int

    def __call__(self, sample: Any, *rng: np.random.Generator) -> torch.Tensor:
        row = sample if self.function is None else self.function(sample, *rng)
        return _checked(row, self.size)


def _checked(row: Any, size: int) -> torch.Tensor:
    """A row as an int64[size] tensor."""
    try:
        tensor = torch.as_tensor(row)
    except (TypeError, ValueError, RuntimeError):
        found = type(row).__name__
    else:
        is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
        if tensor.shape == (size,) and is_whole:
            return tensor.long()
        found = f"shape {tuple(tensor.shape)} of {tensor.dtype}"
    raise DatasetError(
        f"expected a row of seq_len + 1 = {size} token ids, integers of shape ({size},), got {found}: "
        "give a transform= that cuts samples into such rows"
    )


def _aligned(
    rows: torch.Tensor, valid: torch.Tensor, batch_size: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Rows int64[n, s + 1], n <= batch_size, as inputs, positions and labels of int64[b, s]."""
    missing = batch_size - len(rows)
    if missing:
        rows = torch.cat([rows, rows[-1:].expand(missing, -1)])
        valid = torch.cat([valid, valid.new_zeros(missing)])
    inputs, labels = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    labels[~valid] = IGNORE_INDEX
    positions = torch.arange(inputs.shape[1]).repeat(batch_size, 1)
    return {"input": inputs, "positions": positions}, labels
