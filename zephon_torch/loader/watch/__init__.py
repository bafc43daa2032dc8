"""Warnings about loops that go wrong without an error."""
