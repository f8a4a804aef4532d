"""What the worker of a check is given: the configuration, the ranks and the trial."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from moediag.axes import CP, EP, TP, Layout
from moediag.errors import LayoutError, UsageError
from moediag.lab.pipeline import check_fit
from moediag.lab.pipeline.check_options import CheckOptions
from moediag.lab.pipeline.single_process import OFFLINE
from moediag.launch.settings import LaunchOptions
from moediag.protocol import CheckTask, Trial, WrapperSpec, read_json

CONFIG = "config.json"
# Meshes of simulated ranks are of the CPU.
_SETTINGS = LaunchOptions(environment={**OFFLINE, "CUDA_VISIBLE_DEVICES": ""})


def completed(options: CheckOptions) -> CheckOptions:
    """Returns them with the defaults of a question about memory. Raises UsageError and
    LayoutError."""
    number_of_ranks(Layout(options.layout), options.world)
    if options.card:
        check_fit.capacity(options.card)
    if options.card or options.batch or options.reserved or options.recompute != "none":
        return dataclasses.replace(
            options, batch=options.batch or 1, length=options.length or check_fit.LENGTH
        )
    return options


def settings(config: Path) -> LaunchOptions:
    """Returns the settings of a host that imports the model once, for all that is asked of it."""
    try:
        kind = read_json(config).get("model_type")
    except (OSError, ValueError, AttributeError):
        kind = None
    return dataclasses.replace(_SETTINGS, families=(kind,) if isinstance(kind, str) else ())


def trial_of(options: CheckOptions) -> Trial:
    """Returns what the worker is given. Raises UsageError and LayoutError."""
    layout = Layout(options.layout)
    wrapper = wrapper_of(options)
    if (options.param_dtype or options.reduce_dtype) and wrapper != "fsdp2":
        raise UsageError(
            "--param-dtype and --reduce-dtype are arguments of fully_shard, and here "
            "from_pretrained shards",
            "Leave them out, or add --wrapper fsdp2",
        )
    return Trial(
        name="check", scenario="check", variant="check",
        task=CheckTask(
            str(find_config(options.config)), options.simulate, options.length, options.dtype,
            options.batch, options.recompute, options.brief, options.reserved,
        ),
        world_size=number_of_ranks(layout, options.world),
        layout={str(axis): size for axis, size in layout.axes.items()},
        wrapper=WrapperSpec(
            kind=wrapper, reshard_after_forward=None, param_dtype=options.param_dtype,
            reduce_dtype=options.reduce_dtype,
        ),
        record=False, timeout=options.timeout,
    )  # fmt: skip


def find_config(name: str) -> Path:
    """Returns the config.json of a folder, a file or a hub name in the local cache. Raises
    UsageError."""
    path = Path(name)
    for found in (path, path / CONFIG):
        if found.is_file():
            return found.resolve()
    if path.is_dir():
        raise UsageError(f"{name} has no {CONFIG}", "Give the folder of a model, or the file.")
    cached = _cached(name)
    if len(cached) > 1:
        raise UsageError(
            f"{name}: the cache has {len(cached)} snapshots, and no refs/main that names one",
            f"Give the path of one, for example {cached[0]}",
        )
    if cached:
        return cached[0]
    raise UsageError(
        f"{name}: no such file or folder, and no model of that name in {_cache()}",
        f"Nothing is downloaded. Type `hf download {name} {CONFIG}` first, or give a path.",
    )


def _cached(name: str) -> list[Path]:
    """Returns the config.json of the snapshot that ``refs/main`` names, as the hub's client reads
    it; without that file those of all snapshots."""
    model = _cache() / f"models--{name.replace('/', '--')}"
    main = model / "refs" / "main"
    commit = main.read_text(encoding="utf-8").strip() if main.is_file() else "*"
    return sorted(model.glob(f"snapshots/{commit}/{CONFIG}"))


def _cache() -> Path:
    """Returns the hub's cache, by the variables that its client reads."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()


def number_of_ranks(layout: Layout, world: int | None) -> int:
    """Returns the number of ranks. Those of tensor parallelism may lie inside expert parallelism,
    as transformers counts them: then their size is no factor. Raises LayoutError."""
    product, tp, ep = layout.world_size, layout.size(TP), layout.size(EP)
    if world is None or world == product:
        return product
    if tp > 1 and ep % tp == 0 and world * tp == product:
        return world
    raise LayoutError(
        f"{layout}, but --world is {world}",
        f"The product of the axes is {product}."
        + (f" With {TP} inside {EP} it is {product // tp}." if tp > 1 and ep % tp == 0 else ""),
    )


def wrapper_of(options: CheckOptions) -> str:
    layout = Layout(options.layout)
    if options.wrapper:
        return options.wrapper
    divided = any(not axis.data_parallel and axis != CP for axis in layout.active)
    return "transformers" if divided else "fsdp2"
