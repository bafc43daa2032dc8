"""Training data for PyTorch: exact mixtures in a reproducible order, resumed at the next sample.

Data flows one way, integers flow back::

    io            work                                  nodes                     loader
    Dataset ──▶ Plan ──▶ WorkChunk ──▶ ChunkSplitter ──▶ fetch ─▶ transform ─▶ batch ──▶ your loop
    (metadata)  (pure)   (source)      (this rank)       (whole batches)                    │
                  ▲                                                                         │
                  └───────────── Progress: epoch, samples delivered ◀───────────────────────┘

The plan is a pure function: which sample stands at which position of the run follows from the
datasets' metadata, the weights and a seed, and any position is computed directly. So a state is a
few integers, and a run goes on at the very next sample, on any number of ranks and workers.
"""

from zephon_torch.errors import (
    ConfigurationError,
    DatasetError,
    MixtureError,
    PlanMismatch,
    RecordError,
    SameOrderWarning,
    StaleIteratorError,
    StateError,
    StorageError,
    WorkerError,
    WorldError,
    ZephonError,
)
from zephon_torch.loader.loader import DataLoader
from zephon_torch.loader.stats import LoaderStats
from zephon_torch.trainers.iterable import WorkSourceDataset
from zephon_torch.trainers.model_state import DataProgress, bind, strip
from zephon_torch.trainers.transformers import Skippable
from zephon_torch.version import __version__
from zephon_torch.work.order.mixture import MixtureSpec
from zephon_torch.work.sharing.splitter import ChunkSplitter
from zephon_torch.work.sources.static_mixture import StaticMixtureWorkSource

__all__ = [
    "ChunkSplitter",
    "ConfigurationError",
    "DataLoader",
    "DataProgress",
    "DatasetError",
    "LoaderStats",
    "MixtureError",
    "MixtureSpec",
    "PlanMismatch",
    "RecordError",
    "SameOrderWarning",
    "Skippable",
    "StaleIteratorError",
    "StateError",
    "StaticMixtureWorkSource",
    "StorageError",
    "WorkSourceDataset",
    "WorkerError",
    "WorldError",
    "ZephonError",
    "__version__",
    "bind",
    "strip",
]
