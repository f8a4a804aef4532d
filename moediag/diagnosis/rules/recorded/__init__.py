"""Detectors of jobs that were only recorded: nothing they computed was measured."""
