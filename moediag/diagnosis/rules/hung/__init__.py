"""Detectors of ranks that stood still."""
