"""Collects evidence while the ranks live: stacks, the machine's state, dumps."""

__all__ = ["collect", "dumps", "machine", "token_counts"]
