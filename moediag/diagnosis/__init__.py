"""Derives verdict, culprits and cause of a trial from its evidence. Pure: no file, no process."""

from moediag.diagnosis.judgement import Detector
from moediag.diagnosis.laws import LAWS, Law
from moediag.diagnosis.rules.explanations import (
    CONFIDENCE,
    MEANINGS,
    NEXT_STEPS,
    SIGNATURE,
)
from moediag.diagnosis.rules.order import RULES
from moediag.diagnosis.schedules.starvation import tokens_of
from moediag.diagnosis.trial_diagnosis import broken_law, diagnose

LAW_NAMES = tuple(law.name for law in LAWS)

__all__ = [
    "CONFIDENCE",
    "LAWS",
    "LAW_NAMES",
    "MEANINGS",
    "NEXT_STEPS",
    "RULES",
    "SIGNATURE",
    "Detector",
    "Law",
    "broken_law",
    "diagnose",
    "tokens_of",
]
