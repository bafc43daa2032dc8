"""The plan: which sample stands at which position."""
