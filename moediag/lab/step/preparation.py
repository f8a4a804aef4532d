"""Prepares the model under test: builds or loads it, applies the trial's fix, and shards it."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

import torch
from torch import nn

from moediag.lab.step import content
from moediag.lab.step.measure import ownership, replicas
from moediag.lab.step.models import checkpoint as load
from moediag.lab.step.models import tiny
from moediag.lab.step.shard import expert_parallel
from moediag.lab.step.shard.kinds import kind_of
from moediag.lab.step.shard.wrapped import Wrapped, ep_rank
from moediag.protocol import Trial
from moediag.recorder.not_applicable import NotApplicable

OnModel = Callable[[str, nn.Module, tiny.Anatomy], None]


def prepare(trial: Trial, device: torch.device, on_model: Optional[OnModel] = None) -> Wrapped:
    """Returns the wrapped model on ``device``. Calls ``on_model(when, model, anatomy)`` when it is
    ``loaded`` and when it is ``prepared``. Raises NotApplicable, on all ranks alike."""
    kind_of(trial)  # raises before anything is loaded
    if trial.model.source == "checkpoint":
        expert_parallel.launch_environment(trial)
        model = load.from_checkpoint(trial, device)
    else:
        asked = load.known(trial.model.experts_implementation)
        model = tiny.build(trial.model, trial.step.seed, experts=asked).to(device)
    anatomy = tiny.anatomy(model, trial.model)
    if on_model is not None:
        on_model(
            "loaded by rank 0" if expert_parallel.only_rank_0_loads(trial) else "loaded",
            model,
            anatomy,
        )
    checkpoint_activations(model, trial.step.checkpointing)
    wrapped = wrap(model, anatomy, trial)
    wrapped.plain_shards = replicas.plain_experts(wrapped)
    wrapped.notes += load.notes(trial)
    if on_model is not None and trial.model.source == "checkpoint":
        with wrapped.gathered():
            on_model("prepared", wrapped.model, wrapped.anatomy)
    return wrapped


def wrap(model: nn.Module, anatomy: tiny.Anatomy, trial: Trial) -> Wrapped:
    """Shards ``model`` as the trial requires, with its fix applied. Raises NotApplicable."""
    fix = content.fix(trial.fix) if trial.fix else None
    if fix is not None and hasattr(fix, "before_wrap"):
        fix.before_wrap(model, anatomy, trial.wrapper)
    kind = kind_of(trial)
    if not kind.tells_slices and trial.step.clipping != "torch":
        raise NotApplicable(
            f"wrapper {trial.wrapper.kind} clips by itself, not by clipping: {trial.step.clipping}"
        )
    wrapped = kind(model, anatomy, trial)
    if fix is not None and hasattr(fix, "after_wrap"):
        fix.after_wrap(wrapped.model, anatomy, trial.wrapper)
    wrapped.make_optimizer()
    return wrapped


def checkpoint_activations(model: nn.Module, kind: str) -> None:
    """Enables ``kind`` (none | reentrant | non-reentrant) through transformers' own switch."""
    if kind == "none":
        return
    switchable: Any = model
    switchable.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": kind == "reentrant"}
    )


def fill_uninitialized() -> None:
    """Makes torch fill newly allocated, unwritten memory with nan (torch's own switch), so that
    reading it fails every time and not by chance."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True


class Weights:
    """Records which experts this rank holds while a model is made. ``held``: the latest result (FQN
    -> the experts of the local rows)."""

    def __init__(self, trial: Trial, recorder: Any, expected: Optional[Dict[str, Any]]) -> None:
        self.trial = trial
        self.recorder = recorder
        self.expected = expected
        self.held: Dict[str, List[int]] = {}

    def examine(self, when: str, model: nn.Module, anatomy: tiny.Anatomy) -> None:
        """Examines ``model``. Does nothing without a checkpoint or a reference."""
        if self.expected is None or self.trial.model.source != "checkpoint":
            return
        rows = ownership.examine(model, anatomy, self.expected["weights"], ep_rank(self.trial))
        self.held = {row.fqn: row.held for row in rows[0]}
        self.recorder.event("weights", keep=True, **ownership.event(when, rows, self.trial))
        if when == "prepared":
            ownership.watch_use(anatomy, self._use)

    def _use(self, rows: Dict[str, int]) -> None:
        self.recorder.event("experts_used", keep=True, rows=rows)
