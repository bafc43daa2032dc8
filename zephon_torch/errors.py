"""Every exception that zephon_torch raises on purpose.

::

    ZephonError
    ├── ConfigurationError (ValueError)   an argument that cannot work; raised at construction
    │   ├── MixtureError                  a weight or a dataset name in a mixture
    │   └── WorldError                    rank, world size or global batch size that do not fit
    ├── DatasetError (ValueError)         a path, shard or index that cannot be used
    │   ├── RecordError                   one record that cannot be read or decoded
    │   └── StorageError                  a store that fails, refuses or answers something else
    ├── StateError (ValueError)           a state dict that is corrupt or not ours
    │   └── PlanMismatch                  a sound state, but of another plan
    ├── StaleIteratorError (RuntimeError) an iterator that a newer one or a load has replaced
    └── WorkerError (RuntimeError)        a worker process died, or user code broke its contract

    SameOrderWarning (UserWarning)        two loaders side by side, in one order by accident

Each message names the thing (dataset, shard, record, rank, both numbers) and says what to do.
"""

from __future__ import annotations


class ZephonError(Exception):
    """Base class of all exceptions of this package."""


class ConfigurationError(ZephonError, ValueError):
    """An argument, or a combination of arguments, that cannot work."""


class MixtureError(ConfigurationError):
    """A mixture with an invalid weight, or names that do not match the datasets."""


class WorldError(ConfigurationError):
    """A rank, world size or global batch size that do not fit together."""


class DatasetError(ZephonError, ValueError):
    """A dataset whose path, shards or index cannot be used."""


class RecordError(DatasetError):
    """One record that cannot be read or decoded; the message names dataset, file and line."""


class StorageError(DatasetError):
    """A store that cannot be read now; no property of the data, so it is never skipped.

    Raised after all tries. A run goes on at the same batch from a saved state, or in the same
    process after ``loader.load_state_dict(loader.state_dict())``, once the store is back.
    """


class StateError(ZephonError, ValueError):
    """A state dict that is corrupt or was not written by this package."""


class PlanMismatch(StateError):
    """A sound state that belongs to another plan; the message names the first difference."""


class StaleIteratorError(ZephonError, RuntimeError):
    """An iterator went on after a newer ``iter()`` or a loaded state had replaced it."""


class WorkerError(ZephonError, RuntimeError):
    """A worker process died, or a user function broke its contract (``StopIteration``)."""


class SameOrderWarning(UserWarning):
    """Two loaders over different data are iterated side by side, in the same order."""
