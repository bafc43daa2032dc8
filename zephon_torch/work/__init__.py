"""The plan and how it is split: pure index arithmetic from metadata to pointers."""

from zephon_torch.work.mixture import MixtureSpec
from zephon_torch.work.plan import Plan, Pointers
from zephon_torch.work.progress import Progress
from zephon_torch.work.source import StaticMixtureWorkSource, WorkChunk, WorkSource

__all__ = [
    "MixtureSpec",
    "Plan",
    "Pointers",
    "Progress",
    "StaticMixtureWorkSource",
    "WorkChunk",
    "WorkSource",
]
