"""One trial: from its evidence to verdict, culprits and cause. Pure: no file, no process."""

from moediag.diagnosis.trial_diagnosis import diagnose

__all__ = ["diagnose"]
