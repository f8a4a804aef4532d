"""What a draft needs from a run directory: the scenario, the stack, the exported file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moediag import hardware
from moediag.errors import MoediagError, UsageError
from moediag.lab.scenario import load as loading
from moediag.lab.scenario import plan as planning
from moediag.lab.scenario.schema import Scenario, Variant
from moediag.lab.stacks import environment
from moediag.lab.upstream import stack_information
from moediag.lab.upstream.draft import Material, Program, draft, failing, inlined
from moediag.lab.upstream.draft_sentences import releases
from moediag.lab.upstream.export.write_file import NAMED, export
from moediag.lab.upstream.templates import TEMPLATES, upstream
from moediag.records import dataclass
from moediag.report import again
from moediag.result import RunResult, TrialResult
from moediag.result.run_result import SCENARIO_FILE

TABLES = "tables"  # in place of a project
# Fields of a variant that change nothing in the program.
_WORDS = {"role", "title", "source", "note", "repairs", "expect", "repeats", "requires", "stack"}
_SAME = ("os", "kernel", "arch")  # facts that identify the machine


@dataclass(frozen=True, slots=True)
class Written:
    """A draft for a project."""

    project: str
    text: str
    #: Without text if there is no exported file.
    program: Program

    @property
    def repository(self) -> str:
        return TEMPLATES[self.project].repository

    @property
    def attachment(self) -> Program | None:
        """The exported file if it did not fit into the text."""
        return None if inlined(self.text, self.program) or not self.program.text else self.program


def of_runs(
    loaded: Sequence[tuple[RunResult, Path]], project: str, say: Callable[[str], None]
) -> Written | None:
    """What `moediag report --markdown` writes for these runs, or None if it writes tables. ``say``:
    gets what a user should know.

    Raises UsageError if a draft for ``project`` was requested and there is none.
    """
    if project == TABLES:
        return None
    if len(loaded) != 1:
        if project:
            raise UsageError(
                f"--for {project}: a draft is about one run", "Give a single run directory."
            )
        return None
    result, folder = loaded[0]
    found = write(result, folder, project, say=say)
    if found is None and project:
        raise UsageError(
            f"--for {project}: nothing failed in {folder}, so there is nothing to report",
            "Without --for, --markdown writes tables.",
        )
    return found


def write(
    result: RunResult, folder: Path, project: str = "", variant: str = "", began: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> Written | None:  # fmt: skip
    """The draft about the failure in the run directory ``folder``.

    ``project`` defaults to the one that the scenario's sources or stack name; ``variant`` selects
    the trial. None if nothing failed or the project is unknown. Raises UsageError for a project
    that is not in templates.TEMPLATES.
    """
    if project and project not in TEMPLATES:
        raise UsageError(f"--for {project}: one of {', '.join(TEMPLATES)}, {TABLES}")
    trial = failing(result, variant)
    if trial is None:
        return None
    scenario = _scenario(folder, say)
    if not project:
        if scenario is None:
            return None
        own = scenario.variants[trial.variant].stack if trial.variant in scenario.variants else {}
        project = upstream(scenario.sources, {**scenario.stack, **own}) or ""
        if not project:
            return None
    material = Material(
        system=system(result, trial),
        program=program(result, trial, scenario),
        title=result.scenario,
        began=began,
    )
    if scenario is not None:
        material = replace(material, **_of_scenario(scenario, result, trial))
    text = draft(project, result, trial, material)
    home = str(Path.home())
    text = text.replace(f"{home}/", "~/") if len(home) > 1 else text  # others will read it
    return Written(project, text, material.program)


def _of_scenario(scenario: Scenario, result: RunResult, trial: TrialResult) -> dict[str, Any]:
    """The fields of Material that the scenario's author wrote."""
    described = trial.met and not result.overrides  # the description is about this failure
    variants = scenario.variants
    own = variants.get(trial.variant)
    same = [
        name for name, one in variants.items() if own is not None and _program(one) == _program(own)
    ]
    return {
        "title": scenario.title,
        "about": scenario.description if described else "",
        "titles": {name: one.title for name, one in variants.items()},
        "releases": releases(result, trial, same),
        "sources": tuple(source for source in scenario.sources if "://" in source),
    }


def _program(variant: Variant) -> dict[str, Any]:
    """What a variant changes besides the releases."""
    return variant.model_dump(exclude=_WORDS)


def _scenario(folder: Path, say: Callable[[str], None]) -> Scenario | None:
    """The scenario as it ran, with every --set; None if this is not a run of a scenario, or if the
    file cannot be used, which is said."""
    path = folder / SCENARIO_FILE
    if not path.exists():
        return None
    try:
        return loading.load(path)
    except (MoediagError, OSError) as error:
        say(f"the scenario of this run cannot be used: {error}")
        return None


# ------------------------------------------------------------------------ the stack that failed


def system(result: RunResult, trial: TrialResult) -> list[str]:
    """Lines from the stack's own Python if it still exists, else from the result."""
    here = hardware.machine()
    same = all(result.machine.get(name) == here[name] for name in _SAME)
    request = {n: v for n, v in trial.stack.items() if v and n not in ("python", "torch", "nccl")}
    stack = None
    if same and request:
        try:
            stack = environment.ready(request)
        except MoediagError:
            stack = None
    if same and stack is not None and _is(stack.versions, trial.stack):
        lines = stack_information.of_stack(stack).lines()
    else:
        lines = [f"- moediag: {result.moediag_version}"]
        lines += [
            f"- {name}: {version or 'not installed'}" for name, version in trial.stack.items()
        ]
        lines += [f"- {name}: {_words(value)}" for name, value in result.machine.items()]
    ranks = f"{trial.world_size} ranks, {trial.backend or 'backend unknown'}"
    return [*lines, f"- launched: {ranks}{f', {trial.launcher}' if trial.launcher else ''}"]


def _is(have: Mapping[str, str | None], ran: Mapping[str, str | None]) -> bool:
    return all(have.get(name) == ran.get(name) for name in ("torch", "transformers", "accelerate"))


def _words(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


# ------------------------------------------------------------------------ the program


def program(result: RunResult, trial: TrialResult, scenario: Scenario | None) -> Program:
    """The trial as a file that torchrun runs, or only the command of moediag."""
    command = again.command(result, trial)
    if scenario is None:
        return Program(command=command)
    name = f"{scenario.name}-{trial.variant}.py"
    versions = {n: v.split("+")[0] for n in NAMED if (v := trial.stack.get(n))}
    try:
        plan = planning.plan(
            scenario, trial.world_size, again.device(trial), variants=[trial.variant]
        )
        text = export(plan, trial.variant, versions, name)
    except MoediagError as error:
        problem = error.message.partition(": ")[2] or error.message
        return Program(command=command, problem=problem)
    run = f"torchrun --nproc-per-node {trial.world_size} {name}"
    return Program(name, text, command, run=run)
