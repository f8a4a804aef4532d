"""Axis names are written only in moediag/axes; other modules ask the class."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from moediag.axes import AXES

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "moediag"
CONTENT = ROOT / "scenarios"

# (file, text) -> why the text is not our mesh axis.
ALLOWED = {
    ("programs/tp_router.py", "tp"): "a value of its option expert_tp",
    ("programs/fsdp2_two_meshes.py", "ep"): "a value of its option divide",
    ("lab/stacks/offline.py", "cp"): "CPython in the tag of a wheel",
    ("fixes/ep_router_gradient.py", "tp"): "what transformers calls a dim of its mesh",
}


def texts(source: str) -> Iterator[str]:
    """Every string constant of a module, docstrings too: they never equal a name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def spelled() -> set[tuple[str, str]]:
    names = {str(axis) for axis in AXES}
    found = set()
    for path in (*PACKAGE.rglob("*.py"), *CONTENT.rglob("*.py")):
        top = CONTENT if path.is_relative_to(CONTENT) else PACKAGE
        where = path.relative_to(top).as_posix()
        if not where.startswith("axes/"):
            found |= {(where, t) for t in texts(path.read_text(encoding="utf-8")) if t in names}
    for path in PACKAGE.rglob("*.j2"):
        quoted = re.findall(r"""["'](\w+)["']""", path.read_text(encoding="utf-8"))
        found |= {(path.relative_to(PACKAGE).as_posix(), t) for t in quoted if t in names}
    return found


def test_no_axis_name_is_written_outside_its_class() -> None:
    assert spelled() - set(ALLOWED) == set(), "ask moediag.axes instead"


def test_every_exception_is_still_needed() -> None:
    assert set(ALLOWED) - spelled() == set()
