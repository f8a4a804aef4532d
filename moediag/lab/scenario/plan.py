"""Plans a run: scenario x variant x stack x repeat -> every trial that it will launch.

Pure: starts nothing and looks nothing up.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moediag.axes import AXES, WORLD, Layout
from moediag.errors import LayoutError, ScenarioError, UsageError
from moediag.lab.scenario import content
from moediag.lab.scenario.schema import Expectation, Scenario
from moediag.lab.scenario.sections import CostSection, SkewSection, WrapperSection
from moediag.lab.scenario.source import nearest
from moediag.protocol import (
    TRAINER_KINDS,
    CostTask,
    ModelSpec,
    ProgramTask,
    RecorderSpec,
    ResumeTask,
    SkewSpec,
    Starve,
    StepSpec,
    StepTask,
    Task,
    TrainerTask,
    Trial,
    WrapperSpec,
)
from moediag.records import dataclass
from moediag.result import devices

COST = "cost"  # name and variant of the trial that times the fixes
BACKENDS = {name: kind.backend for name, kind in devices.DEVICES.items()}
# Fields of StepSpec that change how a step is computed, not its correct result.
_HOW = (
    "checkpointing", "accumulate_sync", "clipping", "foreach", "fused", "parameter_groups",
    "fill_uninitialized",
)  # fmt: skip
LAUNCHERS = {name: kind.launcher for name, kind in devices.DEVICES.items()}


@dataclass(frozen=True, slots=True)
class PlannedTrial:
    """A trial, with what the ranks need not know."""

    trial: Trial
    stack: dict[str, str]  # requested versions
    expected: Expectation | None = None  # None for the cost trial
    repeat: int = 0  # from 0
    # Trials with the same key share a single-process reference run; None: needs none.
    reference_key: str | None = None
    requires: tuple[str, ...] = ()  # Python packages without which it is not applicable
    note: str | None = None  # what a reader of the result must know about this variant
    repairs: str = ""  # for a fix: the unfixed variant that it should fix, "" for all
    what: str = ""  # for a fix: what it does
    source: str = ""  # for a fix: who proposed it


@dataclass(frozen=True, slots=True)
class Plan:
    """All trials of a run."""

    scenario: Scenario
    trials: tuple[PlannedTrial, ...]
    overrides: tuple[str, ...] = ()  # every --set and --stack as typed, for the result


def plan(
    scenario: Scenario,
    world_size: int | None,
    device: str,
    variants: Sequence[str] = (),
    launcher: str = "auto",
    repeat: int = 1,
    timeout: float | None = None,
    stack_overrides: Mapping[str, str] | None = None,
    timed: bool = True,
) -> Plan:
    """Returns all trials of a run, in order: the variants as the scenario lists them, each
    ``repeat`` times or as often as the variant says, then, if ``timed``, the timing of the fixes.

    ``world_size`` None means the scenario's default, empty ``variants`` all of them.
    ``stack_overrides`` replace the scenario's versions; a variant with its own version
    (``upgrade``) keeps it. Raises UsageError, LayoutError, ScenarioError.
    """
    if device not in BACKENDS:
        raise UsageError(f"device {device!r}: one of {', '.join(BACKENDS)}")
    if repeat < 1:
        raise UsageError(f"--repeat {repeat}: at least 1")
    ranks = scenario.world.default if world_size is None else world_size
    _check_world(scenario, ranks)
    given = dict(stack_overrides or {})
    planned = scenario.model_copy(update={"stack": {**scenario.stack, **given}})
    build = _Build(
        planned,
        ranks,
        devices.DEVICES[device],
        LAUNCHERS[device] if launcher == "auto" else launcher,
        scenario.timeout if timeout is None else timeout,
    )
    selected = _selected(scenario, variants)
    trials = [
        build.step(name, number)
        for name in selected
        for number in range(max(repeat, scenario.variants[name].repeats))
    ]
    trials += build.cost(selected) if timed else []
    texts = [f"--stack {package}={version}" for package, version in given.items()]
    texts += ["--share-gpu"] * devices.DEVICES[device].shared + ["--no-cost"] * (not timed)
    return Plan(planned, tuple(trials), (*scenario.overrides, *texts))


def _selected(scenario: Scenario, variants: Sequence[str]) -> list[str]:
    for name in variants:
        if name not in scenario.variants:
            raise UsageError(
                f"--variant {name}: {scenario.name} has no such variant"
                f"{nearest(name, scenario.variants)}",
                f"`moediag show {scenario.name}` lists them.",
            )
    return [name for name in scenario.variants if not variants or name in variants]


def _check_world(scenario: Scenario, ranks: int) -> None:
    world = scenario.world
    most = "" if world.max is None else f" to {world.max}"
    step = "" if world.multiple_of == 1 else f", in multiples of {world.multiple_of}"
    too_many = world.max is not None and ranks > world.max
    if ranks < world.min or too_many or ranks % world.multiple_of:
        raise LayoutError(
            f"{scenario.name} runs on {world.min}{most or ' or more'} ranks{step}, not on {ranks}",
            f"Use another --cpu or --gpus, e.g. {world.default}.",
        )


@dataclass(frozen=True, slots=True)
class _Build:
    scenario: Scenario
    world_size: int
    kind: devices.Kind
    launcher: str
    timeout: float

    def step(self, name: str, repeat: int) -> PlannedTrial:
        variant, merged = self.scenario.variants[name], self.scenario.merged(name)
        self._check_ranks(name, merged)
        # No variant's name contains a dot, so no other trial can have this name.
        trial = self._trial(merged, name if repeat == 0 else f"{name}.{repeat + 1}", name)
        task = _task(merged, self.world_size)
        trial = dataclasses.replace(trial, role=variant.role, fix=variant.fix, task=task)
        stack = dict(merged.stack)
        # A program computes its own reference.
        key = None if isinstance(task, ProgramTask) else reference_key(trial, stack)
        return PlannedTrial(
            trial,
            stack,
            variant.expect,
            repeat,
            key,
            tuple(variant.requires),
            variant.note,
            variant.repairs or "",
            *(content.described(variant) if variant.role == "fix" else ("", "")),
        )

    def cost(self, selected: Sequence[str]) -> Iterator[PlannedTrial]:
        """Yields the trial that times the selected fixes on the scenario's own stack; none without
        a ``cost`` section or without such a fix."""
        section = self.scenario.cost
        if section is None:
            return
        own: dict[str, None] = {}
        for name in selected:
            variant = self.scenario.variants[name]
            if variant.fix and self.scenario.merged(name).stack == self.scenario.stack:
                own.setdefault(variant.fix)
        if not own:
            return
        trial = self._trial(self.scenario, COST, COST)
        yield PlannedTrial(
            dataclasses.replace(
                trial,
                role="control",
                skew=SkewSpec(),
                task=_cost(section, section.fixes or list(own)),
            ),
            dict(self.scenario.stack),
        )

    def _trial(self, merged: Scenario, name: str, variant: str) -> Trial:
        axes = merged.layout_for(self.world_size).axes
        layout = {str(axis): size for axis, size in axes.items()}
        return Trial(
            name=name,
            scenario=merged.name,
            variant=variant,
            world_size=self.world_size,
            layout=layout,
            backend=self.kind.backend,
            launcher=self.launcher,
            shared_gpu=self.kind.shared,
            environment=devices.environment(self.kind, self.timeout),
            model=ModelSpec(**merged.model.model_dump()),
            wrapper=_wrapper(merged.wrapper, layout, self.world_size),
            step=StepSpec(**merged.step.model_dump()),
            skew=_skew(merged.skew, self.world_size),
            recorder=RecorderSpec(**merged.recorder.model_dump()),
            timeout=self.timeout,
        )

    def _check_ranks(self, name: str, merged: Scenario) -> None:
        named = [(f"skew.starve[{i}].rank", s.rank) for i, s in enumerate(merged.skew.starve)]
        culprits = self.scenario.variants[name].expect.culprits or []
        named += [(f"variants.{name}.expect.culprits", rank) for rank in culprits]
        for field, rank in named:
            if rank is not None and rank >= self.world_size:
                raise ScenarioError(
                    f"{merged.name}: {field}: there is no rank {rank} among "
                    f"{self.world_size} ranks (0 to {self.world_size - 1}), variant {name}",
                    "Use more ranks with --cpu or --gpus, or another rank with --set.",
                )


def _task(merged: Scenario, world_size: int) -> Task:
    """What a variant's trial does; every option of a program is written out."""
    program, resume = merged.program, merged.resume
    if program is not None:
        return ProgramTask(program.name, content.program(program.name).filled(program.options))
    if resume is not None:
        after = Layout.resolve(resume.layout, world_size) if resume.layout else Layout({})
        layout = {str(axis): size for axis, size in after.axes.items()}
        return ResumeTask(**{**resume.model_dump(), "layout": layout})
    return TrainerTask() if merged.wrapper.kind in TRAINER_KINDS else StepTask()


def _wrapper(section: WrapperSection, layout: Mapping[str, int], world_size: int) -> WrapperSpec:
    """Returns the wrapper; names of mesh axes in ``distributed_config`` become their sizes."""
    sizes = {**{str(axis): 1 for axis in AXES}, **layout, WORLD: world_size}
    values = section.model_dump()
    asked = values["distributed_config"]
    if asked is not None:
        values["distributed_config"] = {
            k: sizes.get(v, v) if isinstance(v, str) else v for k, v in asked.items()
        }
    return WrapperSpec(**values)


def _skew(section: SkewSection, world_size: int) -> SkewSpec:
    """Returns the skew with ``every`` expanded to one entry per rank."""
    starve: list[Starve] = []
    for entry in section.starve:
        ranks: Sequence[int | None] = (entry.rank,)
        if entry.every is not None and entry.rank is not None:
            ranks = range(entry.rank, world_size, entry.every)
        starve += [Starve(entry.expert, rank, entry.layer, entry.from_step) for rank in ranks]
    return SkewSpec(starve, section.batches, section.routing)


def _cost(section: CostSection, fixes: Sequence[str]) -> CostTask:
    values: dict[str, Any] = section.model_dump(exclude={"model", "fixes"})
    return CostTask(fixes=list(fixes), model=ModelSpec(**section.model.model_dump()), **values)


def _layout_decides_batches(trial: Trial) -> bool:
    batches = trial.skew.batches
    shared = Layout(trial.layout).shares_batches(batches) and batches != "identical"
    return batches == "per-replica" or shared


def reference_key(trial: Trial, stack: Mapping[str, str]) -> str:
    """Returns a key that is equal for trials with the same correct gradients: same model, data,
    routing, step and stack. The fix, the sharding, checkpointing, and the implementation of
    experts, optimizer and clipping do not change the correct gradients."""
    step, model = dataclasses.asdict(trial.step), dataclasses.asdict(trial.model)
    for how in _HOW:
        del step[how]
    del model["experts_implementation"]
    decisive = {
        "model": model,
        "step": step,
        "skew": dataclasses.asdict(trial.skew),
        # The reference measures the effect of rounding to this dtype.
        "computes_in": trial.computes_in,
        # Who shares a batch follows from the layout.
        "layout": trial.layout if _layout_decides_batches(trial) else {},
        "world_size": trial.world_size,
        "stack": dict(stack),
    }
    text = json.dumps(decisive, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
