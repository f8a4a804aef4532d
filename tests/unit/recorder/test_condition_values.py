"""Values of the conditions that a rank has passed when it is examined."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from moediag.evidence.events import read_log
from moediag.recorder import install
from moediag.recorder.condition_values import passed


def examined(folder: Path, source: str, **names: Any) -> dict[str, tuple[bool, dict[str, str]]]:
    """By the ``if`` lines' text: what is told of a program that is examined at ``examine()``."""
    path = folder / "train.py"
    text = textwrap.dedent(source)
    path.write_text(text)
    found: list[dict[str, Any]] = []

    def examine() -> None:
        found[:] = passed(sys._getframe(1))

    code = compile(text, str(path), "exec")
    exec(code, {"examine": examine, "__name__": "train", **names})
    lines = text.splitlines()
    return {lines[one["line"] - 1].strip(): (one["holds"], one["values"]) for one in found}


class Args:
    def __init__(self) -> None:
        self.rank, self.every, self.runs = 1, 4, 0

    @property
    def main(self) -> bool:
        return self.ready()

    def ready(self) -> bool:
        self.runs += 1
        return True


def test_names_attributes_and_clauses(tmp_path: Path) -> None:
    found = examined(
        tmp_path,
        """
        for step in range(9):
            if master or step == 5:
                pass
            if args.rank == 0 and step % args.every == 0:
                pass
            elif logger is not None:
                pass
            if step == 5:
                examine()
                break
        """,
        master=False, args=Args(), logger=[],
    )  # fmt: skip
    assert found == {
        "if master or step == 5:": (True, {"master": "False", "step": "5"}),
        "if args.rank == 0 and step % args.every == 0:": (
            False, {"args.rank": "1", "step": "5", "args.every": "4"},
        ),
        "elif logger is not None:": (True, {"logger": "<class 'list'>"}),
        "if step == 5:": (True, {"step": "5"}),
    }  # fmt: skip


@pytest.mark.parametrize(
    "source",
    [
        "if args.ready():\n    pass\nexamine()",  # a call
        "if args.main:\n    pass\nexamine()",  # a property
        "if master:\n    pass\nmaster = 2\nexamine()",  # assigned since
        "if args.rank:\n    pass\nargs = None\nexamine()",
        "for master in (0, 1):\n    if master:\n        pass\nexamine()",  # tested in each turn
        "if args.rank == 0:\n    if master:\n        pass\nexamine()",  # not reached
        "def f():\n    global master\n    master = 2\nif master:\n    pass\nexamine()",
        "def f(a):\n    a.rank = 2\nif args.rank:\n    pass\nexamine()",
        "if [master]:\n    pass\nexamine()",
        "if (master and\n    examine()):\n    pass",  # it is being decided
    ],
)  # fmt: skip
def test_what_may_have_changed_or_would_run_the_program(tmp_path: Path, source: str) -> None:
    args = Args()
    found = examined(tmp_path, source, master=True, args=args)
    assert args.runs == ("main" in source or "ready" in source)
    assert "if master:" not in found and set(found) <= {"if args.rank == 0:"}


def test_the_innermost_frame_of_a_line_counts(tmp_path: Path) -> None:
    test = {"file": "a.py", "line": 3}
    inner, outer = {**test, "holds": True, "values": {"n": "1"}}, {**test, "holds": False}
    event = {"e": "conditions", "t": 1.0, "tests": [inner, {**outer, "values": {}}]}
    (tmp_path / "rank-0.events.jsonl").write_text(f"{json.dumps(event)}\n")
    (found,) = read_log(tmp_path, 0).tested.values()
    assert (found.holds, found.values) == (True, {"n": "1"})


def test_a_rank_that_is_examined(tmp_path: Path) -> None:
    """Nothing is told of a file that was written after the start, or that is gone."""
    for name, changed in (("old.py", False), ("new.py", True), ("gone.py", True)):
        path, folder = tmp_path / name, tmp_path / f"of-{name}"
        path.write_text("if main:\n    pass\nexamine()\n")
        os.utime(path, (1.0, 1.0))
        made = install(str(folder), 0, 1, of_job=True)
        if name == "new.py":
            os.utime(path, (4e9, 4e9))
        code = compile(path.read_text(), str(path), "exec")
        if name == "gone.py":
            path.unlink()
        exec(code, {"examine": made.captured, "main": 1})
        made.uninstall()
        found = read_log(folder, 0)
        assert (f"{name}:1" in found.tested) is not changed
        assert not any("recorder failed" in text for text in found.not_seen)
