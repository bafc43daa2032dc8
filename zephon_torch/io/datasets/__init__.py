"""Datasets: what they are, how they are found, counted, split and described."""
