"""Generates docs/reference/verdicts.md from the detectors: `make golden` writes the file,
`python -m moediag.diagnosis.rules.verdicts_page` writes to stdout."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from moediag.diagnosis.rules import signature
from moediag.diagnosis.rules.order import RULES, Detector
from moediag.result import Confidence, Verdict

MEANINGS = {
    Verdict.CLEAN: "Everything that was compared is correct. For a job that was only recorded: "
    "it ended by itself and its schedules agree.",
    Verdict.HANG: "Ranks wait in a collective that does not complete.",
    Verdict.COLLECTIVE_MISMATCH: "Ranks failed or ended, and their collectives do not match.",
    Verdict.WRONG_GRADIENTS: "A gradient, or the norm that scales gradients, differs from the "
    "single-process reference.",
    Verdict.WRONG_WEIGHTS: "A rank trained other weights than the checkpoint's, or the optimizer "
    "left other weights than in a single process.",
    Verdict.REPLICA_DIVERGENCE: "Values that must be equal on several ranks differ, or nothing "
    "kept them equal.",
    Verdict.NONFINITE: "A loss, a gradient or a gradient norm is nan or infinite.",
    Verdict.WRONG_METRICS: "Training is correct, and a reported metric is wrong.",
    Verdict.RESUME_DRIFT: "Training that was saved and loaded differs from an uninterrupted run.",
    Verdict.CRASH: "Ranks raised an exception, died by themselves, or their communication failed.",
    Verdict.NOT_APPLICABLE: "The question does not arise on this stack.",
    Verdict.INCONCLUSIVE: "The evidence does not decide.",
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
_HEAD = """\
# Verdicts

Generated from the detectors in `moediag/diagnosis/rules/` by `make golden`. Do not edit it.

## The order

moediag asks the detectors in this order. The first that finds something decides the verdict.

| | verdict | what the detector finds | detector |
|---|---|---|---|
"""


def page(rules: Iterable[Detector] = RULES) -> str:
    """The page in markdown."""
    rows = [
        f"| {number} | `{rule.VERDICT}` | {_law(rule)} | {_file(rule)} |"
        for number, rule in enumerate(rules, start=1)
    ]
    meanings = [f"| `{verdict}` | {text} |" for verdict, text in MEANINGS.items()]
    sure = [f"| {confidence} | {text} |" for confidence, text in CONFIDENCE.items()]
    lines = [
        *rows, "", "## What a verdict means", "", "| verdict | meaning |", "|---|---|", *meanings,
        "", "## Confidence", "", "| confidence | meaning |", "|---|---|", *sure,
        "", "## Signature", "", (signature.__doc__ or "").replace("``", "`").strip(),
    ]  # fmt: skip
    return _HEAD + "\n".join(lines) + "\n"


def _law(rule: Detector) -> str:
    """The detector's docstring on one line."""
    return " ".join((rule.__doc__ or "").split())


def _file(rule: Detector) -> str:
    """``[crash](../../moediag/…/failed/crash.py)``."""
    parts = getattr(rule, "__name__", "").split(".")
    return f"[{parts[-1]}](../../{'/'.join(parts)}.py)"


if __name__ == "__main__":
    sys.stdout.write(page())
