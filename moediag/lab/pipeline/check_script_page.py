"""The page of `moediag check --script`: where ranks diverge, what was compared and what not."""

from __future__ import annotations

from collections.abc import Iterator

from moediag.lab.pipeline.check_result import share
from moediag.lab.pipeline.check_script import RankRead, ScriptResult, to_json
from moediag.result import wording
from moediag.result.answer_blocks import Answer, AnswerState, Case, Row, Section

ALWAYS = (
    "later steps; other ranks than the simulated ones; what depends on values of other ranks, "
    "which are assumed to be finite; numbers"
)


def answer(result: ScriptResult) -> Answer:
    failing = result.state == AnswerState.FAILURE
    return Answer(
        "check",
        f"{result.script} on {wording.plural(result.world, 'rank')}",
        result.state,
        "the ranks of this program diverge" if failing else "",
        (
            Section(tuple(_failure(result)), "What fails"),
            Section(tuple(_seen(result)), "What was compared"),
            Section(tuple(_question(result)), "What was asked"),
        ),
        cases=tuple(_cases(result)),
        facts=to_json(result),
    )


def _question(result: ScriptResult) -> Iterator[Row]:
    yield Row("script", result.script)
    simulated = wording.ranks([one.rank for one in result.ranks])
    yield Row("ranks", f"{simulated} of {result.world}, simulated one by one")
    yield Row("stack", ", ".join(f"{name} {v}" for name, v in result.versions.items() if v))


def _seen(result: ScriptResult) -> Iterator[Row]:
    yield Row("compared", _compared(result))
    for one in result.ranks:
        if text := one.problem or one.unseen:
            yield Row("NOT SEEN", _not_seen(one, text), "doubt")
    yield Row("NOT SEEN", ALWAYS, "faint")


def _failure(result: ScriptResult) -> Iterator[Row]:
    if result.failing and result.diagnosis is not None:
        yield Row("FAILS", result.diagnosis.cause, "bad")
        if result.diagnosis.next_step:
            yield Row("next", result.diagnosis.next_step)


def _cases(result: ScriptResult) -> Iterator[Case]:
    for one in result.ranks:
        state = AnswerState.of(False, one.problem, AnswerState.ANSWERED)
        yield Case(f"rank {one.rank}", result.script, state, one.problem, suite="simulated ranks")


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
