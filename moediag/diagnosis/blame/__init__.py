"""Finds which ranks diverged, and which decisions and nodes explain it."""

__all__ = ["culprits", "decisions", "nodes"]
