"""Diagnoses one trial: derives verdict, culprits and cause from its evidence.

Pure: no file, no process."""

from moediag.diagnosis.trial_diagnosis import diagnose

__all__ = ["diagnose"]
