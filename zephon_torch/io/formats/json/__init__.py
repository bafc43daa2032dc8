"""JSON lines."""
