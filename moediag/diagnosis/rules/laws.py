"""Detectors of laws that a watched job broke, from what its ranks recorded (`watch --laws`)."""

from __future__ import annotations

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.judgement import Judgement, detector
from moediag.diagnosis.words import (
    law_data_sentences,
    law_loop_sentences,
    law_program_sentences,
    law_sentences,
)
from moediag.result import Confidence, Verdict


@detector(Verdict.WRONG_WEIGHTS)
def part_loaded(facts: Facts) -> Judgement | None:
    """Ranks of a watched job loaded parameters before FSDP2 sharded them, and others did not."""
    found = facts.loads.part
    if found is None:
        return None
    return Judgement(
        Confidence.HIGH,
        law_program_sentences.of_part(found),
        pattern="law part loaded",
        next_step="Load on every rank before fully_shard, or afterwards with "
        "set_model_state_dict(…, options=StateDictOptions(full_state_dict=True, "
        "broadcast_from_rank0=True)).",
    )


@detector(Verdict.REPLICA_DIVERGENCE)
def replicas_apart(facts: Facts) -> Judgement | None:
    """Values that a watched job must keep equal on several ranks differ: parameters of replicas, or
    numbers of their optimizer."""
    found = facts.laws.breach
    if found is None:
        return None
    first = found.reason.what if found.reason is not None else "weights"
    return Judgement(
        Confidence.HIGH,
        law_sentences.of_breach(found),
        culprits=found.odd,
        next_step=law_sentences.next_step(found),
        pattern=f"law {'initial weights' if found.initial else first}",
    )


@detector(Verdict.WRONG_GRADIENTS)
def declared_inputs_apart(facts: Facts) -> Judgement | None:
    """Ranks of one tensor-parallel group of a watched job called their model with other samples,
    which the program declares to be the same."""
    found = facts.declared.inputs
    if found is None:
        return None
    axes = ", ".join(found.first.axes)
    return Judgement(
        Confidence.HIGH,
        law_program_sentences.of_declared(found),
        pattern="law declared inputs",
        next_step=f"Give all ranks of one {axes} group the same samples: choose them by the "
        "data-parallel rank, not by the global rank.",
    )


@detector(Verdict.WRONG_GRADIENTS)
def local_norms(facts: Facts) -> Judgement | None:
    """Ranks of a watched job clipped their FSDP1 shards of the same gradients by different
    norms."""
    found = facts.training.local_norms
    if found is None:
        return None
    return Judgement(
        Confidence.HIGH,
        law_data_sentences.of_norms(found),
        pattern="law local norms",
        next_step="Call clip_grad_norm_ of the FSDP module: it sums over all shards.",
    )


@detector(Verdict.WRONG_GRADIENTS)
def gradients_kept(facts: Facts) -> Judgement | None:
    """The gradients of a watched job were never cleared between two updates."""
    found = facts.loops.kept
    if found is None:
        return None
    return Judgement(
        Confidence.HIGH,
        law_loop_sentences.of_kept(found),
        pattern="law kept",
        next_step="Call `optimizer.zero_grad()` once for each update, before the backward.",
    )


@detector(Verdict.WRONG_GRADIENTS)
def scaled_gradients_clipped(facts: Facts) -> Judgement | None:
    """A watched job clipped gradients that were still multiplied by the loss scale."""
    found = facts.loops.scaled
    if found is None:
        return None
    return Judgement(
        Confidence.HIGH,
        law_loop_sentences.of_scaled(found),
        pattern="law scaled",
        next_step="Call `scaler.unscale_(optimizer)` before clip_grad_norm_.",
    )


@detector(Verdict.NONFINITE)
def parameters_not_finite(facts: Facts) -> Judgement | None:
    """Parameters of a watched job became nan or infinite."""
    found = facts.training.not_finite
    if found is None:
        return None
    return Judgement(
        Confidence.HIGH,
        law_data_sentences.of_not_finite(found),
        pattern="law parameters",
        next_step="Run again with `--laws-every 1` to see which gradient is the first one.",
    )


@detector(Verdict.WRONG_GRADIENTS)
def same_part(facts: Facts) -> Judgement | None:
    """Ranks of a watched job that average their gradients asked a DistributedSampler for the same
    part of the samples, and trained on the same ones."""
    found = facts.samples.shared
    if found is None or not found.same_part:
        return None
    return Judgement(
        Confidence.HIGH,
        law_data_sentences.of_shared(found),
        pattern="law same part",
        next_step="Give DistributedSampler each rank's own `rank`.",
    )


@detector(Verdict.WRONG_GRADIENTS)
def adapters_untrained(facts: Facts) -> Judgement | None:
    """None of the low-rank adapters that an optimizer of a watched job trains ever had a
    gradient."""
    found = facts.training.adapters
    if found is None:
        return None
    return Judgement(
        Confidence.HIGH,
        f"{law_data_sentences.of_starved(found)}: these adapters train nothing.",
        pattern="law adapters",
        next_step="Look for what cuts the graph before the adapters: no_grad, detach, or gradient "
        "checkpointing whose inputs do not require gradients.",
    )


@detector(Verdict.WRONG_WEIGHTS)
def model_without_optimizer(facts: Facts) -> Judgement | None:
    """No optimizer of a watched job has the parameters that get gradients."""
    found = facts.loops.untrained
    if found is None or not found.names:
        return None
    return Judgement(
        Confidence.HIGH,
        law_loop_sentences.of_untrained(found),
        pattern="law untrained",
        next_step="Make the optimizer from the parameters of the model that is trained, after it "
        "was wrapped, moved or replaced.",
    )


@detector(Verdict.WRONG_GRADIENTS)
def gradients_absent(facts: Facts) -> Judgement | None:
    """No parameter that an optimizer of a watched job has ever had a gradient."""
    found = facts.loops.untrained
    if found is None or found.names:
        return None
    return Judgement(
        Confidence.HIGH,
        law_loop_sentences.of_absent(found),
        pattern="law absent",
        next_step="Look for what cuts the graph between the model and the loss: no_grad, detach, "
        ".data, or a loss computed from copied values; or for a missing backward.",
    )


@detector(Verdict.WRONG_GRADIENTS)
def left_in_evaluation(facts: Facts) -> Judgement | None:
    """A watched job went on training a model in evaluation mode."""
    found = facts.loops.left
    if found is None or not found.since:
        return None
    return Judgement(
        Confidence.HIGH,
        law_loop_sentences.of_left(found),
        pattern="law mode",
        next_step="Call `model.train()` after each evaluation.",
    )
