"""The section of ``reports/accuracy.md`` or ``attach.md`` about other people's programs. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.abroad.cases import Case
from bench.abroad.running import ATTACH, OPTIONS, Answer
from bench.abroad.scoring import HEAD, Outcome, Said, Tally, outcome, points, tally

TITLE = "## Programs that others wrote"
RIGHT = (Outcome.RIGHT, Outcome.QUIET)


@dataclass(frozen=True)
class Judged:
    case: Case
    answer: Answer

    @property
    def said(self) -> Said | None:
        if self.answer.refused:
            return None
        shown = self.answer.page.splitlines()[:HEAD]
        head = "\n".join([self.answer.cause, *shown, *_of_excerpt(shown)])
        alarm = self.answer.verdict != "clean"
        return Said(self.answer.verdict, self.answer.ranks, head, alarm)

    @property
    def outcome(self) -> Outcome:
        return outcome(self.case.truth, self.answer.places, self.said)


def _of_excerpt(rows: Sequence[str]) -> Iterator[str]:
    """``train.py:94`` for each line of source that the page shows below the name of its file."""
    file = ""
    for row in rows:
        if re.fullmatch(r" [\w.-]+\.py", row):
            file = row.strip()
        elif found := re.match(r" +(\d+) \| ", row):
            yield f"{file}:{found[1]}"


def counted(cases: Sequence[Judged]) -> Tally:
    return tally((one.case.truth, one.outcome, points(one.case.truth, one.said)) for one in cases)


# ------------------------------------------------------------------------ lines


def line(one: Judged) -> str:
    answer = one.answer
    told = f", page after {answer.seconds:.1f} s" if answer.seconds is not None else ""
    named = f"{answer.verdict or answer.refused}, {ranks(answer.ranks)}"
    return (
        f"{one.outcome.value:14} {one.case.name}: {named}{told}, "
        f"{answer.took:.0f} s in all{'; ' + answer.changed if answer.changed else ''}"
    )


def line_of_all(cases: Sequence[Judged]) -> str:
    found = counted(cases)
    kinds = ", ".join(f"{count} {kind.value}" for kind, count in found.kinds.most_common())
    return f"{found.faults} faults, {found.points} points; {found.healthy} healthy: {kinds}"


def ranks(numbers: Sequence[int]) -> str:
    if not numbers:
        return "nobody"
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers))}"


# ------------------------------------------------------------------------ markdown


def markdown(cases: Sequence[Judged], head: str, *, attached: bool) -> str:
    """Returns the section. ``head`` has command, date and versions; ``attached``: the answers are
    those of `moediag attach`."""
    parts = [
        f"{TITLE}\n",
        f"{head}\n",
        _table(_summary(cases)),
        _RULES,
        _table(_rows(cases)),
        _ATTACHED.format(options=" ".join(ATTACH))
        if attached
        else _HOW.format(options=" ".join(OPTIONS)),
    ]
    return "\n".join(parts)


def _summary(cases: Sequence[Judged]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [(
        "cases", "faults", "points", "right", "rightly nobody", "right rank at least", "WRONG RANK",
        "nobody", "NO PAGE", "healthy", "not finished", "FALSE ALARM", "disturbed",
        "median seconds to the page",
    )]  # fmt: skip
    groups = (
        ("seen while tuning", [one for one in cases if not one.case.held_out]),
        ("held out", [one for one in cases if one.case.held_out]),
        ("all", list(cases)),
    )
    for name, some in groups:
        found = counted(some)
        named = found.points + found.kinds[Outcome.WRONG]
        seconds = sorted(
            one.answer.seconds for one in some
            if one.answer.seconds is not None and not one.case.truth.healthy
        )  # fmt: skip
        middle = f"{seconds[len(seconds) // 2]:.1f}" if seconds else ""
        changed = sum(bool(one.answer.changed) for one in some)
        kinds = found.kinds
        numbers = (
            kinds[Outcome.OPEN], named, kinds[Outcome.WRONG], kinds[Outcome.NOBODY],
            kinds[Outcome.MISSING], found.healthy, kinds[Outcome.UNFINISHED], kinds[Outcome.ALARM],
            changed,
        )  # fmt: skip
        rows.append((
            name, str(found.faults), str(found.points), f"{kinds[Outcome.RIGHT]} of {found.faults}",
            *map(str, numbers), middle,
        ))  # fmt: skip
    return rows


def _rows(cases: Sequence[Judged]) -> list[tuple[str, ...]]:
    rows = [("program", "case", "truth", "answer", "seconds", "held out")]
    for one in cases:
        truth, answer = one.case.truth, one.answer
        wanted = " or ".join(truth.verdicts)
        if not truth.healthy:
            wanted += f", {ranks(truth.ranks)}" + ("" if truth.known else " or nobody")
            wanted += f", {answer.places[0]}" if answer.places else ""
        said = answer.refused or f"{answer.verdict}, {ranks(answer.ranks)}"
        if truth.healthy and not answer.refused:
            said = answer.verdict
        said += f"; {answer.changed}" if answer.changed else ""
        took = "" if truth.healthy or answer.seconds is None else f"{answer.seconds:.1f}"
        fault = one.case.name.removeprefix(f"{one.case.program}/")
        rows.append((one.case.program, fault, wanted, f"{one.outcome.value}: {said}", took,
                     "yes" if one.case.held_out else ""))  # fmt: skip
    return rows


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = ([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *body)]
    return "\n".join(lines) + "\n"


_RULES = f"""\
Exactly the ranks that the fault was put into: one point. Another rank, or one rank too many: minus
one. Nobody named, no page, or a page only after the time limit: none. **Right** also needs the
class and a line from which one finds the fault, in the cause or in the page's first {HEAD} lines.
Where two ranks took different ways and nothing tells which was meant ("or nobody"), a page with
class and line that names nobody is **rightly nobody**, without a point. **Disturbed**: a healthy
program ended otherwise than without moediag (exit code, printed losses, processes left), or
processes of a failed one outlived the watcher.
"""

_ATTACHED = """\
Two to four ranks on gloo, without a GPU, started without moediag. `moediag attach PID {options}`
looks at a job with a fault when it has made no optimizer step for ten seconds, and `moediag attach
PID` at a healthy one from its start; then again and again, and the first page that is not "clean"
counts. Seconds count from the command to that page. Faults after which the job ends by itself are
left out. Programs, edits and truths are those of `reports/accuracy.md`.
"""

_HOW = """\
Two to four ranks on gloo, without a GPU, each with `moediag watch {options} -- COMMAND`. Seconds
count from the newest optimizer step of any rank to the page: they contain the rest of the step, and
the machine's load. The truth of each case is in `bench/abroad/table.py` or `held_out.py`, beside
the fault, and was written before a page about it was read. Checkouts (nanoGPT, llm.c, minGPT,
pytorch/examples, accelerate's examples) run unmodified but for the edits in
`bench/abroad/programs.py`, most of which remove the need for a GPU. Packages (transformers'
Trainer, TRL, Lightning, Ray Train, DeepSpeed, Megatron-Core) run through small training scripts of
ours in `bench/abroad/scripts/`, which call their public trainers.

Pages of the cases "seen while tuning" were read while the diagnosis was being changed. Nobody who
changed it was shown a page or a log of a "held out" case before this run. The faults are
synthetic: in the programs, conditions such as `if rank == 0` around a collective are ours.
"""
