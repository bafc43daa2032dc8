"""The plan and how it is split: pure index arithmetic from metadata to pointers."""

from zephon_torch.work.identity.progress import Progress
from zephon_torch.work.order.mixture import MixtureSpec
from zephon_torch.work.plan.plan import Plan, Pointers
from zephon_torch.work.sources.static_mixture import StaticMixtureWorkSource, WorkChunk, WorkSource

__all__ = [
    "MixtureSpec",
    "Plan",
    "Pointers",
    "Progress",
    "StaticMixtureWorkSource",
    "WorkChunk",
    "WorkSource",
]
