"""The step under test on one rank: the model, its sharding, its training, its measurements.

Importing this package imports nothing else. `moediag.lab.ranks.rank` runs a trial.
"""

__all__ = ["content", "tasks", "training"]
