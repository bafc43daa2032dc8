"""Stores of other machines, through fsspec: clients, answers, retries, credentials."""
