"""Detectors and their order: they turn the facts of one trial into its verdict."""

from moediag.diagnosis.rules.order import RULES, judge

__all__ = ["RULES", "judge"]
