"""The fixes that exist: the modules of moediag/lab/step/fixes, read without importing them, because
they import torch."""

from __future__ import annotations

import ast
import importlib.resources
from functools import cache
from typing import TYPE_CHECKING

from moediag.records import dataclass

if TYPE_CHECKING:
    from moediag.lab.scenario.schema import Variant


@dataclass(frozen=True, slots=True)
class Fix:
    name: str
    """In kebab-case."""
    summary: str
    """What it does, in one sentence."""
    source: str
    """Who proposed it."""


@cache
def known_fixes() -> dict[str, Fix]:
    """Every fix by its name, in the order of the names."""
    folder = importlib.resources.files("moediag") / "lab" / "step" / "fixes"
    files = [f for f in folder.iterdir() if f.name.endswith(".py") and not f.name.startswith("_")]
    found = (_fix(f.name[:-3].replace("_", "-"), f.read_text(encoding="utf-8")) for f in files)
    return {fix.name: fix for fix in sorted(found, key=lambda fix: fix.name)}


def described(variant: Variant) -> tuple[str, str]:
    """What the fix of ``variant`` does and who proposed it; "" where that is not said. A source in
    the scenario stands above that of the fix module."""
    fix = known_fixes().get(variant.fix or "")
    summary, source = (fix.summary, fix.source) if fix is not None else (variant.title, "")
    return summary, variant.source or source


def _fix(name: str, code: str) -> Fix:
    said = {
        target.id: ast.literal_eval(node.value)
        for node in ast.parse(code).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in ("SUMMARY", "SOURCE")
    }
    return Fix(name, str(said.get("SUMMARY", "")), str(said.get("SOURCE", "")))
