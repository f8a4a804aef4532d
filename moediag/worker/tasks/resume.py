"""Does training go on after a save and a load as if nothing had happened?

N steps in one go; the same once more, which shows what this machine cannot repeat; then some steps,
a save, a load into a model and an optimizer that are made anew, and the rest. The state is compared
bit by bit right after loading, the steps after the save with those of the straight run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch
import torch.distributed as dist

from moediag import protocol
from moediag.protocol import ExpertRows, Outcome, ResumeOutcome, StepNumbers, Trial
from moediag.worker.measure import ownership, reference, training_state
from moediag.worker.models.skew import RouterSkew
from moediag.worker.shard import placement
from moediag.worker.shard.wrapped import Wrapped, clean_fqn
from moediag.worker.tasks import step
from moediag.worker.tasks.save_and_load import Way, way_of
from moediag.worker.versions import versions

FOLDER = "saved"  # below the trial's folder, while the trial runs
Known = List[Dict[str, List[Tuple[str, int]]]]  # by rank, FQN: (digest, expert) of each row


class _Training:
    """A model and its optimizer, newly made, and what was measured of their steps."""

    def __init__(
        self, trial: Trial, rank: int, device: torch.device, told: Optional[step.Told] = None
    ) -> None:
        _forget_accelerate()
        self.wrapped = step.prepare(trial, device, told)
        self.rank = rank
        self.device = device
        self.losses: List[float] = []
        self.norms: List[Optional[float]] = []

    def run(self, first: int, last: int, recorder: Any) -> None:
        """Steps ``first`` to ``last``, counted from 1."""
        trial = self.wrapped.trial
        skew = RouterSkew(trial.skew, self.wrapped.anatomy.experts)
        skew.set_rank(self.rank)
        with skew.installed(self.wrapped.anatomy):
            for number in range(first, last + 1):
                if recorder is not None:
                    recorder.step(number)
                skew.set_step(number)
                loss = step.forward_backward(self.wrapped, self.rank, number, self.device)
                self.losses.append(loss)
                self.norms.append(_norm(self.wrapped))
                step.finish(self.wrapped)

    @property
    def numbers(self) -> StepNumbers:
        return StepNumbers(self.losses, self.norms)


def run(trial: Trial, rank: int, recorder: Any, device: torch.device) -> Outcome:
    """Collective. The saved state lies in the trial's folder until it was loaded; when a rank
    fails it stays there. Raises NotApplicable, ValueError without a ``resume`` section, and what
    saving and loading raise: that is what the trial is there to find out."""
    spec = trial.resume
    if spec is None:
        raise ValueError("a resume trial needs a resume section")
    way = way_of(spec)
    if trial.step.fill_uninitialized:
        step.fill_uninitialized()
    expected = reference.load(trial.reference_path) if trial.reference_path else None
    weights = step.Weights(trial, recorder, expected)
    steps, after = trial.step.steps, spec.after

    _say(recorder, f"all {steps} steps in one go")
    straight = _Training(trial, rank, device, weights.told)
    way.check(straight.wrapped)
    if recorder is not None:
        for note in straight.wrapped.notes:
            recorder.event("note", text=note)
    experts = _experts(straight.wrapped, expected)
    straight.run(1, steps, recorder)
    straight_end = training_state.of(straight.wrapped)

    _say(recorder, "the same once more")
    again = _Training(trial, rank, device)
    again.run(1, steps, recorder)

    _say(recorder, f"{after} steps before the save")
    first = _Training(trial, rank, device)
    first.run(1, after, recorder)
    at_save = training_state.of(first.wrapped)
    apart = _apart(first.wrapped)
    known = _known(first.wrapped, experts)
    folder = Path(os.environ[protocol.ENV_EVIDENCE]) / FOLDER
    resumed = _resume(way, trial, first, folder, recorder)

    at_load = training_state.of(resumed.wrapped)
    loaded = _loaded(resumed.wrapped, known, rank)
    resumed.run(after + 1, steps, recorder)
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()
    return Outcome(
        rank=rank,
        losses=straight.losses,
        gradient_norms=straight.norms,
        steps_done=steps,
        notes=straight.wrapped.notes,
        versions=versions(),
        resume=ResumeOutcome(
            through=spec.through,
            after=after,
            straight=straight.numbers,
            again=again.numbers,
            resumed=resumed.numbers,
            control=training_state.difference(straight_end, training_state.of(again.wrapped)),
            at_load=training_state.difference(at_save, at_load),
            at_end=training_state.difference(straight_end, training_state.of(resumed.wrapped)),
            loaded=loaded,
            apart=apart,
        ),
    )


def _resume(way: Way, trial: Trial, first: _Training, folder: Path, recorder: Any) -> _Training:
    """Saves ``first`` and returns a new training with what was saved in it."""
    if first.rank == 0:
        folder.mkdir()
    dist.barrier()
    _say(recorder, "saving")
    way.save(first.wrapped, folder)
    dist.barrier()
    _say(recorder, "loading what was saved")
    fresh = _Training(way.source(trial, folder), first.rank, first.device)
    way.load(fresh.wrapped, folder)
    dist.barrier()
    return fresh


def _say(recorder: Any, text: str) -> None:
    if recorder is not None:
        recorder.phase(text)


def _forget_accelerate() -> None:
    """A job that resumes is a new process, and accelerate keeps its state for the process."""
    try:
        from accelerate.state import AcceleratorState, GradientState
    except ImportError:
        return
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _norm(wrapped: Wrapped) -> Optional[float]:
    """Of this rank's own part of all gradients: no mesh to put together, no library's opinion."""
    gradients = [p.grad for p in wrapped.model.parameters() if p.grad is not None]
    if not gradients:
        return None
    return float(sum(float(placement.local(g).double().square().sum()) for g in gradients)) ** 0.5


# ------------------------------------------------------------------------ who holds what


def _experts(wrapped: Wrapped, expected: Optional[Dict[str, Any]]) -> Dict[str, List[int]]:
    """FQN of each expert parameter -> the experts that this rank's rows are before training, by
    the checkpoint's bytes; where no bytes say it, by their place. Empty without a reference."""
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
    """One for each row of the local part."""
    return [_digest(row) for row in placement.local(parameter).cpu()]


def _digest(tensor: torch.Tensor) -> str:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()


def _known(wrapped: Wrapped, experts: Dict[str, List[int]]) -> Known:
    """What every rank's rows are now. Collective."""
    mine: Dict[str, List[Tuple[str, int]]] = {}
    for fqn, p in ownership.expert_parameters(wrapped.model, wrapped.anatomy).items():
        if fqn in experts:
            mine[fqn] = [(digest, experts[fqn][i]) for i, digest in enumerate(_digests(p))]
    everybody: List[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return everybody


def _loaded(wrapped: Wrapped, known: Known, rank: int) -> List[ExpertRows]:
    """This rank's rows by their bytes. No communication."""
    found = []
    for fqn, parameter in ownership.expert_parameters(wrapped.model, wrapped.anatomy).items():
        if fqn not in known[rank]:
            continue
        own = known[rank][fqn]
        anywhere = {digest: expert for rows in known for digest, expert in rows.get(fqn, ())}
        held = []
        for i, digest in enumerate(_digests(parameter)):
            # Of rows with equal bytes (all nan, say) the one that stood here is meant.
            stayed = i < len(own) and own[i][0] == digest
            held.append(own[i][1] if stayed else anywhere.get(digest, -1))
        where = placement.placement(parameter) or "plain"
        declared = [expert for _, expert in own]
        found.append(ExpertRows(fqn, held, declared, int(parameter.shape[0]), where))
    return found


def _apart(wrapped: Wrapped) -> List[str]:
    """Parameters, experts aside, that every rank has a whole copy of, but not the same. They had
    drifted apart before anything was saved. Collective."""
    experts = ownership.expert_parameters(wrapped.model, wrapped.anatomy)
    mine = {
        clean_fqn(name): _digest(placement.local(p).cpu())
        for name, p in wrapped.model.named_parameters()
        if clean_fqn(name) not in experts and _copied(p)
    }
    everybody: List[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return [fqn for fqn in mine if len({copies.get(fqn) for copies in everybody}) > 1]


def _copied(parameter: Any) -> bool:
    return not placement.distributed(parameter) or all(
        p.is_replicate() for p in parameter.placements
    )
