"""``python -m bench.abroad.silent_runs``: runs the faults of a round of silent errors under
`moediag watch --laws`, two ranks each. Answers are kept in --work; --first shows those measured
with any sources of moediag and measures nothing again, --page FILE writes their table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from bench.abroad import running
from bench.abroad.__main__ import ROOT, absent, kept, version
from bench.abroad.cases import Case, Truth
from bench.abroad.edits import AnchorError, Line
from bench.abroad.eighth_silent_a_programs import EIGHTH_SILENT_A_PROGRAMS
from bench.abroad.eighth_silent_a_round import EIGHTH_A_HEALTHY, EIGHTH_SILENT_A_ROUND
from bench.abroad.eighth_silent_b_programs import EIGHTH_SILENT_B_PROGRAMS
from bench.abroad.eighth_silent_b_round import EIGHTH_HEALTHY_B, EIGHTH_SILENT_ROUND_B
from bench.abroad.eighth_silent_c_programs import EIGHTH_SILENT_C_PROGRAMS
from bench.abroad.eighth_silent_c_round import EIGHTH_C_HEALTHY, EIGHTH_SILENT_C_ROUND
from bench.abroad.fifth_silent_programs import FIFTH_SILENT_PROGRAMS
from bench.abroad.fifth_silent_round import FIFTH_HEALTHY, FIFTH_SILENT_ROUND
from bench.abroad.fourth_silent_programs import FOURTH_SILENT_PROGRAMS
from bench.abroad.fourth_silent_round import FOURTH_HEALTHY, FOURTH_SILENT_ROUND
from bench.abroad.later_programs import LATER_PROGRAMS
from bench.abroad.ninth_silent_a_programs import NINTH_SILENT_A_PROGRAMS
from bench.abroad.ninth_silent_a_round import NINTH_A_HEALTHY, NINTH_SILENT_A_ROUND
from bench.abroad.ninth_silent_b_programs import NINTH_SILENT_B_PROGRAMS
from bench.abroad.ninth_silent_b_round import NINTH_B_HEALTHY, NINTH_SILENT_B_ROUND
from bench.abroad.ninth_silent_c_programs import NINTH_SILENT_C_PROGRAMS
from bench.abroad.ninth_silent_c_round import NINTH_C_HEALTHY, NINTH_SILENT_C_ROUND
from bench.abroad.programs import PROGRAMS, Program
from bench.abroad.running import Answer
from bench.abroad.second_silent_round import HEALTHY, SECOND_SILENT_ROUND
from bench.abroad.seventh_silent_programs import SEVENTH_SILENT_PROGRAMS
from bench.abroad.seventh_silent_round import SEVENTH_HEALTHY, SEVENTH_SILENT_ROUND
from bench.abroad.silent_programs import SILENT_PROGRAMS
from bench.abroad.silent_round import (
    BROKEN,
    NOTE,
    NOTHING,
    REFERENCE,
    SILENT_ROUND,
    SUSPICIOUS,
    Silent,
)  # fmt: skip
from bench.abroad.sixth_silent_a_programs import SIXTH_SILENT_A_PROGRAMS
from bench.abroad.sixth_silent_a_round import SIXTH_A_HEALTHY, SIXTH_SILENT_A_ROUND
from bench.abroad.sixth_silent_b_programs import SIXTH_SILENT_B_PROGRAMS
from bench.abroad.sixth_silent_b_round import SIXTH_HEALTHY_B, SIXTH_SILENT_ROUND_B
from bench.abroad.third_silent_programs import THIRD_SILENT_PROGRAMS
from bench.abroad.third_silent_round import THIRD_HEALTHY, THIRD_SILENT_ROUND

ROUNDS = {
    "first": SILENT_ROUND,
    "second": (*SECOND_SILENT_ROUND, *HEALTHY),
    "third": (*THIRD_SILENT_ROUND, *THIRD_HEALTHY),
    "fourth": (*FOURTH_SILENT_ROUND, *FOURTH_HEALTHY),
    "fifth": (*FIFTH_SILENT_ROUND, *FIFTH_HEALTHY),
    "sixth": (
        *SIXTH_SILENT_A_ROUND, *SIXTH_A_HEALTHY, *SIXTH_SILENT_ROUND_B, *SIXTH_HEALTHY_B,
    ),
    "seventh": (*SEVENTH_SILENT_ROUND, *SEVENTH_HEALTHY),
    "eighth": (
        *EIGHTH_SILENT_ROUND_B, *EIGHTH_HEALTHY_B,
        *EIGHTH_SILENT_C_ROUND, *EIGHTH_C_HEALTHY,
        *EIGHTH_SILENT_A_ROUND, *EIGHTH_A_HEALTHY,
    ),
    "ninth": (
        *NINTH_SILENT_A_ROUND, *NINTH_A_HEALTHY,
        *NINTH_SILENT_B_ROUND, *NINTH_B_HEALTHY,
        *NINTH_SILENT_C_ROUND, *NINTH_C_HEALTHY,
    ),
}  # fmt: skip
EVERY_PROGRAM = (
    *PROGRAMS, *LATER_PROGRAMS, *SILENT_PROGRAMS, *THIRD_SILENT_PROGRAMS, *FOURTH_SILENT_PROGRAMS,
    *FIFTH_SILENT_PROGRAMS, *SIXTH_SILENT_A_PROGRAMS, *SIXTH_SILENT_B_PROGRAMS,
    *SEVENTH_SILENT_PROGRAMS,
    *EIGHTH_SILENT_B_PROGRAMS,
    *EIGHTH_SILENT_C_PROGRAMS,
    *EIGHTH_SILENT_A_PROGRAMS,
    *NINTH_SILENT_A_PROGRAMS,
    *NINTH_SILENT_B_PROGRAMS,
    *NINTH_SILENT_C_PROGRAMS,
)  # fmt: skip
LEVELS = (NOTHING, NOTE, REFERENCE, SUSPICIOUS, BROKEN)
ALARMS = (SUSPICIOUS, BROKEN)
ORDINARY = ("slow:", "rank ", "memory")  # notes that are not of a law


@dataclass(frozen=True)
class Found:
    """``level``: the highest one on the page. ``named``: the page has the parameter or line."""

    silent: Silent
    answer: Answer
    level: str
    named: bool

    @property
    def decided(self) -> bool:
        """Whether the level is at least the one that a law can give."""
        known = self.level in LEVELS
        return known and LEVELS.index(self.level) >= LEVELS.index(self.silent.level)

    @property
    def wrong(self) -> bool:
        """Whether the page names a rank that is not at fault."""
        return not set(self.answer.ranks) <= {self.silent.rank}


def measured(silent: Silent, program: Program, options: argparse.Namespace, ours: str) -> Found:
    folder = options.work / silent.name.replace("/", "--").replace(" ", "-")
    path = folder.with_suffix(".json")
    answer = kept(path, "" if options.first else ours)
    if answer is None and not options.first:
        truth = Truth(("silent",), (silent.rank,), tuple(_lines(silent)))
        case = Case(silent.program, silent.fault, truth, silent.edits, laws=True)
        # What one run does not show is found by the command that its page prints.
        ways = (("watch", "--laws"), ("verify",))[: 1 + (silent.level == REFERENCE)]
        try:
            for way in ways:
                answer = running.watched(
                    case, program, options.python, running.emptied(folder), options.checkouts,
                    ours, way[1:], verb=way[0],
                )  # fmt: skip
                if answer.verdict != "clean":
                    break
        except AnchorError as error:
            answer = Answer(case.name, ours, refused=f"another version of the program: {error}")
        answer = replace(answer, page=answer.page + _notes(folder / "run" / "result.json"))
        path.write_text(json.dumps(asdict(answer), indent=1))
    return judged(silent, answer or Answer(silent.name, ours, refused="not run"))


def _notes(result: Path) -> str:
    """What is suspicious in a run, and its notes: the page of a healthy job is on another stream,
    and leaves notes out."""
    try:
        trial = json.loads(result.read_text())["trials"][-1]
    except (OSError, ValueError, LookupError):
        return ""
    rows = [("SUSPECT ", one) for one in trial.get("suspicious", ())]
    rows += [("NOTE    ", one) for one in trial["notes"]]
    return "".join(f"\n {word} {text}" for word, text in rows)


def _lines(silent: Silent) -> Sequence[Line]:
    return [one for one in silent.named if isinstance(one, Line)]


def judged(silent: Silent, answer: Answer) -> Found:
    """Reads the level and the names from the page."""
    page = " ".join(answer.page.split())
    if answer.refused or answer.verdict in ("", "crash", "hang", "inconclusive"):
        return Found(silent, answer, answer.refused or answer.verdict or "no page", named=False)
    rows = answer.page.splitlines()
    notes = [row.split(None, 1)[1] for row in rows if row.startswith(" NOTE ")]
    level = NOTHING
    if answer.verdict != "clean":
        level = BROKEN
    elif any(row.startswith(" SUSPECT ") for row in rows):
        level = SUSPICIOUS
    elif any(not note.startswith(ORDINARY) for note in notes):
        level = NOTE
    words = [one for one in silent.named if isinstance(one, str)]
    # The page has the command, too, which may have one of these words.
    told = [answer.cause, *(row for row in rows if row.startswith((" SUSPECT ", " NOTE ")))]
    named = any(word in " ".join(told) for word in words)
    named = named or any(place in page for place in answer.places)
    return Found(silent, answer, level, named)


def table(found: Sequence[Found]) -> str:
    rows = ["| program | fault | a law can say | it said | place named |", "| --- " * 5 + "|"]
    for one in found:
        shown = one.silent.level in (REFERENCE, *ALARMS)
        place = ("yes" if one.named else "**no**") if shown else ""
        said = one.level if one.decided else f"**{one.level}**"
        said += ", WRONG RANK" if one.wrong else ""
        silent = one.silent
        rows.append(f"| {silent.program} | {silent.fault} | {silent.level} | {said} | {place} |")
    return "\n".join(rows)


def summary(found: Sequence[Found]) -> str:
    """Returns the figures, of the faults that one run can show and of the others."""
    healthy = [one for one in found if one.silent.fault == "healthy"]
    found = [one for one in found if one not in healthy]
    shown = [one for one in found if one.silent.level in (REFERENCE, *ALARMS)]
    others = [one for one in found if one not in shown]
    counts = {
        "found": sum(one.level in ALARMS for one in shown),
        "decided": sum(one.decided for one in shown),
        "named": sum(one.named and one.level in ALARMS for one in shown),
    }
    of = {name: f"{n} ({100 * n / max(1, len(shown)):.0f} %)" for name, n in counts.items()}
    return (
        f"{len(found)} faults over {len({one.silent.program for one in found})} programs. Of the "
        f"{len(shown)} that can be shown, {of['found']} are found, {of['decided']} at the level "
        f"that was written down or above it, and {of['named']} with the parameter, the cause or "
        f"the line; {sum(one.wrong for one in found)} name a wrong rank. Of the {len(others)} "
        f"others, {sum(one.level in ALARMS for one in others)} are called more than "
        f"a note. {sum(one.level in ALARMS for one in healthy)} alarms on {len(healthy)} programs "
        "without a fault."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--round", choices=ROUNDS, default="second")
    parser.add_argument("--only", action="append", metavar="NAME")
    parser.add_argument("--checkouts", type=Path, metavar="DIR")
    parser.add_argument("--python", default="python", metavar="FILE")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "moediag-runs" / "silent", metavar="DIR"
    )
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--page", type=Path, metavar="FILE")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    programs = {one.name: replace(one, ranks=2) for one in EVERY_PROGRAM}
    ours, found, told = version(), list[Found](), Console(soft_wrap=True)
    for silent in ROUNDS[options.round]:
        if options.only and not any(word in silent.name for word in options.only):
            continue
        program = programs[silent.program]
        if why := absent(program, options):
            told.print(f"{silent.name}: not run: {why}")
            continue
        one = measured(silent, program, options, ours)
        found.append(one)
        told.print(f"{silent.name}: {silent.level}: said {one.level}, named {one.named}")
    told.print(summary(found))
    if options.page:
        options.page.write_text(f"{summary(found)}\n\n{table(found)}\n", "utf-8")


if __name__ == "__main__":
    main()
