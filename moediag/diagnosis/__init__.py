"""Derives verdict, culprits and cause of a trial from its evidence. Pure: no file, no process."""

from moediag.diagnosis.trial_diagnosis import broken_law, diagnose

__all__ = ["broken_law", "diagnose"]
