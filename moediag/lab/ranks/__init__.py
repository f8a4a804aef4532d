"""The processes that start the ranks of a trial."""

__all__ = ["host", "rank", "torchrun", "warm"]
