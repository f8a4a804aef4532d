"""Lays out the counts as tables, for a terminal and for ``reports/accuracy.md``. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.accuracy.counting import GOOD, Answer, Outcome, Tally, Truth, outcome, tally

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


def summary(sets: Mapping[str, Sequence[Judged]]) -> list[Row]:
    """Returns strict true positives and errors of each tool on each set of cases."""
    rows: list[Row] = [
        ("cases", "tool", "strict true positives", "right ranks at least", "innocent ranks named",
         "false alarms")
    ]  # fmt: skip
    for name, cases in sets.items():
        for tool in cases[0].answers if cases else ():
            found = tallied(cases, tool)
            rows.append((
                name, tool, f"{found.right} of {found.failing}",
                f"{found.ranks} of {found.failing}",
                f"{found.kinds[Outcome.OTHERS]} of {found.failing}",
                f"{found.alarms} of {found.healthy}",
            ))  # fmt: skip
    return rows


def by_layout(cases: Sequence[Judged]) -> dict[str, list[Judged]]:
    """Returns the simulated cases, apart for layouts that rules were tuned on."""
    return {
        "layouts used in tuning": [case for case in cases if case.seen],
        "other layouts": [case for case in cases if not case.seen],
    }


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


def by_dimension(cases: Sequence[Judged]) -> list[Row]:
    """Returns the results in each dimension, of the layouts used in tuning and of others."""
    rows: list[Row] = [
        ("dimension", "cases", "moediag, layouts used in tuning", "moediag, other layouts",
         "torchfrtrace: every culprit found", "and nobody else", "its false alarms")
    ]  # fmt: skip
    for name in dict.fromkeys(case.dimension for case in cases):
        own = [case for case in cases if case.dimension == name]
        failing = [case for case in own if case.truth.culprits]
        parts = (_kinds(tallied([c for c in own if c.seen is seen], MOEDIAG))
                 for seen in (True, False))  # fmt: skip
        theirs = tallied(own, FRTRACE)
        named = [case.answers[FRTRACE].everybody for case in failing]
        wanted = [set(case.truth.culprits) for case in failing]
        every = sum(one >= want for one, want in zip(named, wanted, strict=True))
        exact = sum(one == want for one, want in zip(named, wanted, strict=True))
        rows.append((
            name, str(len(own)), *parts, *(f"{n} of {len(failing)}" for n in (every, exact)),
            f"{theirs.alarms} of {theirs.healthy}" if theirs.healthy else "",
        ))  # fmt: skip
    return rows


def by_fault(cases: Sequence[Judged], dimensions: Sequence[str]) -> list[Row]:
    """Returns the results on each kind of fault, moediag's in each of ``dimensions``."""
    chosen = [case for case in cases if case.dimension in dimensions]
    rows: list[Row] = [
        ("fault", *dimensions, "torchfrtrace, all of them", "the rank is in any of its findings")
    ]
    for kind in dict.fromkeys(case.kind for case in chosen):
        own = [case for case in chosen if case.kind == kind]
        cells = (_kinds(tallied([c for c in own if c.dimension == name], MOEDIAG))
                 for name in dimensions)  # fmt: skip
        failing = [case for case in own if case.truth.culprits]
        among = sum(map(named_among, failing))
        theirs = _kinds(tallied(own, FRTRACE))
        rows.append((kind, *cells, theirs, f"{among} of {len(failing)}" if failing else ""))
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


def victims_section(cases: Sequence[Judged], head: str) -> str:
    """``head`` has date, versions and command."""
    return "\n".join(
        ["## Victims: real jobs under torchrun on gloo\n", head,
         _table(summary({"victims": cases})), _table(of_victims(cases)), _VICTIMS,
         _not_right(cases)]
    )  # fmt: skip


def simulated_section(
    cases: Sequence[Judged], head: str, seeds: range, dimensions: Sequence[str]
) -> str:
    """``dimensions``: those that have every fault."""
    return "\n".join(
        ["## Simulated jobs: Flight Recorder dumps of known fault\n", head,
         _table(summary(by_layout(cases))),
         _SIMULATED.format(first=seeds.start, last=seeds.stop - 1), _table(by_dimension(cases)),
         "### By fault\n", _table(by_fault(cases, dimensions))]
    )  # fmt: skip


def _not_right(cases: Sequence[Judged]) -> str:
    """Lists the cases that moediag does not answer strictly right. Of simulated cases only counts
    are published: who tunes on a case that is kept for counting has none left to count."""
    wrong = [
        f"- {case.truth.name}: {_cell(case, MOEDIAG)}"
        for case in cases
        if case.outcome(MOEDIAG) not in GOOD
    ]
    return "\n".join(["Where moediag is not strictly right:\n", *(wrong or ["- nowhere here"]), ""])


def _table(rows: Sequence[Row]) -> str:
    head, *body = ([cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)
    lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *body)]
    return "\n".join(lines) + "\n"


INTRODUCTION = """\
# How often the diagnosis is right

A **strict true positive** names the class of the failure, exactly the ranks at
fault, and one of the lines of the user's program that show it. An answer with one rank too many,
or with a line of the library, does not count. If the evidence cannot show which rank is at fault
(`truth`: nobody), naming a rank is wrong. A **false alarm** is any failure reported for a healthy
or slow job.

torch's own tools need not name the class, only ranks and line. torchfrtrace's answer is the first
finding that it prints, where no more is said. It assumes that one rank is correct and blames the
ranks that differ from it; the order of files in the folder decides which one. DETAIL's answer is
the rank that most errors compare with their own, or the rank that did not reach the monitored
barrier. If the errors name no rank, torchrun's "first observed failure" counts, unless that rank
only stopped waiting.
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
Megatron-like schedules over pipeline, data, tensor and expert groups, 16 to 1,024 ranks, as torch
2.13 records them on NCCL (`bench/jobs/`). Each row changes one thing of the dumps; `none` are
healthy jobs that ended, `running` healthy jobs dumped while they ran, `straggler` healthy jobs in
which one rank has not yet issued what others wait for. Both tools read the same files.

- What is true is the injected fault alone. "Nobody named, rightly": the evidence cannot show who it
  is (two ranks are absent, one of them the culprit; files of several jobs; a device that hangs:
  all ranks issued its call, as in a job that runs), so naming nobody is right. Naming an innocent
  rank is wrong in every row.
- Dumps are written at once if the job runs, by the watchdog when the oldest call has timed out if
  it hangs. Calls do not tell when they were dumped. A job that hangs and one that still runs, but
  whose ranks all wait for a late one, leave the same calls: only "dated files" (`--taken-at`) and
  "dumped twice" tell them apart. moediag reports both as a hang and says that the job may have been
  running.
- torchfrtrace: all its findings count, not only the first; "and nobody else" means that its
  findings together name exactly the culprits.
- NVIDIA's resiliency extension: its newest release on the package index (0.4.1) contains no
  analyser of Flight Recorder dumps, so it is not compared.

Rules were tuned on seeds below 2,000 of seven layouts (`python -m bench.labelled`, unit tests). The
tables have seeds {first} to {last}, and six more layouts that were never used in tuning. The
schedules come from one simulator, ours: results may be worse for jobs with patterns that it does
not have.
"""
