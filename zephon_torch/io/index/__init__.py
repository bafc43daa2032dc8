"""Where the records of a shard start: the index, and the sidecar file that keeps it."""
