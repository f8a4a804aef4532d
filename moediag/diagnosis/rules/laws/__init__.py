"""Detectors of laws that a watched job broke, from what its ranks recorded (`watch --laws`)."""

__all__ = [
    "adapters_untrained",
    "declared_inputs_apart",
    "local_norms",
    "parameters_not_finite",
    "part_loaded",
    "replicas_apart",
    "same_part",
]
