"""`moediag run`: parse, call, exit code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moediag.errors import UsageError
from moediag.lab.cli import options as o
from moediag.report import stdout

if TYPE_CHECKING:
    from moediag.lab.campaign.sweep.session import SweepOptions


@o.with_options
def run(
    context: typer.Context,
    name: o.NameOrNone = None,
    every: o.All = False,
    variant: o.Variants = [],  # noqa: B006 - typer copies defaults
    gpus: o.Gpus = None,
    cpu: o.Cpu = None,
    share_gpu: o.ShareGpu = False,
    stack: o.StackPairs = [],  # noqa: B006
    set_: o.SetPairs = [],  # noqa: B006
    launcher: o.LauncherOption = o.LauncherKind.auto,
    nnodes: o.Nnodes = 1,
    rdzv_endpoint: o.Rendezvous = None,
    node_rank: o.NodeRank = None,
    shared: o.Shared = None,
    silence: o.Silence = 20.0,
    repeat: o.Repeat = 1,
    timeout: o.Timeout = None,
    no_cost: bool = False,
    quiescence: o.Quiescence = 3.0,
    out: o.Out = None,
    resume: o.Resume = False,
    dry_run: o.DryRun = False,
    as_json: o.Json = False,
    no_color: o.NoColor = False,
    debug: o.Debug = False,  # noqa: ARG001 - main takes it out, wherever it stands
) -> None:
    """Run a scenario and judge each variant of it.

    Without --cpu or --gpus it runs on the CPU, with the scenario's own number of ranks. The unfixed
    code, each fix and each control runs on real ranks; their collectives are compared between
    ranks and their gradients with a single-process reference.

    Options:
    --no-cost: Do not measure what each fix costs.
    """
    world_size, device = o.where(gpus, cpu, share_gpu)
    o.nodes(nnodes, rdzv_endpoint, node_rank, launcher.value, shared, every, resume)
    stack_overrides = o.pairs(stack, "--stack")
    _one_or_all(name, every, variant, set_)

    from moediag.launch.settings import LaunchOptions

    launch = LaunchOptions(
        quiescence=quiescence, silence=silence, nnodes=nnodes, rdzv_endpoint=rdzv_endpoint,
        node_rank=node_rank, shared=shared,
    )  # fmt: skip
    if name is None:
        from moediag.lab.campaign.sweep.session import SweepOptions

        options = SweepOptions(
            world_size, device, o.launcher_for(launcher, nnodes), repeat, timeout,
            stack_overrides, launch, timed=not no_cost,
        )  # fmt: skip
        if dry_run:
            from moediag.lab.campaign import dry_run as dry
            from moediag.lab.campaign.sweep import session

            plans = (one.plan for one in session.plan_all(options) if one.plan)
            dry.show([*dry.trials(plans)], as_json)
            return
        raise typer.Exit(_all(options, out, resume, o.command(context), as_json, no_color))

    from moediag.lab.campaign import run as runner
    from moediag.lab.campaign.engine import opened, shown
    from moediag.lab.pipeline.trials import TrialOptions
    from moediag.lab.scenario import catalogue
    from moediag.lab.scenario import load as loading
    from moediag.lab.scenario import plan as planning
    from moediag.report import consoles, json_view, page, terminal, views

    scenario = loading.load(catalogue.find(name), set_)
    plan = planning.plan(
        scenario,
        world_size or scenario.world.default,
        device,
        variants=variant,
        launcher=o.launcher_for(launcher, nnodes),
        repeat=repeat,
        timeout=timeout,
        stack_overrides=stack_overrides,
        timed=not no_cost,
    )
    if dry_run:
        from moediag.lab.campaign import dry_run as dry

        dry.show([*dry.trials([plan])], as_json)
        return
    ranks = world_size or scenario.world.default
    o.require_gpus(device, ranks // nnodes, plan.scenario.stack.get("torch"))
    asked = runner.header(plan, launch, o.command(context))
    with opened(asked, out, resume, scenario.name) as journal, shown(no_color) as display:
        result = runner.run(plan, journal, TrialOptions(launch), display)
    if as_json:
        stdout.write(json_view.render(result))
    else:
        terminal.render(result, consoles.output(no_color), views.short(journal.folder))
    raise typer.Exit(page.exit_code(result))


def _one_or_all(name: str | None, every: bool, variant: list[str], set_: list[str]) -> None:
    """Raises UsageError unless either one scenario or --all is given."""
    if every and name is not None:
        raise UsageError(f"--all runs the whole catalogue, so {name} cannot be given too")
    if not every and name is None:
        from moediag.lab.scenario import catalogue

        o.print_definitions({one.name: one.title for one in catalogue.summaries()})
        raise UsageError("no scenario was named", "Type: moediag run NAME. --all runs them all.")
    for option, given in (("--variant", variant), ("--set", set_)):
        if every and given:
            raise UsageError(
                f"{option} {given[0]} applies to one scenario, --all runs every one",
                "Name the scenario: moediag run NAME.",
            )


def _all(
    options: SweepOptions, out: Path | None, resume: bool, command: tuple[str, ...],
    as_json: bool, no_color: bool,
) -> int:  # fmt: skip
    """Returns the exit code."""

    from moediag.lab.campaign.engine import opened, shown
    from moediag.lab.campaign.sweep import session
    from moediag.lab.campaign.sweep.summary import answer
    from moediag.report import answer_views, views

    ranks = (options.world_size or 1) // options.launch.nnodes
    o.require_gpus(options.device, ranks, options.stack.get("torch"))
    planned = session.plan_all(options)
    asked = session.header(planned, options, command)
    with opened(asked, out, resume, "all") as journal, shown(no_color) as display:
        found = session.sweep(planned, options, journal, display)
    page = answer(found, str(views.short(journal.folder)))
    return answer_views.show(page, journal.folder, as_json, no_color, {})
