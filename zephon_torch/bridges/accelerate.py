"""The bridge to Accelerate: attributes it reads before it prepares a loader, and after.

``Accelerator.prepare`` takes our loader as it is and marks it. Accelerate's own loaders then do two
things, and so does ours: they put batches on the accelerator's device, and they tell its
``GradientState`` when the last batch of the epoch is out and how many samples of it are real.
Gradient accumulation steps the optimizer at that moment, and ``gather_for_metrics`` cuts off the
padding.
Contract: ``DataLoaderStateMixin`` and ``GradientState`` of accelerate (1.x).
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any

from zephon_torch.work.sharing.splitter import ChunkSplitter

if TYPE_CHECKING:
    from zephon_torch.loader.cursor import Cursor
    from zephon_torch.loader.loader import DataLoader


class Preparable:
    """Attributes that Accelerate reads off a loader, and the one that it sets."""

    # it saves the state of a loader where it finds the first, and reads the others while it
    # accumulates gradients
    use_stateful_dataloader = True
    end_of_dataloader = False
    remainder = -1
    _cursor: Cursor
    _splitter: ChunkSplitter

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Accelerate takes a loader as it is where this is True, and then sets it."""
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        self._cursor.is_prepared = value

    @property
    def total_batch_size(self) -> int:
        """Samples of a step over all processes."""
        return self._splitter.global_batch_size

    @property
    def total_dataset_length(self) -> int:
        """Samples of an epoch, over all processes and without padding.

        Raises:
            TypeError: the epoch never ends.
        """
        return len(self._splitter.dataset)  # type: ignore[arg-type]


class Prepared:
    """Tells Accelerate how the iteration of a loader goes. Made only for prepared loaders."""

    def __init__(self, loader: DataLoader) -> None:
        from accelerate.state import GradientState

        self._loader = loader
        self._gradient_state, self._device = GradientState(), _device()

    def begin(self) -> None:
        """An iteration begins: it is the active one from now on."""
        loader, total = self._loader, self._loader.source.total_samples
        cut = not loader.drop_last and not isinstance(total, float)
        loader.end_of_dataloader = False
        loader.remainder = int(total) % loader._splitter.global_batch_size if cut else 0
        self.end()
        self._gradient_state._add_dataloader(loader)

    def hand_over(self, batch: Any, *, is_last: bool) -> Any:
        """The batch on the accelerator's device."""
        self._loader.end_of_dataloader = is_last
        return _placed(batch, self._device)

    def end(self) -> None:
        """The iteration is over."""
        self._gradient_state._remove_dataloader(self._loader)


def on_device(batch: Any) -> Any:
    """A batch of a prepared loader on the accelerator's device."""
    return _placed(batch, _device())


def _placed(batch: Any, device: Any) -> Any:
    from accelerate.utils import send_to_device

    return send_to_device(batch, device)


def _device() -> Any:
    from accelerate.state import PartialState

    return PartialState().device


def prepared(loader: DataLoader) -> Prepared | None:
    """The bridge to Accelerate; None where it did not prepare the loader.

    Warns where padding would then go unnoticed.
    """
    if loader._cursor.is_prepared:
        return Prepared(loader)
    if _is_padded(loader) and _is_accelerate_in_use():
        warnings.warn(
            "this loader is used under Accelerate but was not prepared, so that gather_for_metrics "
            "does not leave out the samples that pad the last batch: use accelerator.prepare("
            "loader); in a transformers Trainer, return self.accelerator.prepare(loader) from "
            "get_eval_dataloader and get_train_dataloader",
            stacklevel=5,
        )
    return None


def _is_padded(loader: DataLoader) -> bool:
    """Whether the last batch of an epoch has samples that are not real."""
    rest = loader.source.total_samples % loader._splitter.global_batch_size
    return not loader.drop_last and rest % loader._splitter.num_replicas > 0


def _is_accelerate_in_use() -> bool:
    """Whether there is an Accelerator in this process. Imports nothing."""
    module = sys.modules.get("accelerate.state")
    return module is not None and bool(module.GradientState._shared_state)
