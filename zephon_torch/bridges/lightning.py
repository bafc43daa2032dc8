"""States that Lightning's Trainer has read from a checkpoint and does not load.

Its fit loop loads the states of its loaders when it is set up. A scheduler that asks for
``trainer.estimated_stepping_batches``, as OneCycleLR needs it, sets the loop up while optimizers
are configured, before the checkpoint's loops are read; the states then wait in the loop for ever.
They are loaded here, at the first batch, which the loop itself asks for.
Contract: ``_FitLoop._load_combined_loader_states`` of lightning 2.5 and 2.6. Public report:
Lightning-AI/pytorch-lightning#20550.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

_LOOPS = ("lightning.pytorch.loops.fit_loop", "pytorch_lightning.loops.fit_loop")


def load_forgotten_state(loader: object) -> None:
    """Let the fit loop that is asking for a batch of `loader` load what waits in it."""
    if not any(name in sys.modules for name in _LOOPS):
        return
    loop = _calling_loop()
    if not getattr(loop, "_combined_loader_states_to_load", None):
        return
    if any(one is loader for one in loop._combined_loader.flattened):
        loop._load_combined_loader_states()


def _calling_loop() -> Any:
    """The fit loop on the stack; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in _LOOPS:
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None
