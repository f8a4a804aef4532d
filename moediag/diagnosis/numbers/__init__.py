"""Compares what ranks measured with the single-process reference and with each other."""

__all__ = [
    "agreement",
    "by_part",
    "expert_holders",
    "gradients",
    "metrics",
    "norms",
    "optimizer_update",
    "ownership",
    "replicas",
    "resume",
    "scale_factor",
]
