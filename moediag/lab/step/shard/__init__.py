"""Sharding of a model: one class for each way, one interface, and where each part of a tensor lies.

``wrapped.Wrapped`` is the interface; ``kinds.kind_of`` chooses the class of a trial.
"""

__all__ = ["clipping", "kinds", "optimizers", "placement", "wrapped"]
