"""Judges a whole run: expectations, effects of fixes, regressions, step times, tables.

It reads results, the plan and the ranks' outcomes, not evidence."""

from moediag.lab.judgement.conclusion import conclude, met
from moediag.lab.judgement.fix_effect import with_regressions
from moediag.lab.judgement.side_by_side import together
from moediag.lab.judgement.step_time import with_ratios
from moediag.lab.judgement.training_table import tables as training_tables

__all__ = ["conclude", "met", "together", "training_tables", "with_ratios", "with_regressions"]
