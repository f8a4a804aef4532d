"""Detectors of laws that a watched job broke, from what its ranks recorded (`watch --laws`)."""

__all__ = ["replicas_apart"]
