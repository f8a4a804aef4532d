"""Numbers for charts: of a failure that shows them, not of a clean job, not without evidence."""

from __future__ import annotations

from dataclasses import replace

from moediag.diagnosis import diagnose
from moediag.diagnosis.words import charts
from moediag.evidence.model import Evidence, TokenCount
from moediag.result import ExpertTokens
from tests.unit.diagnosis.test_by_part import EXPERT, evidence
from tests.unit.evidence_builder import fsdp2_job

BLOCK = "model.layers.1.mlp"


def starving() -> Evidence:
    """Rank 1 starves expert 3 of layer 1; layer 0 is even."""
    job = fsdp2_job(set(), {(1, 3)})
    for rank, last in ((0, 2), (1, 0)):
        job.tokens[rank] = (
            TokenCount(1, "model.layers.0.mlp", (4,) * 8),
            TokenCount(1, BLOCK, (4, 4, 4, last, 4, 4, 4, 4)),
        )
    return job.run()


def test_the_tokens_of_the_block_that_starves_are_kept() -> None:
    found = diagnose(starving())
    assert found.tokens == ExpertTokens(
        BLOCK, 1, ((0,), (1,)), ((4, 4, 4, 2, 4, 4, 4, 4), (4, 4, 4, 0, 4, 4, 4, 4))
    )


def test_the_timeline_has_the_calls_before_the_divergence_and_the_one_that_waits() -> None:
    found = diagnose(starving()).timeline
    assert [row.ranks for row in found] == [(0,), (1,)]
    for row in found:
        assert row.at is not None
        assert row.calls[row.at].state == "open"
        assert [call.begin for call in row.calls] == sorted(call.begin for call in row.calls)
    assert min(call.begin for row in found for call in row.calls) == 0.0


def test_a_clean_job_has_no_numbers_for_charts() -> None:
    job = fsdp2_job(set(), set())
    job.tokens[0] = (TokenCount(1, BLOCK, (4,) * 8),)
    found = diagnose(job.run())
    assert (found.tokens, found.layer_errors, found.timeline) == (None, (), ())


def test_without_times_or_tokens_there_is_no_chart_of_them() -> None:
    seen = fsdp2_job(set(), {(1, 3)}).run()
    ranks = {
        rank: replace(
            one, tokens=(), collectives=tuple(replace(c, time=0.0) for c in one.collectives)
        )
        for rank, one in seen.ranks.items()
    }
    found = diagnose(replace(seen, ranks=ranks))
    assert found.first_divergence is not None
    assert (found.tokens, found.timeline) == (None, ())


def test_many_ranks_share_rows_and_culprits_do_not() -> None:
    rows = charts._rows(range(1024), [500])
    assert len(rows) <= charts.MOST_ROWS
    assert (500,) in rows
    assert sorted(rank for row in rows for rank in row) == list(range(1024))
    assert charts._rows(range(4), [1]) == [(0,), (1,), (2,), (3,)]


def test_gradient_errors_by_layer_and_part() -> None:
    found = {
        (e.layer, e.part): (e.wrong, e.compared) for e in diagnose(evidence({EXPERT})).layer_errors
    }
    assert found == {
        ("layer 0", "experts"): (1, 1), ("layer 0", "router"): (0, 1), ("", "all others"): (0, 1),
        ("layer 0", "inputs of the MoE blocks"): (0, 1),
    }  # fmt: skip
