"""Detectors of laws that a watched job broke, from what its ranks recorded (`watch --laws`)."""

__all__ = [
    "adapters_untrained",
    "local_norms",
    "parameters_not_finite",
    "replicas_apart",
    "same_part",
]
