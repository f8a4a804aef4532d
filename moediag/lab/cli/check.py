"""`moediag check`: parse, call, exit code."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from moediag.errors import UsageError
from moediag.lab.cli import options as o

if TYPE_CHECKING:
    from moediag.lab.pipeline.check_cost import Bandwidth


class Wrapper(str, Enum):
    auto = "auto"
    fsdp2 = "fsdp2"
    transformers = "transformers"


class Dtype(str, Enum):
    own = ""
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


_DTYPES = "|".join(one.value for one in Dtype if one.value)


class Recompute(str, Enum):
    none = "none"
    layers = "layers"
    selective = "selective"


class Optimizer(str, Enum):
    adamw = "adamw"
    adamw_fused = "adamw-fused"
    adamw_8bit = "adamw-8bit"
    sgd = "sgd"
    muon = "muon"
    adafactor = "adafactor"
    none = "none"


@o.with_options
def check(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="A folder with config.json, the file, or a hub name that the local cache has.",
        ),
    ] = "",
    layout: str = "",
    sweep: str = "",
    script: str = "",
    world: Annotated[int | None, typer.Option(min=1)] = None,
    stack: o.StackPairs = [],  # noqa: B006
    wrapper: Wrapper = Wrapper.auto,
    plan_only: bool = False,
    length: Annotated[int, typer.Option(min=0, show_default=False)] = 0,
    card: str = "",
    batch: Annotated[int | None, typer.Option(min=1)] = None,
    recompute: Recompute = Recompute.none,
    dtype: Dtype = Dtype.own,
    param_dtype: Dtype = Dtype.own,
    reduce_dtype: Dtype = Dtype.own,
    optimizer: Optimizer = Optimizer.adamw,
    master_weights: bool = False,
    accumulate: bool = False,
    reserved: bool = False,
    bandwidth: str = "",
    step_time: Annotated[float | None, typer.Option(min=0.0001)] = None,
    steps: Annotated[int, typer.Option(min=1)] = 2,
    nproc_per_node: Annotated[int | None, typer.Option(min=1)] = None,
    timeout: Annotated[float, typer.Option(min=1.0)] = 600.0,
    out: o.Out = None,
    details: bool = False,
    html: o.Html = None,
    junit: o.Junit = None,
    as_json: o.Json = False,
    no_color: o.NoColor = False,
    debug: o.Debug = False,  # noqa: ARG001
) -> None:
    """Check a model, a layout and releases before you launch a job.

    Needs no GPU and no weights. The library's own code shards the model without weights, on
    simulated ranks. With --script, your own program is run on them. Exit code 1: something fails;
    3: it could not be decided.

    Options:
    --layout AXIS=N,…: Mesh axes and sizes: dp_shard=64,ep=8.
    --sweep AXIS=N..M,…: Instead of --layout: check every layout of these ranges (each size twice
        the one before), of --world ranks if given: dp_shard=8..512,ep=1..64.
    --script 'PROGRAM …': Instead of CONFIG and --layout: your own program, as torchrun gets it. It
        is run on simulated ranks.
    --world N: Number of ranks.  [default: the product of the axes]
    --wrapper auto|fsdp2|transformers: Who shards: torch's fully_shard, or from_pretrained; auto:
        from_pretrained for ep, tp and pp.
    --plan-only: Do not simulate a step.
    --length N: Tokens of a sequence, which cp cuts.  [default: 4,096 for the memory]
    --card GIB|NAME: Say whether a step fits on this card, and what would make it fit: 80, H100.
    --batch N: Sequences of a rank; measures the peak memory of a step.  [default: 1 with --card]
    --recompute none|layers|selective: What backward computes again: whole layers, or all but matrix
        products and attention.
    --dtype float32|bfloat16|float16: Dtype that from_pretrained is given.  [default: the
        configuration's]
    --param-dtype float32|bfloat16|float16: In which fully_shard gathers and computes.  [default:
        the parameters']
    --reduce-dtype float32|bfloat16|float16: In which gradients are reduced.  [default: that of the
        computation]
    --optimizer adamw|adamw-fused|adamw-8bit|sgd|muon|adafactor|none: Whose states are counted in
        the memory.
    --master-weights: Count a float32 copy of each parameter, with float32 states, in the optimizer.
    --accumulate: Count the gradients of earlier micro-batches of the same step.
    --reserved: Also count what torch's allocator reserves: a step at full depth, some seconds more.
    --bandwidth IN[/BETWEEN]: GB/s that one rank can send inside its node and between nodes; adds
        the communication time of FSDP2's collectives.
    --step-time S: With --bandwidth: seconds of a step, for the share.
    --steps N: With --script: stop after N optimizer steps.
    --nproc-per-node N: Ranks of a node, for --script and --bandwidth.  [default: 8]
    --timeout S: End the check after this many seconds.
    --details: Print findings, costs and the plan too.
    """
    chosen = o.views(as_json, html=html, junit=junit)
    from moediag.lab.campaign.engine import shown
    from moediag.lab.pipeline import check as checker
    from moediag.lab.pipeline import (
        check_page,
        check_script,
        check_script_page,
        check_sweep,
        check_sweep_page,
    )
    from moediag.lab.pipeline.check_options import CheckOptions
    from moediag.report import answer_views

    pins = o.pairs(stack, "--stack")
    with shown(no_color) as display:

        def tell(text: str, done: float | None) -> None:
            display.stack("check", text, done)

        if script:
            _of_script(config, layout or sweep, world)
            ran = check_script.check_script(
                check_script.ScriptOptions(
                    script, world or 1, nproc_per_node, steps, pins, timeout, out
                ),
                tell,
            )
            page, folder = check_script_page.answer(ran), ran.folder
        else:
            _of_config(config, layout, sweep, reserved)
            options = CheckOptions(
                config=config, layout={} if sweep else _axes(layout), world=world, stack=pins,
                wrapper="" if wrapper is Wrapper.auto else wrapper.value, simulate=not plan_only,
                length=length, batch=batch or 0, recompute=recompute.value, card=card,
                dtype=dtype.value, param_dtype=param_dtype.value,
                reduce_dtype=reduce_dtype.value, optimizer=optimizer.value, master=master_weights,
                accumulate=accumulate, reserved=reserved,
                bandwidth=_bandwidth(bandwidth, nproc_per_node, step_time),
                timeout=timeout, out=out,
            )  # fmt: skip
            if sweep:
                swept = check_sweep.sweep(sweep, options, tell)
                page, folder = check_sweep_page.answer(swept, details), swept.folder
            else:
                found = checker.check(options, tell)
                page, folder = check_page.answer(found, details), found.folder
    raise typer.Exit(answer_views.show(page, folder / checker.RESULT, as_json, no_color, chosen))


def _bandwidth(text: str, per_node: int | None, step: float | None) -> Bandwidth | None:
    """Parses ``450/50``. Raises UsageError."""
    if not text:
        if step is not None:
            raise UsageError("--step-time needs --bandwidth", "For example: --bandwidth 450/50")
        return None
    from moediag.lab.pipeline.check_cost import Bandwidth

    inside, _, between = text.partition("/")
    try:
        near, far = float(inside), float(between or inside)
    except ValueError:
        near = far = 0.0
    if min(near, far) <= 0:
        raise UsageError(
            f"--bandwidth {text!r} is not of the form IN or IN/BETWEEN, in GB/s",
            "For example: --bandwidth 450/50",
        )
    return Bandwidth(near, far, per_node or 8, step)


def _of_script(config: str, layout: str, world: int | None) -> None:
    """Raises UsageError unless the options are those of --script."""
    if config or layout or world is None:
        raise UsageError(
            "--script needs --world, and none of CONFIG, --layout and --sweep",
            "For example: moediag check --script 'train.py --config c.yaml' --world 64",
        )


def _of_config(config: str, layout: str, sweep: str, reserved: bool) -> None:
    """Raises UsageError unless a configuration and a layout, or a range of them, are given."""
    if not config or bool(layout) == bool(sweep) or (sweep and reserved):
        raise UsageError(
            "a check needs CONFIG and one of --layout and --sweep; --reserved needs --layout",
            "For example: moediag check ./Qwen3-30B-A3B --layout dp_shard=64,ep=8",
        )


def _axes(text: str) -> dict[str, int]:
    """Parses ``dp_shard=64,ep=8``. Raises UsageError."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not (name.strip() and size.strip().isdecimal()) or name.strip() in found:
            raise UsageError(
                f"--layout {text!r}: {part!r} is not of the form AXIS=N, or is repeated",
                "For example: --layout dp_shard=64,ep=8",
            )
        found[name.strip()] = int(size)
    return found
