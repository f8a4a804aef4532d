"""Similar stacks are grouped; ranks that wait for different things are separate."""

from __future__ import annotations

from moediag.report.similar_stacks import families

FORWARD = ("wait (c10d.py:10)", "all_gather (c10d.py:20)", "unshard (fsdp.py:30)", "main (a.py:4)")


def test_equal_stacks_are_one_variant() -> None:
    (family,) = families({0: FORWARD, 2: FORWARD})
    assert family.ranks == (0, 2)
    assert [(v.ranks, v.frames, any(v.own)) for v in family.variants] == [((0, 2), FORWARD, False)]


def test_stacks_that_differ_in_a_line_are_grouped_and_marked() -> None:
    other = (*FORWARD[:3], "main (a.py:9)")
    (family,) = families({0: FORWARD, 1: other, 2: FORWARD})
    assert [v.ranks for v in family.variants] == [(0, 2), (1,)]
    assert family.variants[1].own == (False, False, False, True)


def test_different_stacks_are_separate_with_the_rarest_first() -> None:
    other = ("read (io.py:3)", *FORWARD[1:])
    found = families({0: FORWARD, 1: FORWARD, 2: other})
    assert [family.ranks for family in found] == [(2,), (0, 1)]


def test_an_equal_innermost_frame_with_other_callers_is_separate() -> None:
    other = (FORWARD[0], "barrier (c10d.py:50)", "save (ckpt.py:7)", "end (a.py:40)")
    assert len(families({0: FORWARD, 1: other})) == 2


def test_empty_stacks_are_grouped() -> None:
    assert families({}) == ()
    assert [family.ranks for family in families({0: (), 1: FORWARD})] == [(0,), (1,)]


def test_thousands_of_different_stacks_are_grouped_quickly() -> None:
    found = families({str(rank): (f"f{rank} (a.py:1)", *FORWARD) for rank in range(3000)})
    assert len(found) == 3000
