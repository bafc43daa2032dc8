"""zephon_torch."""
