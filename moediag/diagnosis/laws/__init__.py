"""Laws: what must hold in every healthy job, each with its finding, its sentence and its advice.

A module judges what the module of the same name in :mod:`moediag.recorder.laws` records.
"""

from moediag.diagnosis.laws.law import Broken, Law, law
from moediag.diagnosis.laws.law_order import LAWS

__all__ = ["LAWS", "Broken", "Law", "law"]
