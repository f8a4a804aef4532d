"""What verdicts and confidences mean, in words."""

from __future__ import annotations

from moediag.diagnosis.rules import signature
from moediag.result import Confidence, Verdict

MEANINGS = {
    Verdict.CLEAN: "Everything that was compared is correct. For a job that was only recorded: "
    "it ended by itself and its schedules agree.",
    Verdict.HANG: "Ranks wait in a collective that does not complete.",
    Verdict.COLLECTIVE_MISMATCH: "Ranks failed or ended, and their collectives do not match.",
    Verdict.WRONG_GRADIENTS: "A gradient, or the norm that scales gradients, differs from the "
    "single-process reference or breaks a law.",
    Verdict.WRONG_WEIGHTS: "A rank trained other weights than the checkpoint's, or the optimizer "
    "left other weights than in a single process.",
    Verdict.REPLICA_DIVERGENCE: "Values that must be equal on several ranks differ, or nothing "
    "kept them equal.",
    Verdict.NONFINITE: "A loss, a gradient or a gradient norm is nan or infinite.",
    Verdict.WRONG_METRICS: "A metric is wrong, and no wrong gradient was found.",
    Verdict.RESUME_DRIFT: "Training that was saved and loaded differs from an uninterrupted run.",
    Verdict.CRASH: "Ranks raised an exception, died by themselves, or their communication failed.",
    Verdict.NOT_APPLICABLE: "The question does not arise on this stack.",
    Verdict.INCONCLUSIVE: "The evidence does not decide.",
}
NEXT_STEPS = {
    Verdict.CLEAN: "Nothing. To check the numbers of your own job, use "
    "`moediag watch --laws -- COMMAND` or `moediag verify`.",
    Verdict.HANG: "Compare the lines under WHERE. Change the program so that every rank of the "
    "group makes the same calls in the same order, and run it under `moediag watch` again.",
    Verdict.COLLECTIVE_MISMATCH: "Compare the sides under FIRST DIVERGENCE: at that position all "
    "ranks must call the same operation with matching sizes.",
    Verdict.WRONG_GRADIENTS: "Read under GRADIENTS which parameters are wrong and by which factor. "
    "A factor equal to the size of a mesh axis suggests that the reduction over that axis is "
    "missing or done twice.",
    Verdict.WRONG_WEIGHTS: "Compare what each rank loaded with the checkpoint, then the settings "
    "of the optimizer.",
    Verdict.REPLICA_DIVERGENCE: "Read in which step the replicas first differed, and in what. Make "
    "that equal on all of them, or reduce it over them.",
    Verdict.NONFINITE: "Look for the first step and the first parameter that is not finite. "
    "`moediag watch --laws-every 1 -- COMMAND` checks every step.",
    Verdict.WRONG_METRICS: "Change how the metric is reduced over ranks, or what it is computed "
    "from.",
    Verdict.RESUME_DRIFT: "Save and load the state that the page names.",
    Verdict.CRASH: "Read the exception of the culprit. The errors of the other ranks may only "
    "follow from it.",
    Verdict.NOT_APPLICABLE: "Nothing. `moediag show NAME` prints the stack that the scenario is "
    "about.",
    Verdict.INCONCLUSIVE: "Read under NOT SEEN which evidence is missing, and run it again so that "
    "it is collected.",
}
CONFIDENCE = {
    Confidence.HIGH: "The evidence shows directly what the verdict rests on. Ranks are named by "
    "what they did, or by a strict majority.",
    Confidence.MEDIUM: "Ranks are named by weaker evidence (what ranks with the same role did, the "
    "largest group, against a majority), or none is named where one should be, or part of a log "
    "was lost.",
    Confidence.LOW: "No schedule and no stack supports it, only the text of an error or what the "
    "job did before, or nothing was decided.",
}
SIGNATURE = (signature.__doc__ or "").replace("``", "`").strip()
