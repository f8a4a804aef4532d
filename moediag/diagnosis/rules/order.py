"""The order of the detectors: the first one that finds something decides the verdict."""

from __future__ import annotations

from collections.abc import Iterable

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.judgement import Detector, Judgement
from moediag.diagnosis.laws.law import detector_of
from moediag.diagnosis.laws.law_order import LAWS
from moediag.diagnosis.rules.failed import (
    crash,
    guard_stop,
    lost_connection,
    lost_node,
    schedule_mismatch,
)
from moediag.diagnosis.rules.hung import (
    busy_ranks,
    diverged_schedules,
    idle_ranks,
    silent_node,
    stuck_operation,
    unexplained_wait,
)
from moediag.diagnosis.rules.hung_outside import (
    late_ranks,
    unended_ranks,
    unequal_meeting,
    unmet_ranks,
)
from moediag.diagnosis.rules.hung_stacks import interpreter_lock, stacks_alone
from moediag.diagnosis.rules.incomplete import (
    cut_short,
    interrupted,
    mixed_jobs,
    no_measurements,
    not_applicable,
    not_comparable,
    not_started,
)
from moediag.diagnosis.rules.measured import (
    nonfinite_numbers,
    nothing_compared,
    only_timed,
    repeated_samples,
    resume_drift,
    resume_exact,
    resume_undecided,
    right_numbers,
    unequal_replicas,
    wrong_gradients,
    wrong_metrics,
    wrong_norm,
    wrong_ownership,
    wrong_update,
)
from moediag.diagnosis.rules.recorded import (
    failed_calls,
    healthy_job,
    no_records,
    open_calls,
    trained_alone,
    unknown_end,
)
from moediag.diagnosis.rules.reported import (
    logged_positions,
    reported_absence,
    reported_end,
    reported_mismatch,
    stuck_watchdog,
    tools_undecided,
    unchanged_counts,
)
from moediag.diagnosis.rules.running import (
    held_up,
    kept_apart,
    progressing,
    ranks_elsewhere,
    undecided_looks,
)
from moediag.result import Verdict

RULES: tuple[Detector, ...] = (
    # The trial was stopped, or cannot run here.
    interrupted,
    not_applicable,
    not_started,
    # The evidence is of several jobs.
    mixed_jobs,
    # Ranks failed by themselves. An exception is the cause, the other ranks' wait a consequence.
    guard_stop,
    schedule_mismatch,
    crash,
    lost_node,
    reported_mismatch,
    reported_absence,
    logged_positions,
    lost_connection,
    # A running job that was started without moediag progresses, or a rank is held up.
    progressing,
    # Ranks stopped making progress.
    interpreter_lock,
    held_up,
    kept_apart,
    undecided_looks,
    unended_ranks,
    unequal_meeting,
    late_ranks,
    idle_ranks,
    diverged_schedules,
    stuck_operation,
    silent_node,
    unmet_ranks,
    busy_ranks,
    ranks_elsewhere,
    stacks_alone,
    unchanged_counts,
    stuck_watchdog,
    unexplained_wait,
    # Some rank failed, and the log does not tell which.
    reported_end,
    tools_undecided,
    # The trial was ended, and the evidence shows no failure. Slow is not hung.
    cut_short,
    # A watched job broke a law.
    *(detector_of(law, law.verdict) for law in LAWS if law.verdict is not None),
    # Nothing was measured: a watched job, or evidence of other tools.
    trained_alone,
    no_records,
    failed_calls,
    open_calls,
    unknown_end,
    healthy_job,
    # Requested measurements are missing, or cannot be compared.
    not_comparable,
    repeated_samples,
    no_measurements,
    # Wrong weights make all other numbers wrong.
    wrong_ownership,
    nonfinite_numbers,
    # A save and a load were measured.
    resume_drift,
    resume_undecided,
    resume_exact,
    # Of updates, replicas, norms and gradients, the one that is wrong in the earliest step decides.
    wrong_update,
    unequal_replicas,
    wrong_norm,
    wrong_gradients,
    wrong_metrics,
    # Nothing is wrong.
    right_numbers,
    only_timed,
    nothing_compared,
)


def judge(facts: Facts, rules: Iterable[Detector] = RULES) -> tuple[Verdict, Judgement]:
    """The verdict of the first detector that finds something, and its judgement."""
    for rule in rules:
        judged = rule.judge(facts)
        if judged is not None:
            return rule.verdict, judged
    raise AssertionError("the last rule finds something in any evidence")
