"""A loader for trainers that resume by skipping.

Some trainers know how many batches of an epoch they have trained on, and ask for the rest:
``accelerate.skip_first_batches(loader, n)``, which transformers' Trainer calls when it resumes,
builds a plain torch loader from ``loader.dataset``, ``loader.collate_fn`` and a batch sampler that
passes by the first n items of ``loader.batch_sampler``. Here those items are the numbers of the
steps, and the dataset answers a step with the next batch of the real loader, which goes directly to
the first step that it is asked for. So whatever was built that way delivers the loader's own
batches, and the loader counts them.
Contract: ``skip_first_batches`` and ``SkipBatchSampler`` of accelerate (1.x).
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.utils.data

from zephon_torch.engines.messages import PrivateGenerator
from zephon_torch.errors import StateError
from zephon_torch.loader.loader import DataLoader
from zephon_torch.loader.settings import is_setting


class Skippable(torch.utils.data.DataLoader[Any]):
    """A loader whose first batches a trainer may skip.

    A trainer that skips the first n batches of an epoch gets the others at once, without anything
    being read, and the loader counts from there. Where a state was restored too, both must mean the
    same sample. Iterated without skipping it is the loader, and warns if that goes on within a
    restored epoch.

    Args:
        loader: the loader. Its own attributes (`epoch`, `valid`, `stats` ...) tell of the batches.

    Raises:
        StateError: at the first batch after skipping, if a state was restored and says that
            another number of samples was delivered, or another epoch.

    Example::

        class MixtureTrainer(transformers.Trainer):
            def get_train_dataloader(self):
                return self.accelerator.prepare(Skippable(loader))
    """

    use_stateful_dataloader = True  # Accelerate saves the state of such a loader
    _is_made = False

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader
        super().__init__(
            _Batches(loader),
            batch_sampler=_Steps(loader),
            collate_fn=_as_it_is,
            generator=PrivateGenerator(),  # iter() draws from the global one otherwise
        )
        self._is_made = True

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_made and is_setting(name):
            setattr(self.loader, name, value)
        else:
            super().__setattr__(name, value)

    def __iter__(self) -> Any:
        return _unskipped(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Accelerate takes a loader as it is where this is True, and then sets it."""
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        self.loader._is_accelerate_prepared = value

    @property
    def total_batch_size(self) -> int:
        """As the loader's."""
        return self.loader.total_batch_size

    @property
    def total_dataset_length(self) -> int:
        """As the loader's."""
        return self.loader.total_dataset_length

    def set_epoch(self, epoch: int) -> None:
        """As the loader's."""
        self.loader.set_epoch(epoch)

    def state_dict(self, behind: int | None = None) -> dict[str, Any]:
        """As the loader's."""
        return self.loader.state_dict(behind)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As the loader's."""
        self.loader.load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"Skippable({self.loader!r})"


class _Steps(torch.utils.data.Sampler[Any]):
    """The steps of an epoch, as a batch sampler. Where they end the loader knows."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        rest = _Rest(self._loader)
        return (_Step(rest, number) for number in itertools.count())

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose first batches are skipped: only who skips comes here."""
        if self._loader._cursor.loads and epoch != self._loader.epoch:
            raise _disagreement(self._loader, f"begins in epoch {epoch}")
        self._loader.set_epoch(epoch)


class _Batches(torch.utils.data.Dataset[Any]):
    """The loader's batches by step: the first that is asked for, and those that follow it."""

    def __init__(self, loader: DataLoader) -> None:
        self.__dict__["_loader"] = loader  # anything else belongs to the dataset behind

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._loader.dataset, name, value)

    def __len__(self) -> int:
        return len(self._loader.dataset)

    def __getitems__(self, step: _Step) -> Any:
        return step.rest.batch(step.number)


class _Rest:
    """One iteration of the loader, begun by the first step that it is asked for."""

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self._iteration: Iterator[Any] = iter(())
        self._has_begun = False

    def batch(self, step: int) -> Any:
        if not self._has_begun:
            self._begin(step)
            self._has_begun = True  # only now: an empty loop would follow what it raises
        return next(self._iteration)  # its StopIteration ends the loop of whoever asks

    def _begin(self, step: int) -> None:
        loader, splitter = self._loader, self._loader._splitter
        delivered = step * splitter.global_batch_size
        if step >= splitter.num_steps and not loader._cursor.loads:
            loader._cursor.end_epoch(splitter.epoch)
            return
        if step and not loader._cursor.loads:
            place = {"epoch": splitter.epoch, "delivered": delivered}
            loader.load_state_dict(loader.state_dict() | place)
        elif step and delivered != loader.delivered:
            raise _disagreement(
                loader, f"skips {step} batches of {splitter.global_batch_size} samples"
            )
        self._iteration = iter(loader) if step else _unskipped(loader)


def _unskipped(loader: DataLoader) -> Any:
    """An iteration of which nothing was skipped."""
    iteration = iter(loader)
    if loader._cursor.loads and loader._cursor.delivered_next:
        warnings.warn(
            f"goes on after {loader.delivered} samples of epoch {loader.epoch}, as restored, but "
            "nobody skipped them: a trainer that counts the batches of the epoch from here makes "
            "fewer optimizer steps. With transformers' Trainer leave ignore_data_skip=False; where "
            "no trainer skips, use the loader itself",
            stacklevel=3,
        )
    return iteration


class _Step(NamedTuple):
    """An item of the batch sampler: a step, and the iteration that it belongs to."""

    rest: _Rest
    number: int


def _as_it_is(batch: Any) -> Any:
    return batch


def _disagreement(loader: DataLoader, trainer: str) -> StateError:
    return StateError(
        f"the restored state stands after {loader.delivered} samples of epoch {loader.epoch}, the "
        f"trainer {trainer}. Was the number of samples of an optimizer step (batch size x ranks x "
        "gradient accumulation) changed? Keep it, or let the restored state decide: transformers' "
        "ignore_data_skip=True, or no skip_first_batches at all"
    )
