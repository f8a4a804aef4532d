"""The training step under test on one rank: forward, backward, compare, clip, optimizer."""

from __future__ import annotations

from moediag.lab.step import preparation, training
from moediag.lab.step.collector import Collector
from moediag.lab.step.measure import reference


def run(collector: Collector) -> None:
    """Runs all steps. Collective: it ends on all ranks, raises, or hangs, which the trial tests."""
    trial = collector.trial
    if trial.step.fill_uninitialized:
        preparation.fill_uninitialized()
    expected = reference.load(trial.reference_path) if trial.reference_path else None
    weights = preparation.Weights(trial, collector.recorder, expected)
    wrapped = preparation.prepare(trial, collector.device, weights.examine)
    collector.note(*wrapped.notes)
    training.train(collector, wrapped, expected, weights.held)
