"""Tokens per expert and rank: matched by the names of blocks, and summed."""

from __future__ import annotations

import pytest

from moediag.diagnosis.schedules.starvation import Starved, Tokens, expert_of, layer_name, tokens_of
from moediag.evidence.model import Evidence, RankEvidence, TokenCount

BLOCK = "model.layers.1.mlp"


def counted(*of_ranks: tuple[int, ...]) -> Tokens:
    counts = {rank: list(counts) for rank, counts in enumerate(of_ranks)}
    return Tokens({(1, BLOCK): counts}, {BLOCK})


def test_tokens_of_several_forwards_are_summed() -> None:
    lines = (
        TokenCount(1, BLOCK, (1, 2)),
        TokenCount(1, BLOCK, (10, 20)),
        TokenCount(2, BLOCK, (7, 8)),
    )
    tokens = tokens_of(Evidence(1, {0: RankEvidence(0, tokens=lines)}))
    assert tokens.counts == {(1, BLOCK): {0: [11, 22]}, (2, BLOCK): {0: [7, 8]}}
    assert tokens.layers == {BLOCK}
    # Counts of another width replace earlier ones.
    other = (*lines[:1], TokenCount(1, BLOCK, (5, 6, 7)))
    assert tokens_of(Evidence(1, {0: RankEvidence(0, tokens=other)})).of(1, BLOCK, 2) == {0: 7}


def test_an_expert_not_counted_by_a_rank_is_unknown() -> None:
    tokens = counted((4, 0), (4, 5, 6))
    assert tokens.of(1, BLOCK, 1) == {0: 0, 1: 5}
    assert tokens.of(1, BLOCK, 2) == {1: 6}
    assert tokens.of(1, BLOCK, 3) == {}
    assert tokens.of(2, BLOCK, 1) == {}


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (BLOCK, BLOCK),
        ("layers.1.mlp", BLOCK),  # another root
        (f"module.{BLOCK}", BLOCK),
        (f"{BLOCK}.experts", BLOCK),  # a module inside
        ("model.layers.1", BLOCK),  # a module around
        ("model.layers.2.mlp", "model.layers.2.mlp"),
    ],
)
def test_a_block_is_found_under_the_name_of_another_rank(asked: str, found: str) -> None:
    assert counted((1,)).block(asked) == found


def test_an_ambiguous_name_matches_no_block() -> None:
    tokens = Tokens(layers={"model.layers.1.mlp", "model.layers.2.mlp"})
    assert tokens.block("model.layers") == "model.layers"
    assert tokens.block("mlp") == "mlp"


def test_an_expert_is_starved_if_only_other_ranks_send_tokens() -> None:
    tokens = counted((4, 0, 0), (4, 5, 0), (4, 6, 0))
    names = [f"{BLOCK}.experts.{e}.up_proj.weight" for e in range(3)]
    assert tokens.starved(0, 1, names, (0, 1, 2)) == (Starved(0, BLOCK, 1, ((1, 5), (2, 6))),)
    assert tokens.starved(0, 1, names, (0, 2)) == (Starved(0, BLOCK, 1, ((2, 6),)),)
    assert tokens.starved(0, 1, names, (0,)) == ()
    assert tokens.starved(1, 1, names, (0, 1, 2)) == ()
    assert tokens.starved(0, 2, names, (0, 1, 2)) == ()
    assert tokens.starved(0, 1, ["lm_head.weight"], (0, 1, 2)) == ()


def test_all_starved_experts_of_a_block_are_found() -> None:
    tokens = counted((4, 0, 1), (0, 5, 1))
    assert tokens.all_starved(1, BLOCK, (1, 0)) == (
        Starved(0, BLOCK, 1, ((1, 5),)),
        Starved(1, BLOCK, 0, ((0, 4),)),
    )
    assert tokens.all_starved(1, "elsewhere", (0, 1)) == ()


def test_experts_and_layers_are_parsed_from_names() -> None:
    assert expert_of(f"{BLOCK}.experts.12.up_proj.weight") == (BLOCK, 12)
    assert expert_of(f"{BLOCK}.gate.weight") is None
    assert layer_name(BLOCK) == "layer 1"
    assert layer_name("blocks.3.layers.7.moe") == "layer 7"
    assert layer_name("moe") == "moe"
