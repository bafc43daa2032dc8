"""Zephon's loader measured beside others and beside what the machine allows."""
