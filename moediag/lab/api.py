"""The laboratory's commands as functions: ``moediag.run`` and ``moediag.check``.

Each returns the object that ``--json`` prints and prints nothing. What a command explains on stderr
is raised as :class:`moediag.errors.MoediagError`, with ``help_text``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moediag.lab.pipeline.check_result import CheckResult
    from moediag.result import RunResult

__all__ = ["check", "run"]


def run(
    scenario: str | Path,
    *,
    cpu: int | None = None,
    gpus: int | None = None,
    variants: Sequence[str] = (),
    stack: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
    repeat: int = 1,
    timeout: float | None = None,
    cost: bool = True,
    out: str | Path | None = None,
) -> RunResult:
    """Runs a scenario, as ``moediag run``: a name of the catalogue or a file.

    ``cpu``, ``gpus``: number of ranks; neither: the scenario's own, on the CPU. ``stack``: package
    -> version. ``overrides``: field -> value, as ``{"model.family": "mixtral"}``. ``cost``: time
    the fixes. ``out``: the run directory; default: a new one in moediag-runs.

        import moediag

        variants = ["unfixed", "zero-fill"]
        result = moediag.run("expert-starvation", cpu=2, variants=variants, cost=False)
        print(result.conclusion.reproduced, result.conclusion.fixes)
    """
    from moediag import arguments
    from moediag.errors import UsageError
    from moediag.lab import machine_checks
    from moediag.lab.campaign import run as runner
    from moediag.lab.campaign.engine import Display, opened
    from moediag.lab.pipeline.trials import TrialOptions
    from moediag.lab.scenario import catalogue, plan
    from moediag.lab.scenario.load import load
    from moediag.launch.settings import LaunchOptions

    if cpu is not None and gpus is not None:
        raise UsageError("cpu and gpus exclude each other", "Each of them sets the world size.")
    arguments.path("scenario", scenario)
    for name, number in (("cpu", cpu), ("gpus", gpus)):
        arguments.whole(name, number, 1, optional=True)
    arguments.whole("repeat", repeat, 1)
    arguments.seconds("timeout", timeout, optional=True)
    arguments.mapping("stack", stack, '{"transformers": "5.17.0"}', str)
    arguments.flag("cost", cost)
    arguments.mapping("overrides", overrides, '{"model.family": "mixtral"}')
    arguments.words("variants", variants, '["unfixed", "zero-fill"]', "each variant")
    arguments.path("out", out, optional=True)
    settings = [f"{field}={value}" for field, value in (overrides or {}).items()]
    loaded = load(catalogue.find(str(scenario)), settings)
    ranks = gpus or cpu or loaded.world.default
    planned = plan.plan(
        loaded, ranks, "gpu" if gpus else "cpu", variants=list(variants), repeat=repeat,
        timeout=timeout, stack_overrides=dict(stack or {}), timed=cost,
    )  # fmt: skip
    if gpus:
        machine_checks.require_gpus(gpus, planned.scenario.stack.get("torch"))
    launch = LaunchOptions()
    asked = runner.header(planned, launch)
    with opened(asked, Path(out) if out is not None else None, False, loaded.name) as journal:
        return runner.run(planned, journal, TrialOptions(launch), Display())


def check(
    config: str | Path,
    layout: Mapping[str, int],
    *,
    world: int | None = None,
    stack: Mapping[str, str] | None = None,
    wrapper: str = "",
    simulate: bool = True,
    timeout: float = 600.0,
    out: str | Path | None = None,
) -> CheckResult:
    """Checks a model and a layout before a launch, as ``moediag check``: ``config`` is a folder
    with config.json, the file, or a name that the hub's local cache has.

    ``layout``: mesh axis -> size. ``world``: number of ranks; default: the product of the axes.
    ``wrapper``: ``fsdp2`` or ``transformers``, who shards; default: by the layout. ``simulate``:
    also a step on simulated ranks.

        import moediag

        found = moediag.check("Qwen3-30B-A3B", {"dp_shard": 4})
        print(found.failing, found.undecided, [one.text for one in found.checked.findings])
    """
    from moediag import arguments
    from moediag.errors import UsageError
    from moediag.lab.pipeline.check import check as checked
    from moediag.lab.pipeline.check_options import CheckOptions

    arguments.path("config", config)
    arguments.mapping("layout", layout, '{"dp_shard": 8, "ep": 4}')
    if not layout:
        raise UsageError(
            f"layout={layout!r} cannot be used", 'Give at least one axis: {"dp_shard": 8}.'
        )
    for axis, size in layout.items():
        arguments.whole(f"layout[{axis!r}]", size, 1)
    arguments.whole("world", world, 1, optional=True)
    arguments.mapping("stack", stack, '{"transformers": "5.17.0"}', str)
    arguments.flag("simulate", simulate)
    arguments.one_of("wrapper", wrapper, ("", "fsdp2", "transformers"))
    arguments.seconds("timeout", timeout)
    arguments.path("out", out, optional=True)
    options = CheckOptions(
        str(config), layout, world, dict(stack or {}), wrapper, simulate, timeout=timeout,
        out=Path(out) if out is not None else None,
    )  # fmt: skip
    return checked(options, lambda *_: None)
