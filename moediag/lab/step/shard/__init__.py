"""Sharding of a model: one class for each way, one interface.

``wrapped.Wrapped`` is the interface; ``kinds.kind_of`` chooses the class of a trial.
"""

__all__ = ["clipping", "kinds", "optimizers", "wrapped"]
