"""`moediag export`: parse, call, exit code."""

from __future__ import annotations

from pathlib import Path

from moediag.lab.cli import options as o
from moediag.report import stderr, stdout


@o.with_options
def export(
    name: o.Name,
    variant: o.Variant = "",
    file: Path | None = None,
    gpus: o.Gpus = None,
    cpu: o.Cpu = None,
    stack: o.StackPairs = [],  # noqa: B006
    set_: o.SetPairs = [],  # noqa: B006
    debug: o.Debug = False,  # noqa: ARG001
) -> None:
    """Write a variant as one Python file that runs under torchrun without moediag.

    Attach it to an upstream issue: it names the library versions, builds the model, skews the
    routing, runs the steps and compares every gradient with a single process.

    Options:
    --file FILE: Write to this file.  [default: stdout]
    """
    world_size, device = o.world(gpus, cpu)
    stack_overrides = o.pairs(stack, "--stack")

    from moediag.lab.scenario import catalogue
    from moediag.lab.scenario import load as loading
    from moediag.lab.scenario import plan as planning
    from moediag.lab.upstream.export.write_file import export as write
    from moediag.lab.upstream.export.write_file import versions_of
    from moediag.report.views import put

    scenario = loading.load(catalogue.find(name), set_)
    wanted = variant or next(n for n, v in scenario.variants.items() if v is scenario.unfixed)
    plan = planning.plan(
        scenario, world_size, device, variants=[wanted], stack_overrides=stack_overrides
    )
    file_name = file.name if file else f"{scenario.name}-{wanted}.py"
    text = write(plan, wanted, versions_of(plan.trials[0].stack), file_name)
    if file is None:
        stdout.write(text)
    else:
        stderr.line(put(file, text, "--file"))
