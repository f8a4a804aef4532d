"""Sentences about state that loading did not restore."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from moediag.diagnosis.numbers.lost_in_resume import by, most, what_is_lost
from moediag.protocol import ExpertRows, ResumeOutcome, StateDifference, StepNumbers
from moediag.result.wording import listed


def outcome(
    *loaded: ExpertRows, through: str = "dcp", apart: tuple[str, ...] = (), **lost: object
) -> ResumeOutcome:
    return ResumeOutcome(
        through=through, after=2, straight=StepNumbers(), again=StepNumbers(),
        resumed=StepNumbers(), control=StateDifference(compared=9),
        at_load=StateDifference(**{"compared": 9, **lost}),  # type: ignore[arg-type]
        at_end=StateDifference(compared=9), loaded=list(loaded), apart=list(apart),
    )  # fmt: skip


def rows(fqn: str, held: tuple[int, ...], declared: tuple[int, ...], placement: str = "plain"):
    return ExpertRows(fqn, list(held), list(declared), 4, placement)


def layer(number: int) -> str:
    return f"model.layers.{number}.experts.w"


def two(*of_layers: int, held: int, through: str = "dcp", placement: str = "plain"):
    """Both ranks hold the two experts of rank ``held`` in each layer."""
    have = ((0, 1), (2, 3))
    return {
        rank: outcome(
            *(rows(layer(n), have[held], have[rank], placement) for n in of_layers),
            through=through,
        )
        for rank in (0, 1)
    }


def test_a_complete_resume_has_no_description() -> None:
    assert what_is_lost({0: outcome(), 1: outcome(rows("w", (0, 1), (0, 1)))}) == ("", "")


# ------------------------------------------------------------------------ experts


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ((0,), "layer 0"),
        ((0, 1), "layers 0 and 1"),
        ((10, 2, 1), "layers 1, 2 and 10"),
        ((0, 1, 2, 3), "4 layers"),
    ],
)
def test_experts_of_one_rank_on_every_rank_are_described(
    layers: tuple[int, ...], said: str
) -> None:
    assert what_is_lost(two(*layers, held=1)) == (
        "one-rank-everywhere",
        f"After loading, every rank holds rank 1's experts 2-3 of {said}, and experts 0-1 are on "
        "no rank. They are plain tensors of one name on every rank, so "
        "torch.distributed.checkpoint took them for copies of one another and kept one rank's.",
    )


@pytest.mark.parametrize(
    ("through", "said"),
    [
        ("accelerate", "accelerate's save_state"),
        ("save-pretrained", "save_pretrained"),
        ("another", "another"),
    ],
)
def test_the_saving_library_is_named(through: str, said: str) -> None:
    assert f"so {said} took them for copies" in what_is_lost(two(0, held=0, through=through))[1]


def test_sharded_tensors_are_not_described_as_copies() -> None:
    pattern, text = what_is_lost(two(0, held=0, placement="Shard(0) on ep[2]"))
    assert pattern == "one-rank-everywhere"
    assert text == (
        "After loading, every rank holds rank 0's experts 0-1 of layer 0, and experts 2-3 are on "
        "no rank."
    )


def test_a_missing_expert_without_a_layer_number_is_described() -> None:
    found = {
        0: outcome(rows("experts.w", (0,), (0,))),
        1: outcome(rows("experts.w", (0,), (1,))),
    }
    assert what_is_lost(found)[1].startswith(
        "After loading, every rank holds rank 0's experts 0 of experts.w, and expert 1 is on no "
        "rank."
    )


def test_experts_mixed_from_several_ranks_are_described() -> None:
    found = {
        rank: outcome(
            rows(layer(0), (2, 3), ((0, 1), (2, 3))[rank]),
            rows(layer(1), (0, 1), ((0, 1), (2, 3))[rank]),
        )
        for rank in (0, 1)
    }
    assert what_is_lost(found) == (
        "ranks-glued-together",
        "After loading, every rank holds the same experts, glued together from several ranks': "
        "rank 0's (0-1) in model.layers.1.experts.w; rank 1's (2-3) in model.layers.0.experts.w. "
        "They are plain tensors of one name on every rank, so torch.distributed.checkpoint took "
        "them for copies of one another and kept one rank's.",
    )


def test_moved_experts_are_described() -> None:
    found = {
        rank: outcome(rows(layer(0), ((rank + 1) % 5,), (rank,)), rows(layer(1), (rank,), (rank,)))
        for rank in range(5)
    }
    assert what_is_lost(found) == (
        "experts-moved",
        "After loading, experts of 1 parameter are not those of the save. In "
        "model.layers.0.experts.w rank 0 holds 1 where it had 0; rank 1 holds 2 where it had 1; "
        "rank 2 holds 3 where it had 2; and 2 more ranks.",
    )
    few = {rank: found[rank] for rank in range(3)}
    assert what_is_lost(few)[1].endswith("rank 2 holds 3 where it had 2.")


def test_a_single_rank_has_no_pattern_across_ranks() -> None:
    assert what_is_lost({0: outcome(rows(layer(0), (0,), (1,)))})[0] == "experts-moved"


def test_lost_optimizer_tensors_are_counted() -> None:
    lost = {"w exp_avg": 0.5, "w exp_avg_sq": 0.1}
    found = two(0, held=0)
    both = {r: replace(one, at_load=StateDifference(optimizer=lost)) for r, one in found.items()}
    assert what_is_lost(both)[1].endswith(" 2 tensors of the optimizer went with them.")
    one = {**found, 1: replace(found[1], at_load=StateDifference(optimizer={"w exp_avg": 0.5}))}
    assert what_is_lost(one)[1].endswith(" 1 tensor of the optimizer went with them.")


# ------------------------------------------------------------------------ other weights


def test_different_weights_are_counted_with_ranks_and_size() -> None:
    found = {0: outcome(weights={"a": 0.25}), 1: outcome(weights={"a": 0.5, "b.c": 0.125})}
    assert what_is_lost(found) == (
        "weights",
        "After loading, 2 parameters on ranks 0, 1 differ from those at the save by up to 5.0e-01: "
        "a, b.c.",
    )
    assert what_is_lost({0: outcome(), 1: outcome(weights={"b": None})}) == (
        "weights",
        "After loading, 1 parameter on rank 1 differs from those at the save beyond measure (nan, "
        "or a tensor that one of them lacks): b.",
    )


def test_copies_that_differed_before_the_save_are_described() -> None:
    one = {0: outcome(apart=("a", "b.c")), 1: outcome(apart=("a", "b.c"), weights={"a": 0.5})}
    assert what_is_lost(one) == (
        "copies-were-apart",
        "Before anything was saved, 2 parameters of which every rank has a copy had drifted apart "
        "between the ranks (a, b.c). A checkpoint keeps one copy, so after loading rank 1 "
        "continues with another's, which differs by up to 5.0e-01.",
    )
    both = {**one, 0: outcome(apart=("a", "b.c"), weights={"b.c": 0.125})}
    assert "so after loading ranks 0, 1 continue with another's" in what_is_lost(both)[1]
    # A weight that was equal before was lost by the save.
    other = {**one, 1: outcome(apart=("a",), weights={"a": 0.5, "c": 0.5})}
    assert what_is_lost({1: other[1]})[0] == "weights"


# ------------------------------------------------------------------------ the optimizer


def test_a_different_optimizer_state_is_described() -> None:
    found = {0: outcome(optimizer={"a exp_avg": 0.25}), 1: outcome(optimizer={"a exp_avg": 0.5})}
    assert what_is_lost(found) == (
        "optimizer",
        "After loading every weight equals that at the save; the optimizer does not: 1 tensor of "
        "it differs by up to 5.0e-01: a exp_avg.",
    )
    more = {**found, 0: outcome(optimizer={"a exp_avg": 0.25, "b exp_avg": 0.1})}
    assert "2 tensors of it differ by up to 5.0e-01: " in what_is_lost(more)[1]


def test_at_most_three_different_settings_are_listed() -> None:
    said = ["lr 0.1, then 0.2", "eps 1, then 2", "betas 1, then 2", "decay 1, then 2"]
    assert what_is_lost({0: outcome(settings=said), 1: outcome(settings=said[:1])}) == (
        "optimizer",
        "After loading every tensor equals that at the save; the optimizer's settings do not: "
        "lr 0.1, then 0.2; eps 1, then 2; betas 1, then 2.",
    )


# ------------------------------------------------------------------------ formatting


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["a"], "a"),
        (["a", "b.c", "d.e.f"], "a, b.c, d.e.f"),
        (["a", "b.c", "d.e.f", "g.h.i.j"], "a, b.c, d.e.f and 1 more"),
        (["w.0.a", "w.1.a"], "w.{0,1}.a"),
    ],
)
def test_at_most_three_names_are_listed(names: list[str], said: str) -> None:
    assert listed(names) == said


@pytest.mark.parametrize(
    ("differences", "largest"),
    [([], 0.0), ([0.5, 0.25], 0.5), ([0.5, None], math.inf), ([math.nan, 0.5], math.inf)],
)
def test_largest_difference_is_found(differences: list[float | None], largest: float) -> None:
    assert most(differences) == largest


def test_difference_is_formatted() -> None:
    assert by(0.00123) == "by up to 1.2e-03"
    assert by(math.inf) == "beyond measure (nan, or a tensor that one of them lacks)"
