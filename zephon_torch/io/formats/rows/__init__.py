"""Rows of numbers: token files and Megatron."""
