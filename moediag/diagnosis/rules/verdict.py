"""The verdict of a trial, from the facts that were found: which, who, why, and how sure.

The verdict, the first rule that applies:

1. ``inconclusive``: the launch never started, or the user interrupted it;
2. ``not-applicable``: a worker says why this trial cannot be done on this stack;
3. ranks raised or died by themselves: ``collective-mismatch`` when their schedules do not fit
   together (or the library says so), else ``crash``; an exception in the program's own code that
   leaves others waiting is the cause, their stall its consequence. Ranks that the guard stopped
   (moediag.recorder.guard) crashed, whatever their schedules would have led to;
4. ``hang``: the watchdog saw quiescent ranks wait in a collective (in evidence of other tools:
   calls did not complete);
5. ``inconclusive``: the time bound ended it without a stall, or a rank left no numbers;
6. ``wrong-weights``: some rank trained other weights than the checkpoint's, or was not sharded as
   asked, or a load delivered other bytes; ``nonfinite``; then what came first: ``wrong-gradients``
   against the reference, whatever the schedules say, or ``replica-divergence``, what must be equal
   on several ranks and is not, or ``wrong-weights``, an optimizer that left other weights, another
   learning rate or count of updates than in one process. A norm that is equal everywhere and wrong
   is ``wrong-gradients`` too: what the optimizer gets is;
   ``wrong-metrics``, where all that trains is right and what is reported of it is not;
7. what a resume trial says in their place: ``resume-drift``, ``inconclusive``, ``clean``;
8. ``clean``: everything compared is right, even where schedules differ (then it is noted).

In evidence of other tools, and of a watched job, nothing is compared: after 5 it is
``collective-mismatch`` when schedules do not fit together, else ``clean`` when all that was
recorded completed.

The confidence:

- high: what the verdict rests on was seen directly, and where ranks are named, by what they did or
  by a strict majority;
- medium: ranks are named by weaker evidence (their history, the largest group, against a majority),
  or none is where one should be, or part of a log was lost;
- low: no schedule and no stack stands behind it (only an error's text), or nothing was decided.
"""

from __future__ import annotations

from moediag.diagnosis.rules.facts import Facts, Judgement, undecided
from moediag.diagnosis.rules.failed import failed
from moediag.diagnosis.rules.finished import foreign, measured, unmeasured, watched
from moediag.diagnosis.rules.hung import hang
from moediag.diagnosis.schedules.align import was_recorded
from moediag.result import Confidence, Verdict


def judge(facts: Facts) -> Judgement:
    """The rules of this module's docstring, in their order."""
    evidence = facts.evidence
    if evidence.interrupted:
        return undecided("The run was interrupted before it ended.")
    reasons = {
        seen.outcome.applicable: None
        for seen in evidence.ranks.values()
        if seen.outcome is not None and seen.outcome.applicable
    }
    if reasons:
        return Judgement(Verdict.NOT_APPLICABLE, Confidence.HIGH, "; ".join(reasons))
    if evidence.launch_error and not any(map(was_recorded, evidence.ranks.values())):
        return undecided(f"The ranks did not start: {evidence.launch_error}")
    if facts.failed:
        return failed(facts)
    if evidence.stall is not None:
        return hang(facts)
    if evidence.timed_out:
        return undecided(
            "The time bound ended the launch, and the ranks were not seen to stand still in a "
            "collective: slow is not hung."
        )
    if evidence.launch_error:
        return undecided(f"The launcher failed: {evidence.launch_error}")
    if evidence.foreign:
        return foreign(facts)
    if evidence.watched:
        return watched(facts)
    if not facts.gradients.measured:
        return unmeasured(facts)
    return measured(facts)
