"""From pointers to batches: read, transform, collate."""
