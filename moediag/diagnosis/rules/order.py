"""The order of the detectors: the first one that finds something decides the verdict."""

from __future__ import annotations

from collections.abc import Iterable

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.judgement import Detector, Judgement
from moediag.diagnosis.laws.law import detector_of
from moediag.diagnosis.laws.law_order import LAWS
from moediag.diagnosis.rules import (
    failed,
    hung,
    hung_outside,
    hung_stacks,
    incomplete,
    measured,
    recorded,
    reported,
    running,
)
from moediag.result import Verdict

RULES: tuple[Detector, ...] = (
    # The trial was stopped, or cannot run here.
    incomplete.interrupted,
    incomplete.not_applicable,
    incomplete.not_started,
    # The evidence is of several jobs.
    incomplete.mixed_jobs,
    # Ranks failed by themselves. An exception is the cause, the other ranks' wait a consequence.
    failed.guard_stop,
    failed.schedule_mismatch,
    failed.crash,
    failed.lost_node,
    reported.reported_mismatch,
    reported.reported_cause,
    reported.reported_absence,
    reported.logged_positions,
    failed.lost_connection,
    # A running job that was started without moediag progresses, or a rank is held up.
    running.progressing,
    # Ranks stopped making progress.
    hung_stacks.interpreter_lock,
    running.held_up,
    running.kept_apart,
    running.undecided_looks,
    hung_outside.unended_ranks,
    hung_outside.unequal_meeting,
    hung_outside.late_ranks,
    hung.idle_ranks,
    hung.diverged_schedules,
    hung.stuck_operation,
    hung.silent_node,
    hung_outside.unmet_ranks,
    hung.busy_ranks,
    running.ranks_elsewhere,
    hung_stacks.stacks_alone,
    reported.unchanged_counts,
    reported.stuck_watchdog,
    hung.unexplained_wait,
    # Some rank failed, and the log does not tell which.
    reported.reported_end,
    reported.tools_undecided,
    # The trial was ended, and the evidence shows no failure. Slow is not hung.
    incomplete.cut_short,
    # A watched job broke a law.
    *(detector_of(law, law.verdict) for law in LAWS if law.verdict is not None),
    # Nothing was measured: a watched job, or evidence of other tools.
    recorded.trained_alone,
    recorded.no_records,
    recorded.failed_calls,
    recorded.open_calls,
    recorded.unknown_end,
    recorded.healthy_job,
    # Requested measurements are missing, or cannot be compared.
    incomplete.not_comparable,
    measured.repeated_samples,
    incomplete.no_measurements,
    # Wrong weights make all other numbers wrong.
    measured.wrong_ownership,
    measured.nonfinite_numbers,
    # A save and a load were measured.
    measured.resume_drift,
    measured.resume_undecided,
    measured.resume_exact,
    # Of updates, replicas, norms and gradients, the one that is wrong in the earliest step decides.
    measured.wrong_update,
    measured.unequal_replicas,
    measured.wrong_norm,
    measured.wrong_gradients,
    measured.wrong_metrics,
    # Nothing is wrong.
    measured.right_numbers,
    measured.only_timed,
    measured.nothing_compared,
)


def judge(facts: Facts, rules: Iterable[Detector] = RULES) -> tuple[Verdict, Judgement]:
    """The verdict of the first detector that finds something, and its judgement."""
    for rule in rules:
        judged = rule.judge(facts)
        if judged is not None:
            return rule.verdict, judged
    raise AssertionError("the last rule finds something in any evidence")
