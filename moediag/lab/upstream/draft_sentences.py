"""Sentences of a draft that follow from the trials of the run: what was expected, which fixes were
run, which releases fail. In the library's words: a variant's name means nothing to a maintainer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from moediag.report.markdown import fenced
from moediag.result import Role, RunResult, TrialResult, Verdict, wording

_SAME_COLLECTIVES = "Every rank issues the same collectives, and the step completes."
_EXPECTED = {
    Verdict.HANG: _SAME_COLLECTIVES,
    Verdict.COLLECTIVE_MISMATCH: _SAME_COLLECTIVES,
    Verdict.CRASH: "No rank raises an exception.",
    Verdict.WRONG_GRADIENTS: "Each gradient equals that of the same step in a single process.",
    Verdict.WRONG_WEIGHTS: "Each weight equals that of the checkpoint, and after a step that of "
    "the same step in a single process.",
    Verdict.WRONG_METRICS: "Each metric has the value that the data of all ranks give.",
    Verdict.REPLICA_DIVERGENCE: "Copies of a parameter stay equal on all ranks.",
    Verdict.NONFINITE: "Every value stays finite, as in the same step in a single process.",
    Verdict.RESUME_DRIFT: "A run that resumes from the checkpoint continues like one that was not "
    "interrupted.",
}
_TRACEBACK = re.compile(r"\s*Traceback \(most recent call last\):")
_NEW_LINE = re.compile(r' (?=File "|\(RANK )')  # a cause is one line


def expected(result: RunResult, trial: TrialResult, titles: Mapping[str, str]) -> str:
    """What a correct run does, and the controls that do it."""
    text = _EXPECTED.get(trial.verdict, _SAME_COLLECTIVES)
    clean = (t for t in result.trials if t.role == Role.CONTROL and t.verdict == Verdict.CLEAN)
    controls = [_named(t.variant, titles.get(t.variant, "")) for t in clean]
    return text + _list("This holds with", dict.fromkeys(controls))


def fixes(result: RunResult, trial: TrialResult, titles: Mapping[str, str]) -> str:
    """What each fix for this failure does, and whether it removes it; "" without one."""
    ran = {t.variant: t for t in result.trials if t.repairs in ("", trial.variant)}
    judged = [(f, ran[f.variant]) for f in result.conclusion.fixes if f.variant in ran]
    right = [
        _named(t.variant, _action(t, titles), _releases(t, trial))
        for f, t in judged
        if f.correct and not t.other_batch  # trains on less data: not a fix
    ]
    wrong = [_named(t.variant, _action(t, titles), f.why) for f, t in judged if not f.correct]
    found = (_list("These fixes work here", right), _list("These do not", wrong))
    return "\n\n".join(text.strip() for text in found if text)


def releases(result: RunResult, trial: TrialResult, same: Iterable[str]) -> str:
    """Which other releases fail in the same way and which do not, "" if no other one ran. ``same``:
    variants that differ from the failing one in nothing but the releases."""
    fail, pass_ = [], []
    for name in same:
        trials = [t for t in result.trials if t.variant == name]
        words = _releases(trials[0], trial) if trials else ""
        if words and all(t.verdict == Verdict.CLEAN for t in trials):
            pass_.append(words)
        elif words and all(_kind(t) == _kind(trial) for t in trials):
            fail.append(words)
    if not fail and not pass_:
        return ""
    here = "; ".join([", ".join(wording.stack(trial.stack)), *dict.fromkeys(fail)])
    good = f" Clean with {'; '.join(dict.fromkeys(pass_))}." if pass_ else ""
    return f"Fails with {here}.{good} Other releases were not run."


def cause(trial: TrialResult) -> str:
    """The cause; a traceback in it as a block."""
    head, *traceback = _TRACEBACK.split(trial.cause, maxsplit=1)
    if not traceback:
        return wording.html(head)
    block = fenced(_NEW_LINE.sub("\n", traceback[0].strip())).rstrip()
    return f"{wording.html(head)}\n\n{block}"


def _action(trial: TrialResult, titles: Mapping[str, str]) -> str:
    source = f" ({trial.source})" if trial.source else ""
    return f"{trial.what or titles.get(trial.variant, '')}{source}"


def _releases(other: TrialResult, trial: TrialResult) -> str:
    """The versions of ``other`` that differ from those of ``trial``."""
    return ", ".join(
        f"{package} {version.split('+')[0]}"
        for package, version in other.stack.items()
        if version and version != trial.stack.get(package)
    )


def _kind(trial: TrialResult) -> tuple[str, str]:
    return trial.verdict, trial.signature


def _named(name: str, *parts: str) -> str:
    return f"`{name}`" + "".join(f": {part}" for part in parts if part)


def _list(head: str, lines: Iterable[str]) -> str:
    items = "".join(f"\n- {line}" for line in lines)
    return f"\n\n{head}:\n{items}" if items else ""
