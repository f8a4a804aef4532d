"""Checks one configuration and layout, part by part. A part that fails costs only itself."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any, Dict, List

from moediag.axes import CP, PP, Layout
from moediag.lab.check import configured as reading
from moediag.lab.check import (
    divisions,
    indexed_pieces,
    own_structure,
    planned,
    real_ranks,
    sharding,
    simulated_group,
    simulated_step,
)
from moediag.lab.check.configured import Configured
from moediag.lab.check.plan_rules import PLAN
from moediag.lab.check.simulated_group import ChildRaised, Raised, in_child
from moediag.lab.check.tensor_places import listed
from moediag.protocol import FAILS, Checked, CheckFinding, CheckTask, Trial
from moediag.recorder.not_applicable import NotApplicable

_TINY = "tiny model of the same class, gloo"


def run(trial: Trial, folder: Path) -> Checked:
    """Returns the answer. A failure of the release is part of it."""
    task, layout = trial.task, Layout(trial.layout)
    assert isinstance(task, CheckTask)
    try:
        configured = reading.read(task.config)
    except NotApplicable as reason:
        return Checked(problem=str(reason))
    except Exception as error:
        return Checked(problem=simulated_group.raised(error).words)
    own = list(divisions.of_length(layout, task.length))
    own += own_structure.findings(configured, notes=not task.brief)
    if task.simulate:
        own += own_structure.of_forward(configured, folder)
    try:
        asked = sharding.words(trial)
    except NotApplicable as reason:
        told = [*own, *divisions.unplanned(configured.config, layout)]
        return Checked(findings=told, problem=str(reason), **_about(configured))
    began = time.monotonic()
    try:
        found = _planned(configured, trial, folder)
    except ChildRaised as error:
        refused = _refused(error.args[0], configured, asked, trial, folder)
        return dataclasses.replace(refused, findings=[*own, *refused.findings])
    found = dataclasses.replace(found, findings=[*found.findings, *own])
    seconds: Dict[str, float] = {"plan": time.monotonic() - began}
    not_seen = [
        *found.not_seen,
        *([f"the exchange of keys and values, or of heads, along {CP}"] * (layout.size(CP) > 1)),
        *_quantised(configured),
        *_beside(configured),
        *own_structure.defaults(configured),
    ]
    if not task.simulate:
        return dataclasses.replace(found, not_seen=not_seen, seconds=seconds)
    began = time.monotonic()
    try:
        steps = simulated_step.simulate(configured, trial, folder)
    except NotApplicable as reason:
        steps = Checked(not_seen=[f"the schedule: {reason}"])
    except ChildRaised as error:
        steps = _unsimulated(error.args[0], configured, trial, folder)
    seconds["schedule"] = time.monotonic() - began
    return dataclasses.replace(
        found,
        findings=[*found.findings, *steps.findings],
        simulated_units=steps.simulated_units,
        simulated_layout=steps.simulated_layout,
        cases=steps.cases,
        not_seen=[*not_seen, *steps.not_seen],
        seconds=seconds,
    )


def _planned(configured: Configured, trial: Trial, folder: Path) -> Checked:
    """Returns the plan; of a pipeline that of the stage that holds most, with what others hold.
    Raises ChildRaised."""
    stages = Layout(trial.layout).size(PP)
    each = trial.world_size // stages

    def plan(stage: int) -> Checked:
        def run() -> Checked:
            joined = simulated_group.joined(stage * each, trial.world_size)
            with joined, indexed_pieces.installed():
                return planned.of_model(configured, trial, folder)

        found: Checked = in_child(run, folder)
        return found

    # One of these holds most: none in between has more layers than the second.
    plans = {stage: plan(stage) for stage in sorted({0, min(1, stages - 1), stages - 1})}
    most = max(plans, key=lambda stage: divisions.held(plans[stage].plan))
    found = plans[most]
    told = [*divisions.of_stages(plans, most), *divisions.shared_by_stages(plans)]
    return dataclasses.replace(found, findings=[*found.findings, *told])


def _refused(
    why: Raised, configured: Configured, asked: str, trial: Trial, folder: Path
) -> Checked:
    """Returns the answer if the model was not sharded: a finding if the release refuses the layout
    or raises the same on real ranks, else a problem."""
    about = dict(_about(configured), asked=asked)
    # What the release says by itself; anything else may come from the simulation.
    if why.kind in ("ValueError", "NotImplementedError") and "distributed" in why.where:
        finding = CheckFinding(PLAN, FAILS, f"the layout is refused: {why.words}", why.where)
        return Checked(findings=[finding], **about)
    at = f" at {why.where}" if why.where else ""
    problem = Checked(problem=f"{why.words}{at}", **about)
    if why.refused or not why.where:
        return problem
    try:
        ranks, again = real_ranks.first_raised(configured, trial, folder)
    except NotApplicable as reason:
        told = f"{problem.problem} (not tried on real ranks: {reason})"
        return dataclasses.replace(problem, problem=told)
    if again is None or (again.kind, again.where) != (why.kind, why.where):
        return problem
    text = f"loading raises {again.words}, on {ranks} real ranks ({_TINY})"
    return Checked(findings=[CheckFinding(PLAN, FAILS, text, again.where)], **about)


def _about(configured: Configured) -> Dict[str, Any]:
    return dict(
        model=configured.model.__name__, model_type=configured.config.model_type,
        experts=configured.experts, top_k=configured.top_k,
    )  # fmt: skip


def _unsimulated(why: Raised, configured: Configured, trial: Trial, folder: Path) -> Checked:
    """Returns what a step on real ranks says if the simulated one failed."""
    at = f" at {why.where}" if why.where else ""
    ended = f"the schedule: the simulated step ended with {why.words}{at}"
    try:
        ranks, found = real_ranks.first_raised(configured, trial, folder, step=True)
    except NotApplicable as reason:
        return Checked(not_seen=[f"{ended}; not tried on real ranks: {reason}"])
    if found is None:
        return Checked(not_seen=[f"{ended}; a step on {ranks} real ranks ran ({_TINY})"])
    text = f"a training step raises {found.words}, on {ranks} real ranks ({_TINY})"
    if Layout(trial.layout).size(PP) > 1 and "does not require grad" in found.text:
        text = (
            "the stages of from_pretrained are made for generation and send no gradients back "
            f"(torchtitan and Megatron-LM train pipelines): {text}"
        )
    return Checked(findings=[CheckFinding(simulated_step.SCHEDULE, FAILS, text, found.where)])


def _quantised(configured: Configured) -> List[str]:
    method = getattr(configured.config, "quantization_config", None)
    if method is None:
        return []
    named = method.get("quant_method") if isinstance(method, dict) else None
    return [
        f"the quantisation of the checkpoint ({named or 'of some kind'}): the plan is that of the "
        "same model without it"
    ]


def _beside(configured: Configured) -> List[str]:
    """What a composite configuration has and the planned model has not."""
    if not configured.beside:
        return []
    return [
        f"{listed(configured.beside)} of the configuration: {configured.model.__name__} is the "
        "text model alone. To plan the whole model, name its class in architectures"
    ]
