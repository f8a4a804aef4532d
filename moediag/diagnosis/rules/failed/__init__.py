"""Detectors of ranks that raised, died, or were stopped by the guard."""
