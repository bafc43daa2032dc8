"""Trainers that want a loader of their own shape. Each module needs its framework installed."""
