"""Datasets: what they are, where their records stand, and how records are read."""

from zephon_torch.io.datasets.dataset import Dataset, Reader, Shard

__all__ = ["Dataset", "Reader", "Shard"]
