"""Distinguishes a failure of the package from a failure of its dependencies."""

__all__ = ["companion_answer", "companions"]
