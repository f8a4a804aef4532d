"""The benchmark on other people's programs: its table, its edits and its scores."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import sections
from bench.abroad import edits, page, running, silent_runs
from bench.abroad.cases import CLEAN, Case, Truth
from bench.abroad.edits import AnchorError, Edit, Line
from bench.abroad.eighth_round import EIGHTH_ROUND
from bench.abroad.eleventh_round import ELEVENTH_ROUND
from bench.abroad.first_round import FIRST_ROUND
from bench.abroad.fourth_round import FOURTH_ROUND
from bench.abroad.held_out import HELD_OUT
from bench.abroad.ninth_round import NINTH_ROUND
from bench.abroad.running import Answer
from bench.abroad.scoring import Outcome, Said, outcome, points, tally
from bench.abroad.second_round import SECOND_ROUND
from bench.abroad.seventh_round import SEVENTH_ROUND
from bench.abroad.silent_round import Silent
from bench.abroad.sixth_round import SIXTH_ROUND
from bench.abroad.table import CASES, EVERY_PROGRAM
from bench.abroad.tenth_a_round import TENTH_A_ROUND
from bench.abroad.tenth_b_round import TENTH_B_ROUND
from bench.abroad.third_round import THIRD_ROUND
from bench.abroad.thirteenth_round import THIRTEENTH_ROUND
from bench.abroad.twelfth_a_round import TWELFTH_A_ROUND
from bench.abroad.twelfth_b_round import TWELFTH_B_ROUND
from moediag.result import Verdict

PROGRAM = "import time\n\nfor step in range(3):\n    print(step)\n"
HANG = Truth(("hang",), (1,))
RIGHT = Said("hang", (1,), "rank 1 at train.py:42, under train.py:40", alarm=True)


# ------------------------------------------------------------------------ the table


def test_every_case_has_a_program_and_a_name_of_its_own() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert {case.program for case in CASES} == {program.name for program in EVERY_PROGRAM}
    assert len({program.script for program in EVERY_PROGRAM}) >= 12
    assert sum(not case.truth.healthy for case in CASES) >= 25


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_truth_of_a_case_is_possible(case: Case) -> None:
    (program,) = [one for one in EVERY_PROGRAM if one.name == case.program]
    assert set(case.truth.verdicts) <= set(Verdict)
    assert all(rank < program.ranks for rank in case.truth.ranks)
    assert case.truth.healthy or case.truth.ranks or case.truth.says
    assert "healthy" in case.fault if case.truth.healthy else case.truth != CLEAN
    if case.signal:
        _, rank, _ = case.signal.split(":")
        assert case.truth.ranks == (int(rank),)


def test_at_least_a_quarter_of_the_faults_was_written_before_a_page_of_it_was_seen() -> None:
    faults = [case for case in CASES if not case.truth.healthy and not case.laws]
    rounds = (
        FIRST_ROUND, SECOND_ROUND, THIRD_ROUND, FOURTH_ROUND, SIXTH_ROUND, SEVENTH_ROUND,
        EIGHTH_ROUND, NINTH_ROUND, TENTH_A_ROUND, TENTH_B_ROUND,
        ELEVENTH_ROUND, TWELFTH_A_ROUND, TWELFTH_B_ROUND,
        THIRTEENTH_ROUND, HELD_OUT,
    )  # fmt: skip
    unseen = {case.name for one in rounds for case in one}
    assert 4 * sum(case.name in unseen for case in faults) >= len(faults)


@pytest.mark.parametrize("case", [one for one in CASES if one.program == "megatron"])
def test_a_case_of_our_own_script_can_be_made(case: Case, tmp_path: Path) -> None:
    (program,) = [one for one in EVERY_PROGRAM if one.name == case.program]
    places = running.place(case, program, tmp_path / "program", None)
    ast.parse((tmp_path / "program" / program.script).read_text())
    assert len(places) == len(case.truth.lines)


# ------------------------------------------------------------------------ faults


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


def test_an_edit_keeps_the_indentation_and_the_line(program: Path) -> None:
    edits.apply([Edit(Line("train.py", "print("), "if step == 1:\n    continue\n{line}")], program)
    rows = (program / "train.py").read_text().splitlines()
    assert rows[3:] == ["    if step == 1:", "        continue", "    print(step)"]
    assert Line("train.py", "continue").place(program) == "train.py:5"


def test_the_edited_program_fails_and_the_other_does_not(program: Path) -> None:
    def run() -> int:
        return subprocess.run([sys.executable, program / "train.py"], check=False).returncode

    assert run() == 0
    edits.apply([Edit(Line("train.py", "print("), "raise SystemExit(7)")], program)
    assert run() == 7


def test_another_version_of_a_program_is_an_error(program: Path) -> None:
    with pytest.raises(AnchorError, match="0 lines contain 'optimizer'"):
        edits.apply([Edit(Line("train.py", "optimizer"), "")], program)


STEPS = """
import sys, time, types
module = types.ModuleType("torch")
module.__path__ = [sys.argv[1]]
sys.modules["torch"] = module
sys.modules["torch.optim"] = package = types.ModuleType("torch.optim")
package.__path__ = [sys.argv[1]]
import torch.optim.optimizer as optimizer
for step in range(int(sys.argv[2])):
    optimizer.hook()
time.sleep(20 * (int(sys.argv[2]) == 2))
"""


@pytest.mark.parametrize(("steps", "code"), [(1, 0), (2, -9)])
def test_the_signal_comes_after_its_step(tmp_path: Path, steps: int, code: int) -> None:
    """With a stand-in for torch.optim.optimizer; the program itself knows nothing of it."""
    (tmp_path / "optimizer.py").write_text(
        "def register_optimizer_step_post_hook(call):\n    global hook\n    hook = call\n"
    )
    env = dict(os.environ, PYTHONPATH=str(running.INSIDE), RANK="1", ABROAD_STEPS=str(tmp_path))
    env["ABROAD_SIGNAL"] = "KILL:1:2"
    line = [sys.executable, "-c", STEPS, str(tmp_path), str(steps)]
    assert subprocess.run(line, env=env, check=False).returncode == code
    assert (tmp_path / "rank-1").exists()


# ------------------------------------------------------------------------ scores


@pytest.mark.parametrize(
    ("said", "kind", "score"),
    [
        (RIGHT, Outcome.RIGHT, 1),
        (replace(RIGHT, ranks=(0,)), Outcome.WRONG, -1),
        (replace(RIGHT, ranks=(0, 1)), Outcome.WRONG, -1),
        (replace(RIGHT, ranks=()), Outcome.NOBODY, 0),
        (replace(RIGHT, verdict="crash"), Outcome.CLASS, 1),
        (replace(RIGHT, text="train.py:420"), Outcome.LINE, 1),
        (replace(RIGHT, alarm=False, verdict="clean", ranks=()), Outcome.MISSING, 0),
        (None, Outcome.MISSING, 0),
    ],
)
def test_a_wrong_rank_costs_a_point(said: Said | None, kind: Outcome, score: int) -> None:
    found = outcome(HANG, ("train.py:42",), said)
    assert (found, points(HANG, said)) == (kind, score)


def test_naming_nobody_is_right_where_nothing_tells_which_side_is_wrong() -> None:
    either, nobody = replace(HANG, known=False), replace(RIGHT, ranks=())
    assert outcome(either, (), nobody) is Outcome.OPEN and points(either, nobody) == 0
    assert outcome(either, (), RIGHT) is Outcome.RIGHT and points(either, RIGHT) == 1
    assert outcome(either, (), replace(RIGHT, ranks=(0,))) is Outcome.WRONG


def test_the_page_must_contain_the_fact_of_the_case() -> None:
    alone = Truth(("inconclusive",), says="process group")
    said = Said("inconclusive", (), "no rank joined a process group", alarm=True)
    assert outcome(alone, (), said) is Outcome.RIGHT
    assert outcome(alone, (), replace(said, text="nothing")) is Outcome.WORDS


def test_a_healthy_program_must_end_without_an_alarm() -> None:
    assert outcome(CLEAN, (), replace(RIGHT, alarm=False)) is Outcome.QUIET
    assert outcome(CLEAN, (), RIGHT) is Outcome.ALARM
    assert outcome(CLEAN, (), None) is Outcome.UNFINISHED


def test_points_of_faults_and_of_healthy_programs_are_apart() -> None:
    cases = [(HANG, Outcome.RIGHT, 1), (HANG, Outcome.WRONG, -1), (HANG, Outcome.LINE, 1),
             (CLEAN, Outcome.ALARM, 0)]  # fmt: skip
    found = tally(cases)
    assert (found.faults, found.healthy, found.points) == (3, 1, 1)
    assert found.kinds[Outcome.ALARM] == 1


# ------------------------------------------------------------------------ the page


def judged(held_out: bool = False) -> page.Judged:
    case = Case("nanogpt", "a fault", HANG, held_out=held_out)
    return page.Judged(case, Answer(case.name, "0", "hang", (0,), "rank 0", code=1, seconds=4.0))


def test_the_section_counts_held_out_cases_apart() -> None:
    text = page.markdown([judged(), judged(held_out=True)], "", attached=False)
    assert "| seen while tuning | 1 | -1 |" in text and "| held out | 1 | -1 |" in text
    assert "WRONG RANK: hang, rank 0" in text
    assert "moediag watch" in text and "moediag attach" not in text
    assert "moediag attach PID" in page.markdown([judged()], "", attached=True)


def test_the_section_is_replaced_and_the_rest_of_the_report_kept() -> None:
    old = f"# Report\n\nintro\n\n{page.TITLE}\n\nold\n\n## Last\n\nend\n"
    new = sections.replaced(old, page.markdown([judged()], "", attached=False))
    assert new.startswith("# Report\n\nintro\n\n## ") and new.endswith("\n\n## Last\n\nend\n")
    assert "old" not in new and sections.replaced(new, "# Other\n").startswith("# Other\n\n## ")
    assert sections.replaced("", "## A\n\na\n") == "## A\n\na\n"


def test_the_last_page_of_the_output_is_the_answer() -> None:
    said = "loss 1\n train.py · watched · 1\n a\nloss 2\n train.py · watched · 2\n b\n"
    assert page_text(said) == [" train.py · watched · 2", " b"]


def page_text(said: str) -> list[str]:
    return running.page_of(said).splitlines()


# ------------------------------------------------------------------------ silent faults


def test_every_silent_fault_has_a_program_and_a_place_if_one_run_shows_it() -> None:
    for faults in silent_runs.ROUNDS.values():
        names = [silent.name for silent in faults]
        assert len(set(names)) == len(names)
        programs = {program.name for program in silent_runs.EVERY_PROGRAM}
        assert {silent.program for silent in faults} <= programs
        assert all(silent.named for silent in faults if silent.level in silent_runs.ALARMS)
        assert {silent.level for silent in faults} <= set(silent_runs.LEVELS)
    every = {silent.level for faults in silent_runs.ROUNDS.values() for silent in faults}
    assert every == set(silent_runs.LEVELS)


@pytest.mark.parametrize(
    ("verdict", "page", "level"),
    [
        ("replica-divergence", " CAUSE    fc.weight differs", "broken"),
        ("clean", " SUSPECT  fc.weight differs", "suspicious"),
        ("clean", " NOTE     fc.weight had no gradient", "note"),
        ("clean", " NOTE     slow: rank 1 waited\n WITH train.py --x=fc.weight", "nothing"),
        ("crash", " CAUSE    rank 0 raised, in fc.weight", "crash"),
    ],
)
def test_the_level_of_a_page(verdict: str, page: str, level: str) -> None:
    silent = Silent("ddp-tutorial", "a fault", "suspicious", ("fc.weight",), ())
    found = silent_runs.judged(silent, Answer("a", "1", verdict, (), page[:30], page))
    assert (found.level, found.named) == (level, level not in ("crash", "nothing"))
    assert found.decided == (level in silent_runs.ALARMS)
