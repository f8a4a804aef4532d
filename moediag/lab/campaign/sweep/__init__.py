"""Runs every scenario of the catalogue and writes one summary."""

__all__ = ["session", "summary"]
