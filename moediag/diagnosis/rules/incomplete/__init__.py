"""Detectors of trials that did not run to an end that could be judged."""
