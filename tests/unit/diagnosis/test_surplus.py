"""Calls that met calls from another place: the first of them is shown, not the last call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence.model import Condition, Evidence
from moediag.result import Diagnosis
from tests.unit.evidence_builder import Job, Op

# What a rank makes in a step: t in training, e in evaluation on the same line, o elsewhere, x of
# another size after that.
LINES = {
    "t": "train.py:50 main", "e": "train.py:60 main", "o": "train.py:70 main",
    "x": "train.py:80 main",
}  # fmt: skip
UNDER = Condition("train.py", 59, "if rank == 0", "under", True, "", frozenset({1, 2}), 0)


def job(*programs: str, steps: str | None = None) -> Evidence:
    """A watched job whose ranks make these calls, all of one size, in a library's line. Each t ends
    a training step, or each t of ``steps``."""
    members = tuple(range(len(programs)))
    made = [
        [
            Op(
                "0",
                numel=16 if letter == "x" else 8,
                step=1 + (calls if steps is None else steps)[:at].count("t"),
            )
            for at, letter in enumerate(calls)
        ]
        for calls in programs
    ]
    ran = Job({"0": (members, "tp")}, made).run()
    ranks = {}
    for rank, seen in ran.ranks.items():
        calls = tuple(
            replace(call, site="mappings.py:31 reduce", callers=(LINES[programs[rank][at]],))
            for at, call in enumerate(seen.collectives)
        )
        known = dict.fromkeys(LINES.values(), ()) | {LINES["e"]: (UNDER,)}
        ranks[rank] = replace(
            seen, collectives=calls, user_files=frozenset({"train.py"}), conditions=known
        )
    return replace(ran, ranks=ranks, watched=True)


def of(found: Diagnosis) -> Mapping[Sequence[int], str]:
    return {place.ranks: place.line for place in found.places}


def test_the_evaluation_of_one_rank_is_shown_and_named_by_its_condition() -> None:
    found = diagnose(job("tttetttettt", "tttttttttt"))
    assert (found.verdict, found.culprits, found.victims) == ("hang", (0,), (1,))
    assert of(found)[(0,)] == LINES["e"]
    assert "which rank 1 did not call. It met another call of equal size" in found.cause
    assert "under `if rank == 0` at train.py:59" in found.cause
    assert "train.py:60" in found.next_step and "train.py:59" in found.next_step


def test_one_of_three_is_the_minority() -> None:
    found = diagnose(job("tttetttt", "ttttttt", "ttttttt"))
    assert (found.culprits, found.confidence) == ((0,), "high")
    found = diagnose(job("tttetttt", "tttetttt", "ttttttt"))
    assert found.culprits == (2,)


def test_the_next_place_of_the_others_does_not_hide_it() -> None:
    """Rank 0's barrier after its save met the barrier of all; then the others call something else
    at a place to which rank 0 never comes."""
    found = diagnose(job("tttteo", "ttttox", "ttttox"))
    assert found.culprits == (0,)
    assert of(found)[(0,)] == LINES["e"] and "train.py:60" in found.next_step
    assert of(diagnose(job("tttto", "ttttx", "ttttx")))[(0,)] == LINES["o"]


@pytest.mark.parametrize(
    "programs",
    [
        ("tttotttt", "tttetttt"),  # two branches whose calls meet
        ("tttotttto", "tttetttt"),
        ("ttttoot", "tttott"),  # both came there
        ("et", "t"),  # too few calls
    ],
)
def test_places_that_explain_nothing_are_not_blamed(programs: tuple[str, str]) -> None:
    assert "another call of equal size" not in diagnose(job(*programs)).cause


def test_calls_that_are_in_step_are_meant_to_meet() -> None:
    """In each step, rank 0's call from its own line meets a call from the line of both."""
    found = diagnose(job("teteteet", "ttttttt", steps="otototoo"))
    assert "another call of equal size" not in found.cause
    for steps, said in (("", False), (None, True)):
        found = diagnose(job("ttett", "tttt", steps=steps))
        assert ("another call of equal size" in found.cause) == said


class TestABranchOfOneRank:
    """Rank 0's extra calls do part of the work of its next ones, as FSDP2 keeps what it gathered:
    without them its calls are not those of rank 1 either."""

    PROGRAMS = ("otototeetot", "ototototot")

    def test_its_first_call_is_shown_and_the_rank_named(self) -> None:
        found = diagnose(job(*self.PROGRAMS))
        assert (found.culprits, found.victims, found.confidence) == ((0,), (1,), "medium")
        assert "under `if rank == 0` at train.py:59" in found.cause
        assert of(found)[(0,)] == LINES["e"]

    def test_without_the_branch_nothing_shows_whose_calls_are_wrong(self) -> None:
        found = diagnose(with_conditions(job(*self.PROGRAMS), e=()))
        assert (found.culprits, "another call of equal size" in found.cause) == ((), False)

    def test_branches_of_both_may_have_calls_that_meet(self) -> None:
        other = replace(UNDER, line=69, text="if rank != 0", keeps_out=frozenset({0}))
        found = diagnose(with_conditions(job(*self.PROGRAMS), o=(other,)))
        assert (found.culprits, "another call of equal size" in found.cause) == ((), False)

    def test_ranks_that_are_in_step_again_were_meant_to_meet(self) -> None:
        found = diagnose(job("otototetott", "ototototot"))
        assert "another call of equal size" not in found.cause


class TestABranchWhoseCallsMetOthersBefore:
    """DDP's broadcast of buffers in an evaluation of rank 0 stood in for that of its next step."""

    def test_calls_that_met_by_chance_do_not_excuse_it(self) -> None:
        found = diagnose(job("tttette", "tttttt", steps=""))
        assert (found.culprits, found.confidence) == ((0,), "medium")
        assert "under `if rank == 0` at train.py:59" in found.cause

    def test_counterparts_of_another_branch_do(self) -> None:
        assert diagnose(job("tttette", "tttott", steps="")).culprits == ()

    def test_so_do_calls_that_met_one_from_an_unknown_place(self) -> None:
        evidence = job("tttette", "tttttt", steps="")
        calls = tuple(replace(c, site="", callers=()) for c in evidence.ranks[1].collectives)
        ranks = {**evidence.ranks, 1: replace(evidence.ranks[1], collectives=calls)}
        assert diagnose(replace(evidence, ranks=ranks)).culprits == ()

    def test_a_rank_that_made_fewer_calls_is_no_error(self) -> None:
        evidence = job("tttetto", "tttttt", steps="")
        short = replace(evidence.ranks[1], collectives=evidence.ranks[1].collectives[:3])
        ranks = {**evidence.ranks, 1: short}
        assert diagnose(replace(evidence, ranks=ranks)).verdict == "hang"


def with_conditions(evidence: Evidence, **of_line: tuple[Condition, ...]) -> Evidence:
    more = {LINES[name]: conditions for name, conditions in of_line.items()}
    ranks = {
        rank: replace(seen, conditions={**seen.conditions, **more})
        for rank, seen in evidence.ranks.items()
    }
    return replace(evidence, ranks=ranks)


def test_without_places_the_last_call_is_told() -> None:
    evidence = job("tttetttettt", "tttttttttt")
    calls = tuple(replace(c, site="", callers=()) for c in evidence.ranks[1].collectives)
    ranks = {**evidence.ranks, 1: replace(evidence.ranks[1], collectives=calls)}
    found = diagnose(replace(evidence, ranks=ranks))
    assert found.culprits == () and "another call of equal size" not in found.cause


def test_the_odd_call_itself_is_no_earlier_one() -> None:
    found = diagnose(job("tttte", "tttt"))
    assert "reached the end without that call" in found.cause
    assert found.culprits == (0,)


def test_a_rank_that_was_not_seen_could_make_it_a_tie() -> None:
    """Rank 3 may have made the call of rank 0 as well."""
    whole = job("tttetttt", "ttttttt", "ttttttt", "ttttttt")
    assert diagnose(whole).culprits == (0,)
    partial = replace(whole, ranks={r: seen for r, seen in whole.ranks.items() if r != 3})
    conditions = {LINES[name]: () for name in LINES}  # else rank 0's condition names it
    ranks = {r: replace(seen, conditions=conditions) for r, seen in partial.ranks.items()}
    found = diagnose(replace(partial, ranks=ranks))
    assert "another call of equal size" in found.cause
    assert found.culprits == ()
