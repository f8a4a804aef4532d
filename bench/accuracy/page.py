"""The tables, for a terminal and as ``reports/accuracy.md``. Pure: lays out what was counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.accuracy.counting import Answer, Outcome, Tally, Truth, outcome, tally

Row = tuple[str, ...]
MOEDIAG, FRTRACE, HELPED, DETAIL = "moediag", "torchfrtrace", "torchfrtrace, helped", "DETAIL"


@dataclass(frozen=True)
class Judged:
    """One case with the answer of each tool by its name."""

    truth: Truth
    answers: Mapping[str, Answer]
    kind: str = ""  # of fault, to count by

    def outcome(self, tool: str) -> Outcome:
        return outcome(self.truth, self.answers[tool])


def tallied(cases: Sequence[Judged], tool: str) -> Tally:
    return tally((case.truth, case.outcome(tool)) for case in cases)


# ------------------------------------------------------------------------ rows


def summary(victims: Sequence[Judged], simulated: Sequence[Judged]) -> list[Row]:
    """Strict true positives and false alarms of each tool on each set."""
    rows: list[Row] = [
        ("cases", "tool", "strict true positives", "right ranks at least", "false alarms")
    ]
    for name, cases in (("victims", victims), ("simulated jobs", simulated)):
        for tool in cases[0].answers if cases else ():
            found = tallied(cases, tool)
            rows.append((
                name, tool, f"{found.right} of {found.failing}",
                f"{found.ranks} of {found.failing}",
                f"{found.alarms} of {found.healthy}",
            ))  # fmt: skip
    return rows


def of_victims(cases: Sequence[Judged]) -> list[Row]:
    rows: list[Row] = [("victim", "truth", *(cases[0].answers if cases else ()))]
    for case in cases:
        truth = case.truth
        wanted = "no failure" if truth.healthy else " or ".join(truth.verdicts)
        if not truth.healthy:
            wanted += f", {ranks(truth.culprits)}"
        if truth.lines:
            wanted += f", {', '.join(truth.lines)}"
        answers = (_cell(case, tool) for tool in case.answers)
        rows.append((truth.name, wanted, *answers))
    return rows


def by_fault(cases: Sequence[Judged]) -> list[Row]:
    """The simulated cases: how each tool did on each kind of fault."""
    tools = list(cases[0].answers) if cases else []
    rows: list[Row] = [("fault", "cases", *tools, "the rank is in any finding of torchfrtrace")]
    for kind in dict.fromkeys(case.kind for case in cases):
        of_kind = [case for case in cases if case.kind == kind]
        cells = [_kinds(tallied(of_kind, tool)) for tool in tools]
        among = "" if of_kind[0].truth.healthy else str(sum(map(named_among, of_kind)))
        rows.append((kind, str(len(of_kind)), *cells, among))
    return rows


def named_among(case: Judged) -> bool:
    """Whether one of torchfrtrace's findings names exactly the culprits."""
    return any(set(named) == set(case.truth.culprits) for named in case.answers[FRTRACE].among)


def ranks(numbers: Sequence[int]) -> str:
    if not numbers:
        return "nobody"
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(map(str, numbers))}"


def _kinds(found: Tally) -> str:
    return ", ".join(f"{count} {kind.value}" for kind, count in found.kinds.most_common())


def _cell(case: Judged, tool: str) -> str:
    answer, found = case.answers[tool], case.outcome(tool)
    if answer.refused:
        return f"{found.value}: {answer.refused}"
    if not answer.alarm:
        return f"{found.value}: {answer.verdict or answer.text}"
    said = answer.verdict if answer.verdict is not None else without_lines(answer.text)
    return f"{found.value}: {said}, {ranks(answer.culprits)}"


def without_lines(text: str) -> str:
    return " ".join(word for word in text.split() if ".py:" not in word)


# ------------------------------------------------------------------------ markdown


def markdown(
    victims: Sequence[Judged], simulated: Sequence[Judged], head: str, seeds: range
) -> str:
    """``head``: when, with what, by which command. ``seeds``: of the simulated cases."""
    parts = [
        "# How often the diagnosis is right\n",
        head,
        _table(summary(victims, simulated)),
        _RULES,
    ]
    if victims:
        parts += ["## Victims: real jobs under torchrun on gloo\n", _table(of_victims(victims)),
                  _VICTIMS]  # fmt: skip
    if simulated:
        parts += ["## Simulated jobs: Flight Recorder dumps of known fault\n",
                  _table(by_fault(simulated)),
                  _SIMULATED.format(first=seeds.start, last=seeds.stop - 1)]  # fmt: skip
    wrong = [
        f"- {case.truth.name}: {_cell(case, MOEDIAG)}"
        for case in (*victims, *simulated)
        if case.outcome(MOEDIAG) not in (Outcome.RIGHT, Outcome.QUIET)
    ]
    parts += ["## Where moediag is not strictly right\n", "\n".join(wrong or ["Nowhere here."])]
    return "\n".join(parts) + "\n"


def _table(rows: Sequence[Row]) -> str:
    head, *body = ([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *body)]
    return "\n".join(lines) + "\n"


_RULES = """\
A **strict true positive** names the class of the failure, exactly the ranks that are at fault and
one of the lines of the user's program that show it. Naming one rank too many, or a line of the
library, is none. Where the evidence tells nobody (`truth`: nobody), naming somebody is wrong. A
**false alarm** is any failure told of a job that is healthy or only slow.

Of torch's own tools the class is not asked, only ranks and line. torchfrtrace's answer is the
first of the findings that it prints. It takes one rank for right and blames who differs from it;
which one is decided by the order in which a folder lists its files. DETAIL's answer is the rank
that most errors set against their own, or that did not reach the monitored barrier; where the
errors name nobody, torchrun's "first observed failure" counts, unless that rank only gave up.
"""

_VICTIMS = """\
The programs are in `tests/victims/jobs.py`, what is right about each in `tests/victims/table.py`.

- moediag: `moediag watch --on-hang abort -- torchrun … jobs.py NAME`, the program unchanged.
- torchfrtrace: the Flight Recorder dumps that moediag took at its page. gloo's dumps name no
  members of groups, on which it ends with a KeyError; "helped" is the same with the members filled
  in. These dumps have no stacks, so no line is asked of it.
- DETAIL: the same program without moediag, `TORCH_DISTRIBUTED_DEBUG=DETAIL`, its process groups
  giving up after 30 s (half an hour is the default); lines are those of its tracebacks.
"""

_SIMULATED = """\
Megatron-like schedules over pipeline, data, tensor and expert groups, 16 to 1,024 ranks, one fault
on one rank in each, all records or only the last 60 of each rank (`bench/jobs.py`). Both tools read
the same files; `running` are healthy jobs that were dumped on their way, `none` such that ended.

Kept apart: rules were tuned on seeds below 2,000 of seven layouts (`python -m bench.labelled`, unit
tests). Reported are seeds {first} to {last}, and besides the seven layouts six that were never used
in tuning, the two largest among them. The schedules come from one simulator, ours: a job with a
habit that it does not have may be told worse.
"""
