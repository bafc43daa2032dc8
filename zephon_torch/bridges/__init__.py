"""Bridges to trainers, which observe the loops of a loader."""
