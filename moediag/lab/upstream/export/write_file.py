"""A scenario's variant as one Python file."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from packaging.utils import canonicalize_name
from packaging.version import Version

import moediag
from moediag.errors import UsageError
from moediag.lab.scenario.plan import Plan, PlannedTrial
from moediag.lab.stacks import environment
from moediag.lab.stacks.base import cache_root, current_base
from moediag.lab.upstream.export.export_facts import Facts, facts, refused, unsupported
from moediag.protocol.tolerance import GRADIENT, SMALLEST

WIDTH = 98
TIMEOUT = 60  # seconds, of a collective on gloo
# The packages that the header pins; their dependencies follow.
NAMED = ("torch", "transformers", "accelerate")


def export(plan: Plan, variant: str, versions: dict[str, str], file_name: str) -> str:
    """The file's text, for the exact ``versions`` of NAMED as far as they are known.

    Raises UsageError if the variant needs something that a file cannot express.
    """
    planned = next(t for t in plan.trials if t.trial.variant == variant)
    missing = list(unsupported(planned))
    if "transformers" in versions:
        missing += refused(planned.trial, Version(versions["transformers"]))
    else:
        missing.append("a stack without transformers")
    if missing:
        raise UsageError(
            f"{plan.scenario.name}, variant {variant}: {'; '.join(missing)} cannot be exported",
            "Give another --variant, or attach what `moediag report RUN --markdown FILE` writes.",
        )
    known = facts(planned, versions["transformers"])
    return _environment().from_string(_template()).render(
        **_header(plan, planned, versions, file_name), **_program(known)
    )  # fmt: skip


def _header(
    plan: Plan, planned: PlannedTrial, versions: dict[str, str], file_name: str
) -> dict[str, Any]:
    scenario = plan.scenario
    own = scenario.variants[planned.trial.variant]
    pins = " ".join(f'"{name}=={versions[name]}"' for name in NAMED if name in versions)
    return {
        "title": _text(f"{scenario.title}."),
        "description": f"{_text(scenario.description or '')}\n\n{_text(f'Variant: {own.title}.')}",
        "expected": _text(own.expect.words()),
        "sources": scenario.sources,
        "install": f"pip install {pins}",
        "file_name": file_name,
        "moediag_version": moediag.__version__,
        "versions": {name: versions[name] for name in NAMED if name in versions},
        "timeout": TIMEOUT,
    }


def _text(words: str) -> str:
    """Wrapped text that cannot end the docstring around it."""
    flat = " ".join(words.split()).replace("\\", "\\\\").replace('"""', "'''")
    return textwrap.fill(flat, WIDTH)


def _program(known: Facts) -> dict[str, Any]:
    trial = known.trial
    return {
        "facts": known,
        "trial": trial,
        "wrapper": trial.wrapper,
        "step": trial.step,
        "kind": trial.wrapper.kind,
        "fix": trial.fix,
        "checkpoint": trial.model.source == "checkpoint",
        "batches": trial.skew.batches,
        "tolerance": tuple(one.of(trial.model.dtype) for one in (GRADIENT, SMALLEST)),
        "starve": [
            {"expert": s.expert, "rank": s.rank, "layer": s.layer, "from_step": s.from_step}
            for s in trial.skew.starve
        ],
    }


def literal(value: Any, indent: int = 0) -> str:
    """``value`` as Python code: on one line if it is short, else one item per line."""
    short = _literal(value)
    if len(short) <= WIDTH - 30 or not isinstance(value, dict | list):
        return short
    inner, outer = " " * (indent + 4), " " * indent
    if isinstance(value, dict):
        items = [f"{_literal(k)}: {literal(v, indent + 4)}" for k, v in value.items()]
        return "{\n" + "".join(f"{inner}{item},\n" for item in items) + outer + "}"
    items = [literal(v, indent + 4) for v in value]
    return "[\n" + "".join(f"{inner}{item},\n" for item in items) + outer + "]"


def _literal(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(k)}: {_literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return repr(value)


def _environment() -> Environment:
    environment = Environment(  # noqa: S701 - it writes Python, not HTML
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["literal"] = literal
    return environment


def _template() -> str:
    return (
        files("moediag.lab.upstream.export").joinpath("program.py.j2").read_text(encoding="utf-8")
    )


def versions_of(stack: Mapping[str, str]) -> dict[str, str]:
    """Versions without local parts; those that the stack leaves open come from its environment.

    Packages whose version is unknown, because that environment is not built, are left out.
    """
    named = {str(canonicalize_name(n)): v for n, v in stack.items()}
    ready = environment.ready(stack)
    if ready is not None:
        found = {n: v for n, v in ready.versions.items() if v}
    else:
        torch = current_base(cache_root()).torch
        found = {**({"torch": torch} if torch else {}), **named}
    return {name: found[name].split("+")[0] for name in NAMED if found.get(name)}
