"""The page of `moediag check --script`: what was compared and what not, last where ranks part."""

from __future__ import annotations

from collections.abc import Iterator

from moediag.lab.pipeline.check import share
from moediag.lab.pipeline.check_script import RankRead, ScriptResult
from moediag.report.text_layout import Line, labelled
from moediag.result import wording

ALWAYS = (
    "later steps; other ranks than the simulated ones; what depends on values of other ranks, "
    "which are assumed to be finite; numbers"
)


def lines(result: ScriptResult, width: int) -> Iterator[Line]:
    yield from labelled("script", result.script, width)
    simulated = wording.ranks([one.rank for one in result.ranks])
    yield from labelled("ranks", f"{simulated} of {result.world}, simulated one by one", width)
    versions = ", ".join(f"{name} {v}" for name, v in result.versions.items() if v)
    yield from labelled("stack", versions, width)
    yield ()
    yield from labelled("compared", _compared(result), width)
    for one in result.ranks:
        text = one.problem or one.unseen
        if text:
            yield from labelled("NOT SEEN", _not_seen(one, text), width, "doubt")
    yield from labelled("NOT SEEN", ALWAYS, width, "faint")
    yield ()
    if result.failing and result.diagnosis is not None:
        yield from labelled("FAILS", result.diagnosis.cause, width, "bad")
        if result.diagnosis.next_step:
            yield from labelled("next", result.diagnosis.next_step, width)
    verdict, style = _verdict(result)
    yield ((f" CHECK    {verdict}", style),)


def _verdict(result: ScriptResult) -> tuple[str, str]:
    if result.failing:
        return "the ranks of this program part", "bad"
    if result.undecided:
        return "not decided", "doubt"
    return "nothing was found that fails", "good"


def _compared(result: ScriptResult) -> str:
    calls, compared = (
        sum(getattr(one, name) for one in result.ranks) for name in ("calls", "compared")
    )
    steps = [one.answer.steps if one.answer else 0 for one in result.ranks]
    made = f"{min(steps)} to {max(steps)}" if min(steps) != max(steps) else str(steps[0])
    text = f"{compared:,} of {wording.plural(calls, 'call')} ({share(compared, calls):.0%})"
    return f"{text}; each rank made {made} optimizer steps"


def _not_seen(one: RankRead, text: str) -> str:
    if not one.calls:
        return f"rank {one.rank}: {text}"
    after = one.answer.read_after if one.answer is not None and one.answer.read else None
    when = "" if after is None else f", in step {after + 1}"
    return f"rank {one.rank} after call {one.compared} of {one.calls}{when}: {text}"
