"""Under ignite's Engine: exact resume at any iteration; DeterministicEngine refuses the loader."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from launching import installed
from toys import ids

from zephon_torch import DataLoader, Skippable

pytestmark = [
    pytest.mark.skipif(not installed("ignite"), reason="pytorch-ignite is not installed"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # its own, as it is imported
]

EPOCHS, STEPS = 2, 6


class Stopped(Exception):
    pass


def make() -> DataLoader:
    return DataLoader(list(range(22)), 4, shuffle=True)


def run(stop: int | None = None, saved: dict[str, Any] | None = None) -> tuple[Any, Any]:
    """What was trained on, and what was saved after the iteration `stop`."""
    from ignite.engine import Engine, Events

    loader, seen, states = make(), [], {}
    engine = Engine(lambda engine, batch: seen.append(ids(batch)))

    @engine.on(Events.ITERATION_COMPLETED)
    def save_and_stop(engine: Any) -> None:
        if engine.state.iteration == stop:
            states.update(engine=engine.state_dict(), loader=loader.state_dict())
            raise Stopped

    if saved is not None:
        engine.load_state_dict(saved["engine"])
        loader.load_state_dict(saved["loader"])
    logging.getLogger("ignite.engine.engine.Engine").setLevel(logging.CRITICAL)
    try:
        engine.run(loader, max_epochs=EPOCHS, epoch_length=len(loader))
    except Stopped:
        pass
    return seen, states


def test_an_engine_goes_on_at_the_very_next_sample_from_any_iteration() -> None:
    whole, _ = run()
    assert len(whole) == EPOCHS * STEPS
    for stop in range(1, EPOCHS * STEPS):
        seen, saved = run(stop)
        rest, _ = run(saved=saved)
        assert seen + rest == whole, stop


@pytest.mark.parametrize("wrap", [lambda loader: loader, Skippable])
def test_a_deterministic_engine_refuses_it_and_trains_on_nothing(wrap: Any) -> None:
    """It puts a batch sampler of its own around lists of indices, and rebuilds the loader."""
    from ignite.engine import DeterministicEngine

    seen: list[Any] = []
    engine = DeterministicEngine(lambda engine, batch: seen.append(batch))
    logging.getLogger("ignite.engine.deterministic.DeterministicEngine").setLevel(logging.CRITICAL)
    with pytest.raises(TypeError, match="batch_sampler should be"):
        engine.run(wrap(make()), max_epochs=1)
    assert not seen
