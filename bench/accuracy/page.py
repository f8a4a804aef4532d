"""Lays out the counts as tables, for a terminal and for ``reports/accuracy.md``. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.accuracy.counting import Answer, Outcome, Tally, Truth, outcome, tally

Row = tuple[str, ...]
MOEDIAG, FRTRACE, HELPED, DETAIL = "moediag", "torchfrtrace", "torchfrtrace, helped", "DETAIL"


@dataclass(frozen=True)
class Judged:
    """One case with the answers of the tools, by name. Counted by ``kind`` of fault and by
    ``dimension``. ``seen``: rules were tuned on this layout."""

    truth: Truth
    answers: Mapping[str, Answer]
    kind: str = ""
    dimension: str = ""
    seen: bool = True

    def outcome(self, tool: str) -> Outcome:
        return outcome(self.truth, self.answers[tool])


def tallied(cases: Sequence[Judged], tool: str) -> Tally:
    return tally((case.truth, case.outcome(tool)) for case in cases)


# ------------------------------------------------------------------------ rows


def summary(victims: Sequence[Judged], simulated: Sequence[Judged]) -> list[Row]:
    """Returns strict true positives and false alarms of each tool on each set."""
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
    """Returns the results of each tool on each kind of simulated fault."""
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
    """Returns the page. ``head`` has date, versions and command, ``seeds`` those of the simulated
    cases."""
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
A **strict true positive** names the class of the failure, exactly the ranks at
fault, and one of the lines of the user's program that show it. An answer with one rank too many,
or with a line of the library, does not count. If the evidence cannot show which rank is at fault
(`truth`: nobody), naming a rank is wrong. A **false alarm** is any failure reported for a healthy
or slow job.

torch's own tools need not name the class, only ranks and line. torchfrtrace's answer is the first
finding that it prints. It assumes that one rank is correct and blames the ranks that differ from
it; the order of files in the folder decides which one. DETAIL's answer is the rank that most
errors compare with their own, or the rank that did not reach the monitored barrier. If the errors
name no rank, torchrun's "first observed failure" counts, unless that rank only stopped waiting.
"""

_VICTIMS = """\
The programs are in `tests/victims/jobs.py`, the correct answers in `tests/victims/table.py`.

- moediag: `moediag watch --on-hang abort -- torchrun … jobs.py NAME`, with the program unchanged.
- torchfrtrace: reads the Flight Recorder dumps that moediag collected for its page. gloo's dumps do
  not list the members of groups, so it ends with a KeyError; "helped" is the same with the members
  filled in. These dumps have no stacks, so it need not name a line.
- DETAIL: the same program without moediag, with `TORCH_DISTRIBUTED_DEBUG=DETAIL` and a timeout of
  30 s for its process groups (the default is 30 minutes); lines are those of its tracebacks.
"""

_SIMULATED = """\
Megatron-like schedules over pipeline, data, tensor and expert groups, 16 to
1,024 ranks, one fault on one rank per job, with all records or only the last 60 of each rank
(`bench/jobs/`). Both tools read the same files. `running` are healthy jobs dumped while they
ran, `none` healthy jobs that ended.

Tuning and testing are separate: rules were tuned on seeds below 2,000 of seven layouts (`python -m
bench.labelled`, unit tests). The table has seeds {first} to {last}, and six more layouts that were
never used in tuning, the two largest among them. The schedules come from one simulator, ours:
results may be worse for jobs with patterns that it does not have.
"""
