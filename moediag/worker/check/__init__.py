"""Plans a layout for a model without weights, and simulates its ranks, all in one process."""

from moediag.worker.check.checking import run

__all__ = ["run"]
