"""Ranks of a watched job loaded parameters before FSDP2 sharded them, and others did not."""

from __future__ import annotations

from moediag.diagnosis.numbers.law_loads import PartLoaded
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words import law_program_sentences
from moediag.result import Confidence, Verdict

VERDICT = Verdict.WRONG_WEIGHTS


def find(facts: Facts) -> PartLoaded | None:
    return facts.loads.part


def judge(facts: Facts, found: PartLoaded) -> Judgement:
    return Judgement(
        Confidence.HIGH,
        law_program_sentences.of_part(found),
        pattern="law part loaded",
        next_step="Load on every rank before fully_shard, or afterwards with "
        "set_model_state_dict(…, options=StateDictOptions(full_state_dict=True, "
        "broadcast_from_rank0=True)).",
    )
