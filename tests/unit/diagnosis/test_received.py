"""Ranks that fail over what other ranks sent them, each beside one that fails by itself."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import replace

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence.model import Evidence, ExitStatus, Frame, Left, RankError
from moediag.result import Diagnosis, Verdict
from tests.unit.evidence_builder import Job, Op, died, fsdp2_job

TIMES = 3  # turns of a loop


def crash(
    source: str, *failed: int, world: int = 3, op: str = "all_gather",
    error: str = "ValueError", after: str = "", errors: Mapping[int, tuple[str, str]] | None = None,
) -> Evidence:  # fmt: skip
    """All ranks called ``op`` in the lines ``C``; ``failed`` then raised at ``X``, all others went
    on to ``N``. ``Xx`` is the line that led to ``X``. ``errors``: other types and marks by rank."""
    text = textwrap.dedent(source).lstrip()
    marks, name = {}, "<module>"
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("def "):
            name = line.partition("def ")[2].partition("(")[0]
        if "  # " in line:
            for mark in line.rpartition("  # ")[2].split():
                marks[mark] = f"train.py:{number} {name}"
    group: dict[str, tuple[tuple[int, ...], str | None]] = {"a": (tuple(range(world)), "world")}
    common = [Op("a", op) for _ in range(TIMES)]
    programs = [[*common, *([] if r in failed else [Op("a")])] for r in range(world)]
    evidence = Job(group, programs).run()
    ranks = {}
    for rank, seen in evidence.ranks.items():
        calls = tuple(
            replace(call, site=marks["C" if call.op == op else "N"]) for call in seen.collectives
        )
        ranks[rank] = replace(seen, collectives=calls)
        if rank not in failed:
            continue
        kind, mark = (errors or {}).get(rank, (error, "X"))
        lines = [marks[m] for m in (mark, "Xx") if m in marks]
        frames = tuple(f for line in lines if (f := Frame.at(line)) is not None)
        told = RankError(kind, "no", lines[0], 5.0, frames, after.format(**marks))
        left = Left("sys.exit(1)", tuple(lines)) if kind == "exit" else None
        ranks[rank] = replace(
            ranks[rank], exit=ExitStatus(code=1), finished=False, left=left,
            error=None if left else told,
        )  # fmt: skip
    sources = {"/me/train.py": text}
    return replace(evidence, ranks=ranks, stall=None, watched=True, sources=sources, one_node=True)


def noticed(found: Diagnosis, line: int = 0) -> bool:
    """Whether nobody is named, because of what ranks received in that line."""
    assert found.verdict == Verdict.CRASH
    told = "It is not known which rank sent it." in found.cause
    assert told == (not found.culprits), found.cause
    assert not told or f"train.py:{line} decided that" in found.cause
    assert not told or f"train.py:{line}" in found.next_step
    return told


CONFIGS = """
def check(mine):
    configs = [None] * world
    dist.all_gather_object(configs, mine)  # C
    for theirs in configs:
        if theirs != {what}:
            raise ValueError  # X
    dist.all_reduce(x)  # N
"""


def test_all_ranks_find_that_configurations_differ() -> None:
    assert noticed(diagnose(crash(CONFIGS.format(what="mine"), 0, 1, 2)), 3)


def test_of_two_ranks_that_compare_neither_is_named() -> None:
    assert noticed(diagnose(crash(CONFIGS.format(what="mine"), 1, world=2)), 3)


def test_one_that_differs_from_what_the_others_accepted_is_named() -> None:
    """All compare with the same; the two that went on agree."""
    assert diagnose(crash(CONFIGS.format(what="mine"), 2)).culprits == (2,)


STOP = """
def step(batch):
    loss = model(batch)
    bad = torch.isnan(loss).float()
    {reduce}
    if bad.item():
        sys.exit(1)  # X
    dist.all_reduce(x)  # N
def other():
    dist.all_reduce(y)  # D
"""


@pytest.mark.parametrize(
    ("reduce", "failed", "culprits"),
    [
        ("dist.all_reduce(bad)  # C", (0, 1, 2), ()),
        # Before the launcher ended the last one.
        ("dist.all_reduce(bad)  # C", (0, 2), ()),
        ("dist.all_reduce(total)  # C", (1,), (1,)),
        ("dist.all_reduce(total)  # C", (0, 2), (0, 2)),
    ],
)
def test_ranks_that_end_over_a_sum(
    reduce: str, failed: tuple[int, ...], culprits: tuple[int, ...]
) -> None:
    found = diagnose(crash(STOP.format(reduce=reduce), *failed, op="all_reduce", error="exit"))
    assert found.culprits == culprits
    assert noticed(found, 4) == (not culprits)


def test_a_value_of_its_own_that_is_summed_later() -> None:
    """The sum of an earlier turn is replaced before the test."""
    source = """
    def train():
        for batch in loader:
            loss = model(batch)
            if not math.isfinite(loss):
                raise ValueError  # X
            dist.all_reduce(loss)  # C
            loss = loss / world
        dist.all_reduce(x)  # N
    """
    assert diagnose(crash(source, 1, world=2, op="all_reduce")).culprits == (1,)


LOOKUP = """
def serve(table, own):
    {receive}  # C
    return table[key]  # X
def others():
    dist.all_reduce(x)  # N
"""


@pytest.mark.parametrize(
    ("receive", "error", "nobody"),
    [
        ("key = comm.recv(source=1)", "KeyError", True),
        ("dist.recv(key, 1)", "IndexError", True),
        ("dist.recv_object_list(table, 1)", "KeyError", True),
        ("key = own; dist.recv(other, 1)", "KeyError", False),
        ("dist.recv(key, 1)", "MemoryError", False),
    ],
)
def test_a_lookup_of_what_was_received(receive: str, error: str, nobody: bool) -> None:
    evidence = crash(LOOKUP.format(receive=receive), 0, error=error)
    calls = tuple(replace(c, op="recv") for c in evidence.ranks[0].collectives)
    ranks = {**evidence.ranks, 0: replace(evidence.ranks[0], collectives=calls)}
    assert noticed(diagnose(replace(evidence, ranks=ranks)), 2) == nobody


GATHERED = """
import torch
def collect(mine):
    if dist.get_rank() == 0:
        every = [None] * world
    dist.gather_object(mine, every)  # C
    if dist.get_rank() == 0:
        merged = {{}}
        for one in every:
            merged.update(one)
        {fails}  # X
    dist.all_reduce(x)  # N
"""


@pytest.mark.parametrize(
    ("fails", "error", "nobody"),
    [
        ("score = merged[name]", "KeyError", True),
        ("score = sum(one['loss'] for one in every)", "KeyError", True),
        ("score = torch.cat(every)", "RuntimeError", True),
        ("assert len(set(every)) == 1", "AssertionError", True),
        ("score = names[best]", "KeyError", False),
        ("torch.save(merged, path)", "OSError", False),
        ("score = model(names)", "OutOfMemoryError", False),
    ],
)
def test_what_the_first_rank_does_with_what_it_gathered(
    fails: str, error: str, nobody: bool
) -> None:
    source = GATHERED.format(fails=fails)
    assert noticed(diagnose(crash(source, 0, op="gather", error=error)), 5) == nobody


def test_helpers_between_the_call_and_the_error_are_followed() -> None:
    source = """
    def mean(values):
        dist.all_reduce(values)  # C
        values /= world
        return {k: v for k, v in zip(names, values)}
    def refuse(why):
        raise ValueError(why)  # X
    def step(loss):
        means = mean(loss)
        total = sum(means.values()).item()
        if not math.isfinite(total):
            refuse("loss")  # Xx
        dist.all_reduce(x)  # N
    """
    evidence = crash(source, 0, 1, op="all_reduce")
    frames = (Frame("train.py", 6, "refuse"), Frame("train.py", 11, "step"))
    ranks = {
        rank: replace(seen, error=seen.error and replace(seen.error, frames=frames))
        for rank, seen in evidence.ranks.items()
    }
    assert noticed(diagnose(replace(evidence, ranks=ranks)), 2)
    own = {"/me/train.py": evidence.sources["/me/train.py"].replace("mean(loss)", "dict(loss)")}
    assert diagnose(replace(evidence, ranks=ranks, sources=own)).culprits == (0, 1)


def test_an_error_that_is_raised_over_a_lookup() -> None:
    source = """
    def serve(table):
        key = recv()  # C
        try:
            return table[{key}]  # L
        except KeyError:
            raise ValueError("unknown")  # X
    def others():
        dist.all_reduce(x)  # N
    """
    for key, nobody in (("key", True), ("'size'", False)):
        evidence = crash(source.format(key=key), 0, op="scatter", after="KeyError: 'x' at {L}")
        assert noticed(diagnose(evidence), 2) == nobody


def test_the_rank_with_an_error_of_its_own_is_named_before_those_that_noticed_it() -> None:
    source = """
    def step(batch):
        try:
            mine = read(batch)  # Y
        except OSError as error:
            mine = error
        dist.all_gather_object(every, mine)  # C
        if any(every):
            raise RuntimeError  # X
        dist.all_reduce(x)  # N
    """
    evidence = crash(source, 0, 1, 2, errors={1: ("OSError", "Y")}, error="RuntimeError")
    found = diagnose(evidence)
    assert found.culprits == (1,)
    assert "OSError" in found.next_step


def test_an_object_that_cannot_be_unpickled_came_from_another_rank() -> None:
    evidence = crash(CONFIGS.format(what="mine"), 1, error="AttributeError")
    place = "train.py:3 check"
    for function, nobody in (("_tensor_to_object", True), ("_object_to_tensor", False)):
        frames = (Frame("/torch/distributed/distributed_c10d.py", 9, function),)
        seen = evidence.ranks[1]
        error = RankError("AttributeError", "no", place, 5.0, frames)
        ranks = {**evidence.ranks, 1: replace(seen, error=error)}
        assert noticed(diagnose(replace(evidence, ranks=ranks)), 3) == nobody


def test_without_the_source_the_rank_that_raised_is_named() -> None:
    evidence = crash(CONFIGS.format(what="mine"), 1, world=2)
    assert diagnose(replace(evidence, sources={})).culprits == (1,)


@pytest.mark.parametrize(
    ("ranks", "watched", "killed", "culprits"),
    [
        ((0, 1, 2), True, False, ()),
        ((0, 1), True, True, ()),  # rank 2 was slower, and the launcher ended it
        ((0, 1), True, False, (0, 1)),
        ((0,), True, True, (0,)),
        ((0, 1, 2), False, False, (0, 1, 2)),
    ],
)
def test_an_error_of_all_ranks_of_a_job_names_none_of_them(
    ranks: tuple[int, ...], watched: bool, killed: bool, culprits: tuple[int, ...]
) -> None:
    """A nan that was averaged into the gradients of all."""
    evidence = replace(fsdp2_job(set(), set(), set()).run(), watched=watched)
    for rank in ranks:
        error = RankError("ValueError", "the norm is nan", "train.py:7 main", 5.0)
        evidence = died(evidence, rank, error)
    if killed:
        last = replace(evidence.ranks[2], exit=ExitStatus(signal="SIGTERM", by_us=True))
        evidence = replace(evidence, ranks={**evidence.ranks, 2: replace(last, finished=False)})
    found = diagnose(evidence)
    assert found.culprits == culprits
    assert found.cause.endswith("so none of them is named.") == (not culprits)
