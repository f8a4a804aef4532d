"""What ranks measured, against the single-process reference and against each other."""

__all__ = [
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
