"""Samplers of others, which Lightning puts around a loader's dataset: refused with the way out."""

from __future__ import annotations

from torch.utils.data import Sampler, SequentialSampler

from zephon_torch.errors import ConfigurationError


def refuse_sampler(source: object) -> None:
    """Refuse a sampler in the place of a work source.

    Lightning makes another batch sampler of the class it finds, around a sampler of its choice:
    ``_dataloader_init_kwargs_resolve_sampler``.

    Raises:
        ConfigurationError: it is one; the message says what to do instead.
    """
    if isinstance(source, Sampler):
        raise ConfigurationError(
            f"a {type(source).__name__} was to be put into the loader, whose plan is its sampler. "
            + (_overfit(source) if isinstance(source, SequentialSampler) else _PREDICT)
        )


_PREDICT = "Lightning does so in predict(): let predict_dataloader() return iter(loader)"


def _overfit(sampler: SequentialSampler) -> str:
    way = (
        "Lightning does so for overfit_batches=: use limit_train_batches= and limit_val_batches=, "
        "which take the first batches of each epoch"
    )
    source = getattr(sampler.data_source, "_source", None)  # of a loader's dataset
    if source is None or not source.is_shuffled:
        return way
    return f"{way}; without shuffle they are the same ones in each"
