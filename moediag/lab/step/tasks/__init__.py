"""What ranks do with a trial, one module for each kind of task, each with ``run``."""

__all__ = ["cost", "resume", "step", "trainer"]
