"""Ranks of one tensor-parallel group of a watched job called their model with other samples, which
the program declares to be the same."""

from __future__ import annotations

from moediag.diagnosis.numbers.law_declared import DeclaredApart
from moediag.diagnosis.rules.facts import Facts
from moediag.diagnosis.rules.judgement import Judgement
from moediag.diagnosis.words import law_program_sentences
from moediag.result import Confidence, Verdict

VERDICT = Verdict.WRONG_GRADIENTS


def find(facts: Facts) -> DeclaredApart | None:
    return facts.declared.inputs


def judge(facts: Facts, found: DeclaredApart) -> Judgement:
    axes = ", ".join(found.first.axes)
    return Judgement(
        Confidence.HIGH,
        law_program_sentences.of_declared(found),
        pattern="law declared inputs",
        next_step=f"Give all ranks of one {axes} group the same samples: choose them by the "
        "data-parallel rank, not by the global rank.",
    )
