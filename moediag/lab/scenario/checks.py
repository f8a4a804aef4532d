"""Rules about several fields that the schema cannot express."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moediag.axes import AXES
from moediag.errors import LayoutError, ScenarioError
from moediag.lab.scenario import content
from moediag.lab.scenario.explain import Problem
from moediag.lab.scenario.schema import MERGED_SECTIONS, Scenario, Variant
from moediag.lab.scenario.sections import ModelSection, ProgramSection, StarveSection
from moediag.lab.scenario.source import KeyPath, nearest

# Names that the run directory uses itself.
_TAKEN = ("cost",)
_TAKEN_PREFIXES = ("stack-", "reference-")
# With these wrappers from_pretrained divides the model over the axes that it supports.
_LOADED_SHARDED = ("fsdp2", "transformers", "accelerate")
_SHARD_THEMSELVES = ("fsdp2", "fsdp1", "ddp", "zero2", "zero3", "accelerate")
# Wrappers whose training a resume section can save and load.
_SAVED = ("fsdp2", "fsdp1", "ddp", "transformers", "accelerate")


def check(scenario: Scenario) -> Iterator[Problem]:
    """Yields every mistake in ``scenario``, in the order of the file."""
    yield from _world(scenario)
    yield from _layout(scenario, ("layout",))
    if scenario.cost is not None:
        yield from _model(scenario.cost.model, ("cost", "model"))
        for index, fix in enumerate(scenario.cost.fixes):
            yield from _fix(fix, ("cost", "fixes", index))
    yield from _content(scenario, scenario, ())
    yield from _sharding(scenario, scenario, ())
    yield from _roles(scenario)
    for name, variant in scenario.variants.items():
        at: KeyPath = ("variants", name)
        yield from _variant(name, variant, at)
        merged = scenario.merged(name)
        if variant.layout is not None:
            yield from _layout(merged, (*at, "layout"))
        yield from _content(merged, variant, at)
        yield from _sharding(merged, variant, at)


def _world(scenario: Scenario) -> Iterator[Problem]:
    world, most = scenario.world, scenario.world.max
    involved: tuple[KeyPath, ...] = tuple(
        ("world", f) for f in ("default", "min", "max", "multiple_of")
    )
    if world.default < world.min or (most is not None and world.default > most):
        span = f"at least {world.min}" if most is None else f"from {world.min} to {most}"
        message = f"{world.default} ranks, but the scenario runs on {span}"
        yield Problem(("world", "default"), message, involved=involved)
    if world.default % world.multiple_of:
        message = f"{world.default} is not a multiple of {world.multiple_of}"
        yield Problem(("world", "default"), message, involved=involved)


def _layout(scenario: Scenario, at: KeyPath) -> Iterator[Problem]:
    try:
        scenario.layout_for(scenario.world.default)
    except LayoutError as error:
        yield Problem(at, error.message, involved=(("world", "default"),))


def _content(merged: Scenario, owner: Scenario | Variant, at: KeyPath) -> Iterator[Problem]:
    """Checks model and skew against each other. Reports a problem at ``owner`` (the scenario or a
    variant) if it sets one of them; a variant that changes neither gets no problem."""
    if owner.model is not None:
        yield from _model(merged.model, (*at, "model"))
    yield from _resume(merged, owner, at)
    if owner.program is not None and merged.program is not None:
        yield from _program(merged.program, owner.program, (*at, "program"))
    if owner.skew is not None and merged.skew.routing is not None and merged.skew.starve:
        message = "routing already fixes which experts get no token: set starve to []"
        involved = tuple((*w, "skew", f) for w in ((), at) for f in ("starve", "routing"))
        yield Problem((*at, "skew"), message, involved=involved)
    own_starve = owner.skew is not None and "starve" in owner.skew.model_fields_set
    if not at or own_starve:
        for index, starve in enumerate(merged.skew.starve):
            yield from _starve(starve, merged, (*at, "skew", "starve", index), at)
        yield from _too_many(merged, (*at, "skew", "starve"), at)
    elif owner.model is not None:
        # The scenario's starvation with the variant's model.
        for index, starve in enumerate(merged.skew.starve):
            for problem in _bounds(starve, merged, ("skew", "starve", index), at):
                message = f"skew.starve[{index}].{problem.path[-1]}: {problem.message}"
                yield Problem((*at, "model"), message, involved=problem.involved)
        yield from _too_many(merged, (*at, "model"), at)


def _sharding(merged: Scenario, owner: Scenario | Variant, at: KeyPath) -> Iterator[Problem]:
    """Checks for contradictions in sharding, reported where ``owner`` sets one of the fields."""
    if merged.program is not None:  # it wraps its model itself
        return
    kind = merged.wrapper.kind
    if owner.wrapper is not None and merged.wrapper.native_fsdp and kind in _SHARD_THEMSELVES:
        message = f"from_pretrained and {kind} would both shard: set wrapper.kind to transformers"
        involved: tuple[KeyPath, ...] = (("wrapper", "kind"), (*at, "wrapper", "kind"))
        yield Problem((*at, "wrapper", "native_fsdp"), message, involved=involved)
    if owner.wrapper is not None and merged.wrapper.param_dtype is not None and kind != "fsdp2":
        message = f"needs torch's fully_shard: set wrapper.kind to fsdp2, not {kind}"
        involved = (("wrapper", "kind"), (*at, "wrapper", "kind"))
        yield Problem((*at, "wrapper", "param_dtype"), message, involved=involved)
    layouts: list[Mapping[str, Any]] = [
        merged.layout,
        merged.resume.layout if merged.resume else {},
    ]
    by_loading = [a for a in AXES if a.by_loading and any(one.get(a, 1) != 1 for one in layouts)]
    if by_loading and kind in _LOADED_SHARDED and merged.model.source == "config":
        sections = ("layout", "model", "wrapper", "resume")
        own = [s for s in sections if s in owner.model_fields_set] if at else ["layout"]
        if own:
            what = "the experts" if by_loading[0].experts_only else "the model"
            message = f"from_pretrained divides {what} over the axis {by_loading[0]}: set "
            message += "model.source to checkpoint"
            involved = (("model", "source"), ("wrapper", "kind"), ("layout", str(by_loading[0])))
            yield Problem((*at, own[0]), message, involved=involved)


def _program(merged: ProgramSection, own: ProgramSection, at: KeyPath) -> Iterator[Problem]:
    """Checks a program: ``own`` as written, ``merged`` with the scenario's name and options."""
    try:
        program = content.program(merged.name)
    except ScenarioError as error:
        yield Problem((*at, "name"), error.message)
        return
    for option, value in (merged if own.name else own).options.items():
        if option not in program.options:
            message = f"{merged.name} has no such option{nearest(option, program.options)}"
            yield Problem((*at, "options", option), message, of_key=True)
        elif mistake := program.mistake(option, value):
            yield Problem((*at, "options", option), mistake)


def _resume(merged: Scenario, owner: Scenario | Variant, at: KeyPath) -> Iterator[Problem]:
    """Checks resume, reported at the section of ``owner`` that contradicts the others."""
    resume, steps, kind = merged.resume, merged.step.steps, merged.wrapper.kind
    if resume is None:
        return
    involved: tuple[KeyPath, ...] = tuple(
        (*where, *path)
        for where in ((), at)
        for path in (("resume",), ("step", "steps"), ("wrapper", "kind"))
    )
    if (owner.resume or owner.step) and resume.after >= steps:
        path = ("resume", "after") if owner.resume else ("step", "steps")
        message = f"saving after {resume.after} of {steps} steps leaves no step to compare"
        yield Problem((*at, *path), message, involved=involved)
    message = ""
    if kind not in _SAVED:
        message = f"wrapper.kind {kind} cannot be saved by resume; it supports {', '.join(_SAVED)}"
    elif resume.through == "accelerate" and kind != "accelerate":
        message = f"accelerate needs wrapper.kind accelerate: {kind} has no save_state"
    if message and (owner.resume or owner.wrapper):
        path = ("resume", "through") if owner.resume else ("wrapper", "kind")
        yield Problem((*at, *path), message, involved=involved)


def _model(model: ModelSection, at: KeyPath) -> Iterator[Problem]:
    if model.top_k > model.experts:
        message = f"{model.top_k} is more than the {model.experts} experts"
        yield Problem((*at, "top_k"), message, involved=((*at, "experts"),))
    if model.heads % model.kv_heads:
        message = f"{model.heads} is not a multiple of kv_heads, {model.kv_heads}"
        yield Problem((*at, "heads"), message, involved=((*at, "kv_heads"),))
    if model.pretrain and model.source != "checkpoint":
        message = "only a checkpoint can be pretrained: add `source: checkpoint`"
        yield Problem((*at, "pretrain"), message, involved=((*at, "source"),))


def _starve(
    starve: StarveSection, merged: Scenario, path: KeyPath, owner: KeyPath
) -> Iterator[Problem]:
    yield from _bounds(starve, merged, path, owner)
    if starve.every is not None and starve.rank is None:
        yield Problem((*path, "every"), "repeats a rank, but no rank is given")
    elif starve.every is not None and starve.rank is not None and starve.rank >= starve.every:
        message = f"{starve.rank} is not below every, {starve.every}"
        yield Problem((*path, "rank"), message, involved=((*path, "every"),))


def _bounds(
    starve: StarveSection, merged: Scenario, path: KeyPath, owner: KeyPath
) -> Iterator[Problem]:
    model, step = merged.model, merged.step
    bounds = (
        ("expert", starve.expert, model.experts - 1, "model", "experts"),
        ("layer", starve.layer, model.layers - 1, "model", "layers"),
        ("from_step", starve.from_step, step.steps, "step", "steps"),
    )
    for field, value, most, section, name in bounds:
        # A control may end before a failure begins; a failure that never begins is a mistake.
        if value is None or value <= most or (field == "from_step" and owner):
            continue
        size = getattr(getattr(merged, section), name)
        involved: tuple[KeyPath, ...] = ((section, name), (*owner, section, name))
        message = f"{value} is above {most}: {section}.{name} is {size}"
        yield Problem((*path, field), message, involved=involved)


def _too_many(merged: Scenario, path: KeyPath, owner: KeyPath) -> Iterator[Problem]:
    """Checks that every token has top_k experts that are not starved."""
    model = merged.model
    for starve in merged.skew.starve:
        alike = {
            s.expert
            for s in merged.skew.starve
            if s.rank in (None, starve.rank) and s.layer in (None, starve.layer)
        }
        left = model.experts - len(alike)
        if left < model.top_k:
            where = "every rank" if starve.rank is None else f"rank {starve.rank}"
            message = (
                f"{left} of {model.experts} experts are left on {where} for top_k {model.top_k}"
            )
            involved = (("model", "experts"), ("model", "top_k"), (*owner, "model", "experts"))
            yield Problem(path, message, involved=involved)
            return


def _roles(scenario: Scenario) -> Iterator[Problem]:
    unfixed = [name for name, v in scenario.variants.items() if v.role == "unfixed"]
    for name, variant in scenario.variants.items():
        if variant.repairs is not None and variant.role != "fix":
            message = f"a variant with role {variant.role} cannot have repairs"
            yield Problem(("variants", name, "repairs"), message)
        elif variant.repairs is not None and variant.repairs not in unfixed:
            message = f'no unfixed variant is called "{variant.repairs}"'
            message += nearest(variant.repairs, unfixed)
            yield Problem(("variants", name, "repairs"), message)
    if not unfixed:
        yield Problem(("variants",), "one variant must have `role: unfixed`, the failure itself")


def _variant(name: str, variant: Variant, at: KeyPath) -> Iterator[Problem]:
    if name in _TAKEN or name.startswith(_TAKEN_PREFIXES):
        yield Problem(at, "the run directory uses this name itself", of_key=True)
    if variant.fix is not None:
        yield from _fix(variant.fix, (*at, "fix"))
        if variant.role != "fix":
            yield Problem((*at, "fix"), f"a variant with role {variant.role} cannot have a fix")
    changes = variant.fix or variant.stack or variant.layout
    if variant.role == "fix" and not changes and not any(_sections(variant)):
        yield Problem(at, "a fix must change something: give fix, stack or a section", of_key=True)
    yield from _expectation(variant, (*at, "expect"))


def _sections(variant: Variant) -> Iterator[bool]:
    for name in MERGED_SECTIONS:
        section = getattr(variant, name)
        yield section is not None and bool(section.model_fields_set)


def _fix(name: str, at: KeyPath) -> Iterator[Problem]:
    try:
        content.fix(name)
    except ScenarioError as error:
        yield Problem(at, error.message)


def _expectation(variant: Variant, at: KeyPath) -> Iterator[Problem]:
    expect = variant.expect
    backends = list(expect.verdict) if isinstance(expect.verdict, dict) else ["gloo"]
    clean = ["clean" in expect.verdicts(backend) for backend in backends]
    if variant.role != "fix":
        if expect.judgement is not None:
            yield Problem(
                (*at, "judgement"),
                f"only a fix can have a judgement, not a variant with role {variant.role}",
            )
        if variant.role == "control" and not all(clean):
            yield Problem((*at, "verdict"), "a control must expect clean")
    elif expect.judgement == "wrong" and all(clean):
        yield Problem((*at, "judgement"), "a wrong fix cannot expect clean")
    elif expect.judgement != "wrong" and not any(clean):
        message = "a fix that does not expect clean is wrong: add `judgement: wrong`"
        yield Problem((*at, "verdict"), message)
