"""Which rank holds which experts: wrong patterns are found, correct layouts not reported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moediag.diagnosis import diagnose
from moediag.diagnosis.numbers import expert_holders as held_by
from moediag.diagnosis.numbers import ownership
from moediag.diagnosis.numbers.ownership import ownership_facts
from moediag.evidence.model import Evidence, HeldWeights, RankEvidence
from moediag.protocol import ExpertRows
from moediag.result import Verdict
from tests.unit.evidence_builder import fsdp2_job, measured

UP = "model.layers.0.mlp.experts.gate_up_proj"
DOWN = "model.layers.1.mlp.experts.down_proj"
SHARDED = "Shard(0) on mesh[2]"
Rows = Sequence[int]


def rows(
    held: Rows, declared: Rows | None = None, whole: int = 8, lies: str = SHARDED, fqn: str = UP
) -> ExpertRows:
    return ExpertRows(fqn, list(held), list(held if declared is None else declared), whole, lies)


def seen(
    by_rank: Mapping[int, ExpertRows],
    asked: int = 1,
    when: str = "prepared",
    unequal: Mapping[int, Sequence[str]] | None = None,
    used: Mapping[int, int] | None = None,
    experts: int = 8,
) -> Evidence:
    """Ranks with the experts that they hold at one moment; ``used``: experts each computes with."""
    ranks = {}
    for rank, own in by_rank.items():
        told = HeldWeights(when, (own,), tuple((unequal or {}).get(rank, ())), 3, asked, experts)
        ranks[rank] = RankEvidence(
            rank,
            weights=(told,),
            experts_used={UP: (used or {})[rank]} if used is not None else {},
        )
    return Evidence(len(by_rank), ranks)


def before(evidence: Evidence, by_rank: Mapping[int, ExpertRows], when: str = "loaded") -> Evidence:
    """Adds the experts held at an earlier moment."""
    ranks = dict(evidence.ranks)
    for rank, own in by_rank.items():
        told = replace(ranks[rank].weights[-1], when=when, experts=(own,), unequal=())
        ranks[rank] = replace(ranks[rank], weights=(told, *ranks[rank].weights))
    return replace(evidence, ranks=ranks)


SLICES = {0: rows(range(4), lies="plain", whole=4), 1: rows(range(4, 8), lies="plain", whole=4)}

RIGHT = {
    "plain slices": seen(SLICES, asked=2),
    "a DTensor over ep": seen({0: rows(range(4)), 1: rows(range(4, 8))}, asked=2),
    # efsdp x ep: strided, each expert on one rank.
    "efsdp x ep": seen(
        {0: rows([0, 1]), 1: rows([4, 5]), 2: rows([2, 3]), 3: rows([6, 7])}, asked=2
    ),
    # Each row's columns cut over the other axis: every expert on two ranks.
    "ep x columns": seen({r: rows(range(4 * (r % 2), 4 * (r % 2) + 4)) for r in range(4)}, asked=2),
    "two replicas of an ep group": seen(
        {r: rows(range(4 * (r % 2), 4 * (r % 2) + 4), whole=4) for r in range(4)}, asked=2
    ),
    "FSDP alone": seen({0: rows(range(4)), 1: rows(range(4, 8))}),
    "FSDP over more ranks than experts": seen(
        {r: rows([r] if r < 8 else []) for r in range(12)},
    ),
    "everything everywhere": seen({r: rows(range(8), lies="plain") for r in range(3)}),
    "uneven": seen(
        {0: rows([0, 1, 2]), 1: rows([3, 4, 5]), 2: rows([6, 7])}, asked=3, used={0: 3, 1: 3, 2: 2}
    ),
    "declared by nobody": seen({0: rows(range(8), [-1] * 8), 1: rows(range(8), [-1] * 8)}),
}


@pytest.mark.parametrize("layout", RIGHT)
def test_correct_layouts_are_not_reported(layout: str) -> None:
    facts = ownership_facts(RIGHT[layout])
    assert (facts.pattern, facts.text, facts.wrong) == ("", "", False)
    assert (facts.seen, facts.when, facts.experts) == (True, "prepared", 8)


def test_a_parameter_may_have_more_experts_than_the_layer() -> None:
    """Identity experts, or experts of attention, as LongCat-Flash and JetMoe have them."""
    own = {0: replace(rows(range(6)), experts=12), 1: replace(rows(range(6, 12)), experts=12)}
    facts = ownership_facts(seen(own))
    assert (facts.pattern, facts.experts) == ("", 12)
    half = {rank: replace(rows(range(6)), experts=12) for rank in range(2)}
    assert "the 12 experts" in ownership_facts(seen(half)).text


def test_missing_evidence_is_not_reported() -> None:
    nothing = Evidence(2, {0: RankEvidence(0), 1: RankEvidence(1)})
    assert not ownership_facts(nothing).seen
    assert not ownership_facts(Evidence(0, {})).seen
    assert held_by.tables(nothing, lost=False) == ()
    empty = seen({0: rows([], whole=0)}, experts=0)
    whole = replace(empty.ranks[0].weights[0], experts=())
    told = Evidence(1, {0: replace(empty.ranks[0], weights=(whole,))})
    assert ownership_facts(told).seen and not ownership_facts(told).wrong
    assert held_by.tables(told, lost=True) == ()


# ------------------------------------------------------------------------ patterns

LOST = {
    "rank 0's slice, sharded again": (
        before(seen({0: rows([0, 1], whole=4), 1: rows([2, 3], whole=4)}, asked=2), SLICES),
        ownership.RESHARDED,
        ["rank 0 holds 0-1; rank 1 holds 2-3", "experts 4-7 are on no rank", "rank 0's slice (0-3)",
         "4 rows now, for 8 experts"],
        (0, 1),
    ),
    "on four ranks, two hold nothing": (
        seen({0: rows([0], whole=2), 1: rows([1], whole=2), 2: rows([], whole=2),
              3: rows([], whole=2)}, asked=4),
        ownership.RESHARDED,
        ["ranks 2, 3 hold nothing", "experts 2-7 are on no rank", "rank 0's slice (0-1)"],
        (0, 1, 2, 3),
    ),
    "a later rank's slice": (
        before(seen({0: rows([4, 5], [0, 1], 4), 1: rows([6, 7], [2, 3], 4)}, asked=2), SLICES),
        ownership.RESHARDED,
        ["rank 1's slice (4-7)"],
        (0, 1),
    ),
    "a piece of each rank's own": (
        before(seen({0: rows([0, 1], whole=4), 1: rows([6, 7], [2, 3], 4)}, asked=2), SLICES),
        ownership.DIAGONAL,
        ["rank 1 holds 6-7", "experts 2-5 are on no rank", "kept one piece of it"],
        (0, 1),
    ),
    "a piece of each, on four ranks": (
        seen({0: rows([0], whole=2), 1: rows([3], [1], 2), 2: rows([], whole=2),
              3: rows([], whole=2)}, asked=4),
        ownership.DIAGONAL,
        ["experts 1-2, 4-7 are on no rank"],
        (0, 1, 2, 3),
    ),
    "the same slice everywhere": (
        before(seen({r: rows(range(4), range(4 * r, 4 * r + 4), 4) for r in (0, 1)}, asked=2),
               SLICES),
        ownership.COPIED,
        ["ranks 0, 1 hold 0-3", "experts 4-7 are on no rank", "taken for copies of each other"],
        (0, 1),
    ),
    "never loaded": (
        seen({0: rows([-1] * 4, range(4)), 1: rows([-1] * 4, range(4, 8))}, asked=2),
        ownership.NOT_LOADED,
        ["ranks 0, 1 hold none of the checkpoint's", "experts 0-7 are on no rank"],
        (0, 1),
    ),
    "never loaded on one rank": (
        before(seen({0: rows(range(4)), 1: rows([-1] * 4, range(4, 8))}, asked=2),
               {1: rows([-1] * 4, range(4, 8))}),
        ownership.NOT_LOADED,
        ["rank 0 holds 0-3; rank 1 holds none of the checkpoint's", "experts 4-7"],
        (1,),
    ),
    "one row never loaded": (
        seen({0: rows(range(4)), 1: rows([4, -1, 6, 7], range(4, 8))}),
        ownership.NOT_LOADED,
        ["rank 1 holds 4, 6-7 and 1 row of none", "expert 5 is on no rank"],
        (1,),
    ),
    "two ranks' slices swapped": (
        seen({0: rows(range(4, 8), range(4)), 1: rows(range(4), range(4, 8))}, asked=2),
        ownership.MISPLACED,
        ["rank 0 holds 4-7; rank 1 holds 0-3", "not those that their place says"],
        (0, 1),
    ),
    # Without expert parallelism each slice is the whole, which explains no loss.
    "swapped under FSDP alone": (
        seen({0: rows(range(4, 8), range(4)), 1: rows(range(4), range(4, 8))}),
        ownership.MISPLACED,
        ["not those that their place says"],
        (0, 1),
    ),
    "permuted on every rank alike": (
        seen({r: rows([1, 0, *range(2, 8)], range(8), lies="plain") for r in (0, 1)}),
        ownership.MISPLACED,
        ["ranks 0, 1 hold 0-7"],
        (0, 1),
    ),
    "permuted on one rank": (
        seen({0: rows(range(4)), 1: rows([5, 4, 6, 7], range(4, 8))}),
        ownership.MISPLACED,
        ["(1 expert parameter)"],
        (1,),
    ),
    "the first half twice under FSDP": (
        seen({0: rows(range(4)), 1: rows(range(4), range(4, 8))}),
        ownership.MISPLACED,
        ["experts 4-7 are on no rank"],
        (1,),
    ),
    "one expert once more than the others": (
        seen({0: rows(range(8)), 1: rows([0], [-1])}),
        ownership.MISPLACED,
        ["rank 1 holds 0"],
        (0, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LOST)
def test_lost_experts_are_reported(case: str) -> None:
    evidence, pattern, texts, where = LOST[case]
    facts = ownership_facts(evidence)
    assert (facts.pattern, facts.wrong, facts.seen) == (pattern, True, True)
    assert facts.text.startswith("After sharding the 8 experts of a layer are not all")
    assert [text for text in texts if text not in facts.text] == []
    assert (facts.parameters, facts.ranks, facts.when) == ((UP,), where, "prepared")


SENTENCES = {
    "rank 0's slice, sharded again": (
        "rank 0 holds 0-1; rank 1 holds 2-3, and experts 4-7 are on no rank (1 expert parameter). "
        "That is rank 0's slice (0-3), taken for the whole parameter and sharded again over all "
        "ranks; the other ranks' experts were overwritten. The whole parameter has 4 rows now, for "
        "8 experts."
    ),
    "a piece of each rank's own": (
        "rank 0 holds 0-1; rank 1 holds 6-7, and experts 2-5 are on no rank (1 expert parameter). "
        "Each rank took its own slice for the whole parameter and kept one piece of it; the rest "
        "of every slice is gone. The whole parameter has 4 rows now, for 8 experts."
    ),
    "the same slice everywhere": (
        "ranks 0, 1 hold 0-3, and experts 4-7 are on no rank (1 expert parameter). That is rank "
        "0's slice (0-3) on every rank: as plain tensors of one name they were taken for copies of "
        "each other, and one rank's was kept."
    ),
    "one row never loaded": (
        "rank 0 holds 0-3; rank 1 holds 4, 6-7 and 1 row of none, and expert 5 is on no rank "
        "(1 expert parameter). Some rows match no expert of the checkpoint: they were not "
        "loaded, or have changed since."
    ),
    "two ranks' slices swapped": (
        "rank 0 holds 4-7; rank 1 holds 0-3 (1 expert parameter). The rows are experts of the "
        "checkpoint, but not those that their place says."
    ),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_lost_experts_have_a_complete_sentence(case: str) -> None:
    facts = ownership_facts(LOST[case][0])
    lead = "After sharding the 8 experts of a layer are not all where they belong: "
    assert facts.text == lead + SENTENCES[case]


def test_lost_experts_include_held_and_requested_experts() -> None:
    facts = ownership_facts(LOST["a piece of each rank's own"][0])
    assert facts.held == {0: (0, 1), 1: (6, 7)}
    assert (facts.experts, facts.axis) == (8, 2)


def test_experts_on_no_rank_are_lost() -> None:
    facts = ownership_facts(seen({0: rows([]), 1: rows([])}))
    assert (facts.pattern, facts.ranks) == (ownership.NOT_LOADED, (0, 1))
    assert "ranks 0, 1 hold nothing, and experts 0-7 are on no rank" in facts.text


def test_resharding_during_loading_is_found() -> None:
    loaded = seen({0: rows([0, 1], whole=4), 1: rows([2, 3], whole=4)}, asked=2, when="loaded")
    facts = ownership_facts(loaded)
    assert (facts.pattern, facts.when) == (ownership.RESHARDED, "loaded")
    assert facts.text.startswith("After loading the 8 experts of a layer are not all")


def test_resharding_after_loading_is_found() -> None:
    """Rank 0 holds 4-7 after loading: the slice that was sharded again."""
    swapped = {0: rows(range(4, 8), lies="plain", whole=4), 1: rows(range(4), lies="plain")}
    sharded = seen({0: rows([4, 5], [0, 1], 4), 1: rows([6, 7], [2, 3], 4)}, asked=2)
    facts = ownership_facts(before(sharded, swapped))
    assert (facts.pattern, "rank 0's slice (4-7)" in facts.text) == (ownership.RESHARDED, True)
    # Rows of another parameter, or invalid rows, do not affect this one.
    for held in (
        {0: rows(range(4, 8), lies="plain", fqn=DOWN), 1: rows(range(4), fqn=DOWN)},
        {0: rows([-1, 5, 6, 7], lies="plain"), 1: rows([-1, 1, 2, 3], lies="plain")},
    ):
        facts = ownership_facts(before(sharded, held))
        assert (facts.pattern, "rank 1's slice (4-7)" in facts.text) == (ownership.RESHARDED, True)


def test_correct_parameters_beside_wrong_ones_are_not_reported() -> None:
    evidence = seen({0: rows(range(4)), 1: rows([-1] * 4, range(4, 8))})
    ranks = {
        rank: replace(
            one,
            weights=(
                replace(
                    one.weights[0],
                    experts=(
                        rows(range(4 * rank, 4 * rank + 4), fqn=DOWN),
                        *one.weights[0].experts,
                    ),
                ),
            ),
        )
        for rank, one in evidence.ranks.items()
    }
    facts = ownership_facts(replace(evidence, ranks=ranks))
    assert facts.parameters == (UP,)
    assert "(1 expert parameter)" in facts.text


def test_missing_expert_parallelism_is_found() -> None:
    everything = {r: rows(range(8), lies="plain") for r in (0, 1)}
    facts = ownership_facts(seen(everything, asked=2, used={0: 8, 1: 8}))
    assert (facts.pattern, facts.ranks, facts.axis) == (ownership.OFF, (0, 1), 2)
    assert facts.text == (
        "Expert parallelism over 2 ranks was asked for, and none took place: ranks 0, 1 compute "
        "with 8 of 8 experts of a layer, not with 4. Nothing reports it: the result is that of a "
        "run without expert parallelism, in the memory of one."
    )
    assert (facts.when, facts.parameters) == ("prepared", (UP,))
    assert (facts.seen, facts.experts) == (True, 8)
    alone = ownership_facts(seen(everything, asked=2, used={0: 4, 1: 8}))
    assert alone.ranks == (1,)
    assert "rank 1 computes with 8 of 8 experts of a layer, not with 4" in alone.text
    uneven = ownership_facts(seen(everything, asked=3, used={0: 4, 1: 3}))
    assert uneven.ranks == (0,) and "not with 3." in uneven.text
    for used, asked in (({0: 4, 1: 4}, 2), ({0: 8, 1: 8}, 1)):
        assert not ownership_facts(seen(everything, asked=asked, used=used)).wrong
    half = ownership_facts(seen(everything, asked=4, used={0: 4, 1: 4}))
    assert "and less took place" in half.text and "4 of 8" in half.text


def test_changed_ignored_experts_are_found() -> None:
    moved = before(seen({0: rows(range(4)), 1: rows(range(4, 8))}), SLICES)
    told = {
        rank: replace(one, weights=tuple(replace(w, left_out=True) for w in one.weights))
        for rank, one in moved.ranks.items()
    }
    facts = ownership_facts(replace(moved, ranks=told))
    assert (facts.pattern, facts.ranks) == (ownership.NOT_LEFT_OUT, (0, 1))
    assert facts.text == (
        "1 expert parameter that sharding was told to leave alone (ignored_modules) was sharded "
        f"all the same: plain after loading, {SHARDED} after sharding. Nothing reports it."
    )
    assert (facts.when, facts.parameters, facts.seen) == ("prepared", (UP,), True)
    assert (facts.experts, facts.axis) == (8, 1)
    # One rank, two parameters; "loaded by rank 0" is used if no rank recorded "loaded".
    two = {}
    for rank, one in told.items():
        then, now = (
            replace(w, experts=(*w.experts, replace(w.experts[0], fqn=DOWN))) for w in one.weights
        )
        then = replace(then, when=held_by.BY_RANK_0)
        two[rank] = replace(one, weights=(then, replace(now, left_out=rank == 1)))
    partly = ownership_facts(replace(moved, ranks=two))
    assert (partly.ranks, partly.parameters) == ((1,), (UP, DOWN))
    assert partly.text.startswith("2 expert parameters that sharding was told to leave alone")
    assert "were sharded all the same" in partly.text
    assert not ownership_facts(moved).wrong, "nobody was told to leave them alone"
    left = before(seen(SLICES, asked=2), SLICES)
    kept = {
        rank: replace(one, weights=tuple(replace(w, left_out=True) for w in one.weights))
        for rank, one in left.ranks.items()
    }
    assert not ownership_facts(replace(left, ranks=kept)).wrong


def test_other_different_weights_are_listed_with_their_ranks() -> None:
    held = {0: rows(range(4)), 1: rows(range(4, 8))}
    facts = ownership_facts(seen(held, unequal={1: ["lm_head.weight", "model.norm.weight"]}))
    assert (facts.pattern, facts.ranks) == (ownership.OTHER_WEIGHTS, (1,))
    assert facts.parameters == ("lm_head.weight", "model.norm.weight")
    assert "2 parameters on rank 1 are not as in the checkpoint" in facts.text
    assert (facts.when, facts.seen, facts.experts, facts.axis) == ("prepared", True, 8, 1)
    names = ["a", "b.c", "d.e.f", "g.h.i.j", "k.l.m.n.o"]
    some = ownership_facts(seen(held, unequal={0: names, 1: names[:1]}))
    assert some.ranks == (0, 1)
    assert some.text == (
        "After sharding 5 parameters on ranks 0, 1 are not as in the checkpoint: a, b.c, d.e.f and "
        "2 more."
    )
    three = ownership_facts(seen(held, unequal={0: names[:3]}))
    assert three.text.endswith("not as in the checkpoint: a, b.c, d.e.f.")
    one = ownership_facts(seen(held, unequal={0: ["lm_head.weight"]}))
    assert "1 parameter on rank 0 is not as in the checkpoint: lm_head.weight." in one.text


# ------------------------------------------------------------------------ moments

WRONG = {0: rows([-1] * 4, range(4)), 1: rows([-1] * 4, range(4, 8))}
FINE = {0: rows(range(4)), 1: rows(range(4, 8))}


def test_the_last_moment_that_every_rank_reached_is_judged() -> None:
    assert not ownership_facts(before(seen(FINE), WRONG)).wrong, "sharding loaded them"
    resumed = before(seen(WRONG, when="resumed"), FINE, "prepared")
    assert ownership_facts(resumed).text.startswith("After resuming the 8 experts")
    # Rank 1 died while sharding, so the last common moment is loading.
    half = before(seen(WRONG), FINE)
    only = replace(half.ranks[1], weights=half.ranks[1].weights[:1])
    facts = ownership_facts(replace(half, ranks={**half.ranks, 1: only}))
    assert (facts.when, facts.wrong) == ("loaded", False)


def test_a_missing_log_leaves_ownership_unknown() -> None:
    whole = seen(WRONG)
    for ranks in ({0: whole.ranks[0]}, {**whole.ranks, 1: RankEvidence(1)}):
        assert not ownership_facts(replace(whole, ranks=ranks)).seen


def test_loading_on_rank_0_only_is_shown_but_not_judged() -> None:
    loading = {0: rows(range(4), lies="plain", whole=4), 1: rows([-1] * 4, lies="plain", whole=4)}
    alone = seen(loading, asked=2, when=held_by.BY_RANK_0)
    assert not ownership_facts(alone).seen
    (held,) = held_by.tables(alone, lost=False)
    assert held.columns == ("rank", "after loading", "after sharding")
    assert held.rows == (
        ("rank 0", "0-3 (plain)", "-"),
        ("rank 1", "nothing yet: rank 0 loads", "-"),
    )
    assert held.title == "Experts held by each rank, matched with the checkpoint's bytes"
    _, values = held_by.tables(alone, lost=True)
    assert [row[:2] for row in values.rows] == [("rank 0", "-"), ("rank 1", "nothing yet")]


# ------------------------------------------------------------------------ tables


def test_table_has_ranks_as_rows_and_moments_as_columns() -> None:
    evidence = LOST["a piece of each rank's own"][0]
    held, values = held_by.tables(evidence, lost=True)
    assert held.note == f"of {UP}"
    assert held.rows == (
        ("rank 0", "0-3 (plain)", f"0-1 ({SHARDED})"),
        ("rank 1", "4-7 (plain)", f"6-7 ({SHARDED})"),
    )
    assert values.columns == ("rank", "after loading", "after sharding", "checkpoint")
    assert values.title == f"First value of {UP} on each rank"
    assert values.note == ""
    assert values.rows == (("rank 0", "-", "-", "-"), ("rank 1", "-", "-", "-"))
    assert held_by.tables(evidence, lost=False) == (held,)


def test_table_shows_values_beside_the_checkpoints() -> None:
    told = {0: replace(rows(range(4)), first=0.25, should=0.5),
            1: replace(WRONG[1], first=-1.5, should=0.125)}  # fmt: skip
    held, values = held_by.tables(seen(told, when="resumed"), lost=True)
    assert held.columns == ("rank", "after loading", "after sharding", "after resuming")
    assert values.rows == (
        ("rank 0", "-", "-", "0.2500000", "0.5000000"),
        ("rank 1", "-", "-", "-1.5000000", "0.1250000"),
    )


def test_parameters_that_differ_have_separate_rows() -> None:
    evidence = seen(FINE)
    more = rows([], whole=4, fqn=DOWN)
    ranks = {
        r: replace(one, weights=(replace(one.weights[0], experts=(FINE[r], more)),))
        for r, one in evidence.ranks.items()
    }
    (held,) = held_by.tables(replace(evidence, ranks=ranks), lost=False)
    assert [row[:2] for row in held.rows] == [
        (UP, "rank 0"), (UP, "rank 1"), (DOWN, "rank 0"), (DOWN, "rank 1"),
    ]  # fmt: skip
    assert [row[-1] for row in held.rows[2:]] == [f"nothing ({SHARDED})"] * 2
    assert held.columns == ("parameter", "rank", "after loading", "after sharding")
    assert held.note == ""


def test_expert_numbers_are_shown_as_ranges() -> None:
    assert held_by.numbers([0, 1, 2, 3, 6]) == "0-3, 6"
    assert held_by.numbers([5, 4, -1, -1]) == "4-5 and 2 rows of none"
    assert held_by.numbers([-1]) == "none of the checkpoint's"
    assert held_by.numbers([]) == "nothing"


# ------------------------------------------------------------------------ as a verdict


def with_weights(evidence: Evidence, held: Evidence) -> Evidence:
    ranks = {
        rank: replace(one, weights=held.ranks[rank].weights) for rank, one in evidence.ranks.items()
    }
    return replace(evidence, ranks=ranks)


def test_lost_experts_are_the_verdict_if_every_rank_finished() -> None:
    trained = measured(fsdp2_job(set(), set()).run())
    lost = LOST["a piece of each rank's own"][0]
    found = diagnose(with_weights(trained, lost))
    assert found.verdict == Verdict.WRONG_WEIGHTS
    assert found.signature == "wrong-weights:piece-of-own-slice:no-rank"
    assert found.culprits == (), "a library did it to all of them"
    assert found.cause.endswith("gradients still match the reference.")
    assert len(found.tables) == 2
    one = diagnose(with_weights(trained, LOST["permuted on one rank"][0]))
    assert (one.signature, one.culprits) == ("wrong-weights:misplaced:one-rank", (1,))
    right = diagnose(with_weights(trained, RIGHT["a DTensor over ep"]))
    assert right.verdict == Verdict.CLEAN
    assert "All 8 experts of each layer are where they belong." in right.cause
    held = {
        rank: replace(one, weights=(HeldWeights("loaded", (), compared=2),))
        for rank, one in trained.ranks.items()
    }
    of_adapters = diagnose(replace(trained, ranks=held))
    assert (of_adapters.verdict, "experts of" in of_adapters.cause) == (Verdict.CLEAN, False)


def test_lost_experts_explain_wrong_gradients() -> None:
    trained = measured(fsdp2_job(set(), set()).run(), ["lm_head.weight"])
    found = diagnose(with_weights(trained, LOST["the same slice everywhere"][0]))
    assert found.verdict == Verdict.WRONG_WEIGHTS
    assert "lm_head.weight" in found.cause
    assert found.wrong_parameters == ("lm_head.weight",)


def test_lost_experts_are_a_note_of_a_hang() -> None:
    hung = with_weights(fsdp2_job(set(), {(1, 3)}).run(), LOST["the same slice everywhere"][0])
    found = diagnose(hung)
    assert found.verdict == Verdict.HANG
    assert any("the 8 experts of a layer are not all" in note for note in found.notes)


held_rows = st.lists(st.integers(-1, 9), max_size=9)


@given(
    ranks=st.lists(st.lists(st.tuples(held_rows, st.randoms()), max_size=3), max_size=4),
    asked=st.integers(1, 5),
    whole=st.integers(0, 9),
    when=st.sampled_from(["loaded", "prepared", "loaded by rank 0", "some day"]),
)
def test_any_evidence_is_judged_without_an_exception(
    ranks: list, asked: int, whole: int, when: str
) -> None:
    """Any evidence is judged without an exception, and only complete experts are clean."""
    told = {}
    for rank, parameters in enumerate(ranks):
        own = tuple(
            rows(held, random.sample(held, len(held)), whole, fqn=f"layers.{n}.experts.w")
            for n, (held, random) in enumerate(parameters)
        )
        told[rank] = RankEvidence(
            rank,
            weights=(HeldWeights(when, own, asked=asked, whole=whole),),
            experts_used={"w": whole} if rank % 2 else {},
        )
    facts = ownership_facts(Evidence(len(ranks), told))
    for wrong in (True, False):
        held_by.tables(Evidence(len(ranks), told), wrong)
    if facts.seen and not facts.wrong:
        for one in told.values():
            assert all(0 <= e < whole for own in one.weights[0].experts for e in own.held)
