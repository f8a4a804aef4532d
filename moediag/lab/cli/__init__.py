"""The laboratory's commands: each module parses one, calls, and returns its exit code."""

__all__ = ["options", "run"]
