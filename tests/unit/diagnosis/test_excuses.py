"""Ranks that others wait for, and that wait for one of these or did as they were told; each beside
one that has no such excuse."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moediag.diagnosis.blame.culprits import Blame
from moediag.diagnosis.blame.excuses import excuse
from moediag.diagnosis.blame.fork_search import Decision
from moediag.diagnosis.blame.forks import Fork
from moediag.diagnosis.facts import Facts
from moediag.evidence.model import Frame
from moediag.evidence.program_source import Program
from tests.unit.diagnosis.test_places import TORCH, at, away, found, mismatch

LOCK = """\
def f():
    with FileLock(path):
        dist.barrier()
    dist.barrier()
    first = {waits}
"""
TORCH_FILE = Frame("/env/lib/python3.12/site-packages/torch/utils/_contextlib.py", 120, "inner")
SLEEP = Frame("/env/lib/python3.12/site-packages/filelock/_api.py", 9, "acquire")


@pytest.mark.parametrize(
    ("waits", "lines", "named"),
    [
        ("x", (3, 2), ()),  # rank 0 is in the barrier and has the lock that rank 1 waits for
        ("x", (4, 2), (1,)),  # another process has it
        ("self.store.get('ready')", (4, 5), ()),
        ("self.store.wait(['ready'])", (4, 5), ()),
        ("feature_store.get('ready')", (4, 5), (1,)),  # of another library, which sleeps
        ("results.get()", (4, 5), (1,)),
        ("open(pipe)", (4, 5), (1,)),
    ],
)
def test_a_rank_that_waits_for_one_that_waits_for_it(
    waits: str, lines: tuple[int, int], named: tuple[int, ...]
) -> None:
    evidence = replace(away(), sources={"/me/train.py": LOCK.format(waits=waits)})
    inner = TORCH_FILE if "self.store" in waits else SLEEP
    one = found(evidence, {0: at(lines[0]), 1: at(lines[1], inner=inner)})
    assert (one.verdict, one.culprits) == ("hang", named)
    assert ("It is not known which rank is at fault." in one.cause) == (not named)
    assert f"train.py:{lines[1]}" in one.cause and f"train.py:{lines[1]}" in one.next_step


TOLD = """\
def f(own):
    {call}
    if {test}:
        return
    train()
"""


@pytest.mark.parametrize(
    ("call", "op", "test", "excused"),
    [
        ("dist.recv(command, 0)", "recv", "command.item() == 1", True),
        ("dist.scatter_object_list(command, all)", "scatter", "command[0] == 'stop'", True),
        ("dist.recv(command, 0)", "recv", "own > 3", False),
        ("dist.broadcast(command, 0)", "broadcast", "command.item() == 1", False),  # all got it
    ],
)
def test_a_rank_that_leaves_as_it_was_told(call: str, op: str, test: str, excused: bool) -> None:
    evidence = replace(mismatch(), sources={"/me/train.py": TOLD.format(call=call, test=test)})
    made = replace(evidence.ranks[1].collectives[0], op=op, site="train.py:2 f")
    ranks = {**evidence.ranks, 1: replace(evidence.ranks[1], collectives=(made,))}
    evidence = replace(evidence, ranks=ranks)
    divergence = Facts(mismatch()).divergence
    assert divergence is not None
    ways, none = ("false", "true"), (0, "")
    decision = Decision("train.py", 3, f"if {test}", ways, (none, none))
    fork = Fork((None, None), (decision,), Program({}))  # type: ignore[arg-type]
    told = excuse(Blame((1,), "majority"), divergence, fork, evidence)
    assert bool(told) == excused
    assert not excused or told == f"What rank 1 received by {op} at train.py:2 decided that."
    assert excuse(Blame(), divergence, fork, evidence) == ""


def test_each_of_several_ranks_needs_an_excuse() -> None:
    evidence = replace(away(), sources={"/me/train.py": LOCK.format(waits="x")})
    assert found(evidence, {0: at(3), 1: (TORCH,)}).culprits == (1,)  # its line is not known
