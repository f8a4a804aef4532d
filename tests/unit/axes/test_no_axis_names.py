"""Axis names are written only in moediag/axes; other modules ask the class."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from moediag.axes import AXES

PACKAGE = Path(__file__).parents[3] / "moediag"

# (file, text) -> why the text is not our mesh axis.
ALLOWED = {
    ("protocol/programs.py", "tp"): "a value that scenarios give to the option expert_tp",
    ("lab/step/programs/tp_router.py", "tp"): "the same value, read",
    ("protocol/programs.py", "ep"): "a value that scenarios give to the option divide",
    ("lab/step/programs/fsdp2_two_meshes.py", "ep"): "the same value, read",
    ("lab/stacks/offline.py", "cp"): "CPython in the tag of a wheel",
    ("lab/step/fixes/ep_router_gradient.py", "tp"): "what transformers calls a dim of its mesh",
}


def texts(source: str) -> Iterator[str]:
    """Every string constant of a module, docstrings too: they never equal a name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def spelled() -> set[tuple[str, str]]:
    names = {str(axis) for axis in AXES}
    found = set()
    for path in PACKAGE.rglob("*.py"):
        where = path.relative_to(PACKAGE).as_posix()
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
