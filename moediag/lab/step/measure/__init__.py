"""Measurements of a wrapped model, and the single process that it is compared with."""

__all__ = [
    "block_inputs",
    "gradients",
    "ownership",
    "reference",
    "replicas",
    "row_map",
    "training_state",
]
