"""Plans a layout for a model without weights, and simulates its ranks, all in one process."""

from moediag.lab.check.checking import run

__all__ = ["run"]
