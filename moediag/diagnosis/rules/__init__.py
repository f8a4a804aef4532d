"""Detectors and their order: they turn the facts of one trial into its verdict."""

from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.rules.order import RULES, Detector, judge

__all__ = ["RULES", "Detector", "Facts", "Judgement", "judge"]
