"""Laws about what ranks hold in common or in parts: frozen parameters, models that FSDP1 wraps,
norms of a rank's own part, experts that several ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from moediag.diagnosis import diagnose
from moediag.evidence.law_model import ClipNorm, ModelInputs, ModelState, RankLaws, Shard
from moediag.evidence.model import Collective, Evidence
from moediag.result import Diagnosis
from tests.unit.law_evidence import STEPS, job

BASE = "q_proj.base_layer.weight"


def with_laws(evidence: Evidence, **fields: Any) -> Evidence:
    """``fields``: functions of the rank."""
    ranks = {}
    for rank, seen in evidence.ranks.items():
        own = {name: of(rank) for name, of in fields.items()}
        ranks[rank] = replace(seen, laws=replace(seen.laws or RankLaws(), **own))
    return replace(evidence, ranks=ranks)


class TestFrozen:
    def found(self, *values: Sequence[str]) -> Diagnosis:
        """``values``: of each rank, by step."""

        def states(rank: int) -> tuple[ModelState, ...]:
            rows = zip(STEPS, values[rank], strict=True)
            return tuple(ModelState(s, buffers=(((0, 1), {BASE: value}),)) for s, value in rows)

        return diagnose(with_laws(job(2), models=states))

    def test_merged_on_one_rank(self) -> None:
        of = self.found("aabb", "aaaa")
        assert "has since changed on rank 0 only" in of.suspicious[0] and BASE in of.suspicious[0]

    @pytest.mark.parametrize(
        "rows", [("aabb", "aabb"), ("aabb", "aacc"), ("aaaa", "bbbb"), ("aaaa", "aaaa")]
    )
    def test_all_ranks_or_never(self, rows: Sequence[str]) -> None:
        of = self.found(*rows)
        assert (of.verdict, of.suspicious) == ("clean", ())


class TestOwnStatistics:
    def found(
        self, mean: Any, ranks: int = 2, over: tuple[int, ...] = (0, 1), call: int = 0
    ) -> tuple[str, ...]:
        """``mean``: the sum and the norm of a buffer of four, of rank and step."""

        def add(rank: int) -> RankLaws:
            rows = [{"step": s, "values": {"Norm 1.mean": [mean(rank, s), 4]}} for s in STEPS]
            inputs = tuple(ModelInputs(s, 0, f"{s} {rank}", over) for s in STEPS)
            return RankLaws(inputs=inputs, others={"statistics": tuple(rows)})

        evidence = job(ranks)
        one = Collective(3, "world", 3, "all_reduce", call, call, "float32", step=4)
        every = {
            rank: replace(
                seen, collectives=(*seen.collectives, *([one] if call else [])),
                laws=replace(add(rank), checks=seen.laws.checks if seen.laws else ()),
            )
            for rank, seen in evidence.ranks.items()
        }  # fmt: skip
        return diagnose(replace(evidence, ranks=every)).suspicious

    def test_of_each_rank(self) -> None:
        (text,) = self.found(lambda rank, step: [step + rank, 9.0])
        assert "1 buffer (Norm 1.mean) follows each rank's own samples" in text

    @pytest.mark.parametrize(
        "mean",
        [
            lambda rank, step: [step, 9.0],
            lambda rank, step: [rank, 9.0],
            lambda rank, step: [step + rank * (step < 3), 9.0],
            lambda rank, step: [step + 1e-6 * rank, 9.0],
        ],
        ids=["equal", "constant", "made equal later", "rounded"],
    )
    def test_healthy(self, mean: Any) -> None:
        assert not self.found(mean)

    def test_what_is_sent_from_time_to_time(self) -> None:
        assert not self.found(lambda rank, step: [step + rank, 9.0], call=4)
        assert self.found(lambda rank, step: [step + rank, 9.0], call=5)

    def test_ranks_that_average_nothing_and_one_rank(self) -> None:
        assert not self.found(lambda rank, step: [step + rank, 9.0], over=())
        assert not self.found(lambda rank, step: [step + rank, 9.0], ranks=1)


class TestFlattened:
    def found(self, loaded: tuple[bool, bool], values: str = "ab") -> str:
        def rows(rank: int) -> Any:
            return {"w": Shard(1, values[rank], loaded[rank], True)}

        return diagnose(with_laws(job(2), shards=rows)).verdict

    def test_one_rank_loads(self) -> None:
        assert self.found((True, False)) == "wrong-weights"

    def test_all_none_or_equal(self) -> None:
        assert self.found((True, True)) == self.found((False, False)) == "clean"
        assert self.found((True, False), "aa") == "clean"


@pytest.mark.parametrize(("norm", "found"), [(0.0, True), (2.0, False)])
def test_clipping_that_never_finds_a_gradient(norm: float, found: bool) -> None:
    norms = tuple(ClipNorm(s, ("net.weight",), norm, 1.0, "t.py:8 f") for s in STEPS)
    of = diagnose(with_laws(job(2), norms=lambda _: norms))
    assert any("found no gradients in all" in text for text in of.suspicious) is found
