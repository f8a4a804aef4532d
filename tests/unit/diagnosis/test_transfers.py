"""Who sends to another peer, or more or less often, than the others: never an innocent rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence.model import Evidence, Stall
from tests.unit.evidence_builder import Job, Op
from tests.unit.transfer_jobs import (
    Call,
    Fault,
    Program,
    gossip,
    pipeline,
    recv,
    ring,
    run,
    send,
)

MADE: dict[str, Callable[[Fault], Program]] = {
    "ring": ring,
    "gossip": gossip,
    "gpipe": pipeline,
    "1f1b": partial(pipeline, schedule="1f1b"),
}
KINDS = {
    "ring": ("stop", "less", "more", "neighbour", "source", "tag", "barrier"),
    "gossip": ("stop", "neighbour", "less"),
    "gpipe": ("stop", "no-send", "no-gradient", "less", "more", "barrier"),
    "1f1b": ("stop", "no-send", "no-gradient", "less", "more", "barrier"),
}


@pytest.mark.parametrize("program", MADE)
@pytest.mark.parametrize("world", [2, 3, 4, 5])
def test_no_innocent_rank_is_named(program: str, world: int) -> None:
    if program == "gossip" and world != 4:
        return
    assert run(MADE[program](Fault()), world).stall is None
    for kind in KINDS[program]:
        for rank in range(world):
            for step in (1, 3):
                found = diagnose(run(MADE[program](Fault(kind, rank, step)), world))
                assert set(found.culprits) <= {rank}, (kind, rank, step, found.cause)


@pytest.mark.parametrize(
    ("program", "kind", "words"),
    [
        ("ring", "less", "ranks 0, 1, 3 called send at ring.py:5 move"),
        ("ring", "more", "called all_reduce"),
        (
            "ring",
            "neighbour",
            "ranks 0, 1, 3 do in that line, rank 2 should send to rank 3",
        ),
        ("ring", "source", "should receive from rank 1"),
        ("ring", "tag", "to rank 3 with tag 7"),
        ("ring", "barrier", "called barrier at ring.py:8 move"),
        ("gossip", "neighbour", "ranks 0, 1, 3 do in that line, rank 2 should"),
        ("gossip", "less", "Ranks 0, 1, 3 agree on 1; rank 2 alone differs"),
        ("gpipe", "no-send", "rank 3 waits in recv at pipe.py:3 forward"),
        ("gpipe", "less", "and rank 2 made 3 of send at pipe.py:4 forward"),
        ("1f1b", "no-gradient", "rank 2 alone differs"),
    ],
)
def test_the_rank_that_departs_is_named(program: str, kind: str, words: str) -> None:
    found = diagnose(run(MADE[program](Fault(kind, 2)), 4))
    assert (found.verdict, found.culprits) == ("hang", (2,)), found.cause
    assert words in found.cause
    assert found.next_step


def test_two_ranks_with_different_tags_are_both_shown() -> None:
    found = diagnose(run(ring(Fault("tag", 0)), 2))
    assert found.culprits == ()
    assert "with tag 7" in found.cause


def test_ranks_that_all_send_first_are_told_so() -> None:
    def program(rank: int, world: int) -> Iterator[Call]:
        yield send((rank + 1) % world, "swap.py:3 swap")
        yield recv((rank - 1) % world, "swap.py:4 swap")

    found = diagnose(run(program, 3))
    assert found.culprits == () and "All of them send first." in found.cause
    assert "batch_isend_irecv" in found.next_step


def test_a_line_that_sends_and_receives_at_once_is_not_told_to_do_so() -> None:
    """As `batch_isend_irecv`: two ranks of which neither sends in the second batch."""

    def program(rank: int, world: int) -> Iterator[Call]:
        for batch in range(2):
            if batch == 0:
                yield send((rank + 1) % world, "swap.py:3 swap", waits=False)
            yield recv((rank - 1) % world, "swap.py:3 swap")

    found = diagnose(run(program, 2))
    assert found.culprits == () and "sends and receives at once" in found.cause
    assert found.next_step == "Pair each send with a receive: these ranks wait for each other."


@pytest.mark.parametrize("left_out", [True, False])
def test_what_a_rank_that_waits_for_anybody_was_sent_is_counted(left_out: bool) -> None:
    """A server and three clients, of which rank 2 does not answer once."""
    everyone: dict[str, tuple[tuple[int, ...], str | None]] = {"0": ((0, 1, 2, 3), None)}
    asks = [Op("0", "send", peer=client) for client in (1, 2, 3)]
    hears = [Op("0", "recv") for _ in range(3)]
    client = [Op("0", "recv", peer=0), Op("0", "send", peer=0)]
    programs = [[*asks, *hears] * 2] + [[*client, *client, client[0]] for _ in range(3)]
    if left_out:
        del programs[2][-2]
    made = Job(everyone, programs).whole()
    ranks = {
        rank: replace(
            seen,
            collectives=tuple(replace(c, completed=True) for c in seen.collectives[:-1])
            + seen.collectives[-1:],
            finished=False, exit=None,
        )
        for rank, seen in made.ranks.items()
    }  # fmt: skip
    found = diagnose(replace(made, ranks=ranks, stall=Stall(1.0, 3.0, (0, 1, 2, 3)), watched=True))
    told = "It was sent 2 messages by ranks 1, 3; 1 message by rank 2."
    assert found.culprits == () and (told in found.cause) == left_out


def test_without_the_other_ranks_nobody_is_named() -> None:
    """Evidence is missing: two of the ranks that would agree left no record."""
    job = run(ring(Fault("neighbour", 2)), 4)
    for lost in ((0, 1), (0, 3)):
        seen = {r: replace(one, collectives=(), groups={}, versions={})
                if r in lost else one for r, one in job.ranks.items()}  # fmt: skip
        assert diagnose(replace(job, ranks=seen)).culprits in ((), (2,))


PAIRS: dict[str, tuple[tuple[int, ...], str | None]] = {
    "0": ((0, 1, 2, 3), None), "a": ((0, 2), None), "b": ((1, 3), None),
}  # fmt: skip


def paired(*transfers: int) -> Evidence:
    """Each rank makes so many broadcasts with its partner in the last step, three before, and
    reduces with all after each step."""
    programs = []
    for rank, last in enumerate(transfers):
        mix = Op("ba"[rank % 2 == 0], "broadcast", peer=0)
        programs.append([op for n in (3, 3, last) for op in [*[mix] * n, Op("0")]])
    made = Job(PAIRS, programs).run()
    ranks = {
        rank: replace(
            seen, collectives=tuple(replace(c, site=f"mix.py:3 {c.op}") for c in seen.collectives)
        )
        for rank, seen in made.ranks.items()
    }
    return replace(made, ranks=ranks, watched=True)


def test_a_call_on_a_pair_that_one_rank_left_out_is_counted() -> None:
    found = diagnose(paired(3, 2, 3, 3))
    assert found.culprits == (1,), found.cause
    assert "Ranks 0, 2, 3 agree on 9; rank 1 alone differs" in found.cause
    assert diagnose(paired(3, 2, 3, 2)).culprits == ()
    assert set(diagnose(paired(2, 2, 3, 3)).culprits) <= {2}  # never both, never an innocent pair
