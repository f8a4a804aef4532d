"""Checks that training continues after a save and a load as if nothing had happened.

It runs N steps without interruption; the same again, to show what this machine cannot repeat; then
some steps, a save, a load into a new model and a new optimizer, and the rest. The state is compared
bit by bit right after loading, and the steps after the save with those of the uninterrupted run.

If the new model has another layout, no run is uninterrupted: a step at another layout adds up in
another order. The state is then compared with one that was copied in memory into that layout, and
the steps after the save with those that start from it.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch.distributed as dist

from moediag import protocol
from moediag.axes import Layout
from moediag.lab.step import preparation, training
from moediag.lab.step.collector import Collector
from moediag.lab.step.measure import ownership, reference, training_state
from moediag.lab.step.models.skew import RouterSkew
from moediag.lab.step.shard.wrapped import Wrapped, expert_parameters
from moediag.lab.step.tasks.save_and_load import Way, way_of
from moediag.protocol import ExpertRows, ResumeOutcome, ResumeTask, StepNumbers, Trial
from moediag.protocol.names import clean_fqn
from moediag.recorder.step import numbers, pieces

FOLDER = "saved"  # below the trial's folder, while the trial runs
Known = List[Dict[str, List[Tuple[str, int]]]]  # by rank, FQN: (digest, expert) of each row


class _Training:
    """A new model with its optimizer, and the measurements of their steps."""

    def __init__(
        self, collector: Collector, trial: Trial, on_model: Optional[preparation.OnModel] = None
    ) -> None:
        _forget_accelerate()
        self.collector = collector
        self.wrapped = preparation.prepare(trial, collector.device, on_model)
        self.losses: List[float] = []
        self.norms: List[Optional[float]] = []

    def run(self, first: int, last: int) -> None:
        """Runs steps ``first`` to ``last``, counted from 1."""
        skew = RouterSkew(self.wrapped.trial.skew, self.wrapped.anatomy.experts)
        skew.set_rank(self.collector.rank)
        with skew.installed(self.wrapped.anatomy):
            for number in self.collector.steps(None, self._optimize, skew, first, last):
                self.losses.append(
                    training.forward_backward(
                        self.wrapped, self.collector.rank, number, self.collector.device
                    )
                )
                self.norms.append(_norm(self.wrapped))

    def _optimize(self, number: int) -> None:
        training.finish(self.wrapped)

    @property
    def numbers(self) -> StepNumbers:
        return StepNumbers(self.losses, self.norms)

    def start_from(self, other: _Training, whole: Dict[str, training_state.Values]) -> None:
        """Copies the state ``whole`` of ``other`` into this new training, and its numbers."""
        training_state.place(whole, self.wrapped)
        self.losses += other.losses
        self.norms += other.norms


@dataclasses.dataclass(frozen=True)
class _Compared:
    """What the resumed training is compared with."""

    first: _Training  # stopped at the save
    straight: _Training  # at its end
    again: _Training  # the same once more
    at_save: training_state.State  # at the layout after loading
    known: Known


def run(collector: Collector) -> None:
    """Runs the task. Collective. The saved state is in the trial's folder until it is loaded; if a
    rank fails it stays there. Raises NotApplicable, and what saving and loading raise: the trial
    tests exactly that."""
    trial, task = collector.trial, collector.trial.task
    assert isinstance(task, ResumeTask)
    way = way_of(task)
    if trial.step.fill_uninitialized:
        preparation.fill_uninitialized()
    expected = reference.load(trial.reference_path) if trial.reference_path else None
    compared = (_moved if task.layout else _uninterrupted)(collector, way, expected)
    first, straight, again = compared.first, compared.straight, compared.again
    apart = _apart(first.wrapped)
    straight_end = training_state.of(straight.wrapped)
    folder = Path(os.environ[protocol.ENV_EVIDENCE]) / FOLDER
    resumed = _resume(way, straight.wrapped.trial, first, folder)

    at_load = training_state.of(resumed.wrapped)
    loaded = _loaded(resumed.wrapped, compared.known, collector.rank)
    resumed.run(task.after + 1, trial.step.steps)
    if collector.rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    collector.set(
        losses=straight.losses,
        gradient_norms=straight.norms,
        resume=ResumeOutcome(
            through=task.through,
            after=task.after,
            straight=straight.numbers,
            again=again.numbers,
            resumed=resumed.numbers,
            control=training_state.difference(straight_end, training_state.of(again.wrapped)),
            at_load=training_state.difference(compared.at_save, at_load),
            at_end=training_state.difference(straight_end, training_state.of(resumed.wrapped)),
            loaded=loaded,
            apart=apart,
            layout=str(Layout(task.layout)) if task.layout else "",
        ),
    )


def _uninterrupted(collector: Collector, way: Way, expected: Optional[Dict[str, Any]]) -> _Compared:
    trial, steps, after = collector.trial, collector.trial.step.steps, way.task.after
    weights = preparation.Weights(trial, collector.recorder, expected)
    collector.recorder.phase(f"all {steps} steps in one go")
    straight = _Training(collector, trial, weights.examine)
    way.check(straight.wrapped)
    collector.note(*straight.wrapped.notes)
    experts = _experts(straight.wrapped, expected)
    straight.run(1, steps)

    collector.recorder.phase("the same once more")
    again = _Training(collector, trial)
    again.run(1, steps)

    collector.recorder.phase(f"{after} steps before the save")
    first = _Training(collector, trial)
    first.run(1, after)
    at_save = training_state.of(first.wrapped)
    return _Compared(first, straight, again, at_save, _known(first.wrapped, experts))


def _moved(collector: Collector, way: Way, expected: Optional[Dict[str, Any]]) -> _Compared:
    trial, steps, after = collector.trial, collector.trial.step.steps, way.task.after
    weights = preparation.Weights(trial, collector.recorder, expected)
    collector.recorder.phase(f"{after} steps before the save")
    first = _Training(collector, trial, weights.examine)
    way.check(first.wrapped)
    first.run(1, after)
    whole = training_state.gathered(first.wrapped)

    elsewhere = dataclasses.replace(trial, layout=way.task.layout)
    collector.recorder.phase(f"the same state in memory at {Layout(way.task.layout)}")
    straight = _Training(collector, elsewhere)
    collector.note(*first.wrapped.notes, *straight.wrapped.notes)
    experts = _experts(straight.wrapped, expected)
    straight.start_from(first, whole)
    at_save, known = training_state.of(straight.wrapped), _known(straight.wrapped, experts)
    straight.run(after + 1, steps)

    collector.recorder.phase("the same once more")
    again = _Training(collector, elsewhere)
    again.start_from(first, whole)
    again.run(after + 1, steps)
    return _Compared(first, straight, again, at_save, known)


def _resume(way: Way, trial: Trial, first: _Training, folder: Path) -> _Training:
    """Saves ``first`` and returns a new training with the saved state."""
    recorder = first.collector.recorder
    if first.collector.rank == 0:
        folder.mkdir()
    dist.barrier()
    recorder.phase("saving")
    way.save(first.wrapped, folder)
    dist.barrier()
    recorder.phase("loading what was saved")
    fresh = _Training(first.collector, way.source(trial, folder))
    way.load(fresh.wrapped, folder)
    dist.barrier()
    return fresh


def _forget_accelerate() -> None:
    """Resets accelerate's state, kept per process: a job that resumes is a new process."""
    try:
        from accelerate.state import AcceleratorState, GradientState
    except ImportError:
        return
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _norm(wrapped: Wrapped) -> Optional[float]:
    """Returns the L2 norm of this rank's own part of all gradients, computed without a library."""
    gradients = [p.grad for p in wrapped.model.parameters() if p.grad is not None]
    if not gradients:
        return None
    return float(sum(float(pieces.local(g).double().square().sum()) for g in gradients)) ** 0.5


# ------------------------------------------------------------------------ which rank holds what


def _experts(wrapped: Wrapped, expected: Optional[Dict[str, Any]]) -> Dict[str, List[int]]:
    """Returns FQN of each expert parameter -> the experts of this rank's rows before training, by
    the checkpoint's bytes, or by position if the bytes match none. Empty without a reference."""
    if expected is None:
        return {}
    rows, _, _ = ownership.examine(
        wrapped.model, wrapped.anatomy, expected["weights"], wrapped.ep_rank
    )
    return {
        row.fqn: [row.declared[i] if held < 0 else held for i, held in enumerate(row.held)]
        for row in rows
    }


def _digests(parameter: Any) -> List[str]:
    """Returns one digest per row of the local part."""
    return [numbers.digest(row) for row in pieces.local(parameter).cpu()]


def _known(wrapped: Wrapped, experts: Dict[str, List[int]]) -> Known:
    """Returns digest and expert of every rank's current rows. Collective."""
    mine: Dict[str, List[Tuple[str, int]]] = {}
    for fqn, p in expert_parameters(wrapped.model, wrapped.anatomy).items():
        if fqn in experts:
            mine[fqn] = [(digest, experts[fqn][i]) for i, digest in enumerate(_digests(p))]
    everybody: List[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


def _loaded(wrapped: Wrapped, known: Known, rank: int) -> List[ExpertRows]:
    """Returns this rank's rows by their bytes. No communication."""
    found = []
    for fqn, parameter in expert_parameters(wrapped.model, wrapped.anatomy).items():
        if fqn not in known[rank]:
            continue
        own = known[rank][fqn]
        anywhere = {digest: expert for rows in known for digest, expert in rows.get(fqn, ())}
        held = []
        for i, digest in enumerate(_digests(parameter)):
            # Among rows with equal bytes (all nan, say) prefer the one that was here.
            stayed = i < len(own) and own[i][0] == digest
            held.append(own[i][1] if stayed else anywhere.get(digest, -1))
        where = pieces.placement(parameter) or "plain"
        declared = [expert for _, expert in own]
        found.append(ExpertRows(fqn, held, declared, int(parameter.shape[0]), where))
    return found


def _apart(wrapped: Wrapped) -> List[str]:
    """Returns parameters other than experts of which every rank has a whole copy, but not the same
    one: they diverged before anything was saved. Collective."""
    experts = expert_parameters(wrapped.model, wrapped.anatomy)
    mine = {
        clean_fqn(name): numbers.digest(pieces.local(p))
        for name, p in wrapped.model.named_parameters()
        if clean_fqn(name) not in experts and _copied(p)
    }
    everybody: List[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return [fqn for fqn in mine if len({copies.get(fqn) for copies in everybody}) > 1]


def _copied(parameter: Any) -> bool:
    return all(axis.placed.is_replicate() for axis in pieces.axes_of(parameter))
