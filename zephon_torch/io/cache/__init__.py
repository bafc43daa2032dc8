"""Copies of whole shards on this machine, within a limit of bytes."""
