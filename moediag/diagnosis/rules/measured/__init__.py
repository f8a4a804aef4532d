"""Detectors of trials whose every rank reached its end and left its numbers."""
