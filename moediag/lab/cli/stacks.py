"""`moediag stacks`: environments of other library versions, also for machines without a network."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moediag.errors import UsageError
from moediag.lab.cli import options as o
from moediag.report import stderr, stdout

if TYPE_CHECKING:
    from moediag.lab.stacks.built import EnvironmentInfo

app = typer.Typer(
    help="List, build and remove environments of other library versions.",
    epilog="Example: moediag stacks build transformers=4.53.2",
    rich_markup_mode=None,
)


@app.command(name="list", epilog="Example: moediag stacks list --json")
def list_(as_json: o.Json = False) -> None:
    """List built environments with size and last use."""
    from moediag.lab.stacks.built import list_environments

    found = list_environments()
    if as_json:
        rows = [dataclasses.asdict(info) for info in found]
        stdout.data({"environments": rows})
        return
    if not found:
        stderr.line("nothing is built yet; `moediag run` builds what a scenario needs")
    now = datetime.now(timezone.utc)
    for info in found:
        stdout.line(_line(info, now))


@app.command(epilog="Example: moediag stacks build --python-version 3.12 --out bundle")
@o.with_options
def build(
    packages: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PACKAGE=VERSION…", help="One stack.  [default: every stack of the catalogue]"
        ),
    ] = None,
    python_version: str | None = None,
    platform: str | None = None,
    out: Path | None = None,
    no_color: o.NoColor = False,
) -> None:
    """Build environments now, or bundle them for a machine without a network.

    Options:
    --python-version X.Y: With --out: the Python of the other machine.
    --platform ARCH: With --out: x86_64 or aarch64, of the other machine.
    --out DIR: Write a bundle that installs without a network.
    """
    if out is None and (python_version or platform):
        raise UsageError(
            "--python-version and --platform describe another machine",
            "Add --out DIR for the folder to carry there.",
        )
    wanted = [o.pairs(packages, "stacks build")] if packages else _catalogue()

    from moediag.lab.campaign.engine import shown

    if out is not None:
        import sys

        from moediag.lab.stacks.offline import make_bundle

        version = python_version or f"{sys.version_info[0]}.{sys.version_info[1]}"
        with shown(no_color) as observer:
            bundle = make_bundle(
                wanted,
                version,
                out,
                functools.partial(observer.stack, "bundle"),
                platform,
            )
        stdout.line(f"{bundle.folder}  {len(bundle.wheels)} wheels  {_bytes(bundle.size)}")
        return

    from moediag.lab.stacks.environment import ensure

    for request in wanted:
        label = _label(request)
        with shown(no_color) as observer:
            stack = ensure(request, functools.partial(observer.stack, label))
        stdout.line(f"{stack.key}  {label}  {stack.seconds:.1f} s  {stack.python}")


@app.command(epilog="Example: moediag stacks clean --older-than 30")
@o.with_options
def clean(
    keys: Annotated[
        list[str] | None, typer.Argument(metavar="KEY…", help="Keys as shown by `stacks list`.")
    ] = None,
    older_than: Annotated[float | None, typer.Option(min=0)] = None,
    everything: Annotated[bool, typer.Option("--all", help="Remove all.")] = False,
) -> None:
    """Remove environments, except those in use.

    Options:
    --older-than DAYS: Remove those not used for this many days.
    """
    from moediag.lab.stacks.built import clean as remove

    for removed in remove(tuple(keys or ()), older_than, everything):
        what = f"kept: {removed.reason}" if removed.reason else f"freed {_bytes(removed.freed)}"
        stdout.line(f"{removed.key}  {what}")


def _catalogue() -> list[dict[str, str]]:
    """Returns every stack that a trial of the catalogue requests, without duplicates."""
    from moediag.lab.scenario import catalogue
    from moediag.lab.scenario.load import load
    from moediag.lab.scenario.plan import plan

    found: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
    for name in catalogue.names():
        for planned in plan(load(catalogue.find(name)), 2, "cpu").trials:
            found.setdefault(tuple(sorted(planned.stack.items())), dict(planned.stack))
    return [request for request in found.values() if request]


def _line(info: EnvironmentInfo, now: datetime) -> str:
    shown = ("transformers", "accelerate", "torch", "python")
    versions = ", ".join(f"{name} {info.versions[name]}" for name in shown if name in info.versions)
    days = (now - info.last_used).days
    used = "today" if days < 1 else f"{days} d ago"
    state = " in use" * info.in_use + " broken" * info.broken
    return f"{info.key}  {_bytes(info.size):>8}  used {used:9}  {info.kind}  {versions}{state}"


def _label(request: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in request.items())


def _bytes(size: float) -> str:
    """Returns the size in decimal units, as `df -H` and disks use."""
    units: Sequence[str] = ("B", "kB", "MB", "GB")
    for unit in units:
        if size < 1000 or unit == units[-1]:
            return f"{size:.0f} {unit}" if size >= 10 or unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError
