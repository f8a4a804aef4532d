"""Module names are clear: no base name has two meanings, and every package documents its
purpose and interface."""

from __future__ import annotations

import importlib
import importlib.util
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "moediag").rglob("*.py"))
PACKAGES = sorted(
    ".".join(path.parent.relative_to(ROOT).parts) for path in MODULES if path.stem == "__init__"
)

# Base names used by several packages, and why they have the same meaning everywhere.
SAME: dict[str, str] = {
    # One command: its options and its implementation.
    "run": "cli parses `moediag run`, campaign runs it",
    "watch": "cli parses `moediag watch`, pipeline watches",
    "attach": "cli parses `moediag attach`, pipeline attaches",
    "api": "functions for programs, of the job tool and of the laboratory",
    "doctor": "cli parses `moediag doctor`, the module at the root checks",
    "options": "options of commands: those of all, and those of the laboratory",
    "check": "cli parses `moediag check`, pipeline checks",
    "verify": "cli parses `moediag verify`, pipeline verifies, `moediag.verify` is for programs",
    # One measurement or record: written on the rank side, read or judged on the control side.
    "events": "protocol defines the recorder's events, evidence reads them",
    "gradients": "worker measures them, diagnosis judges them",
    "measured": "protocol defines what ranks measure, detectors judge it",
    "ownership": "worker measures who holds which experts, diagnosis judges it",
    "replicas": "worker measures them, diagnosis judges them",
    "resume": "worker saves and loads, diagnosis judges what came back",
    # One thing on both sides of a launch.
    "torchrun": "the launcher: launch starts the process, ranks has its program",
    "relay": "messages between nodes: launch reads and writes them, ranks carries them",
    "rank": "what one rank executes, in a trial of ours and in a watched job",
    # One subject in several stages.
    "content": "programs and fixes: where they are, what they say, and how a rank loads them",
    "calls": "collective calls: recorder reads their arguments, words describes them",
    "nodes": "a job on several nodes: evidence reads it, blame judges it",
    "base": "what the other modules of the package build on",
    # The same part of several campaigns.
    "drive": "decides what a campaign does next",
    "question": "what a campaign was asked, from the command line's options",
    "session": "a campaign from its question to its files",
    "summary": "a campaign's results on one page",
}


def repeated() -> dict[str, list[str]]:
    """Base name -> its modules, if there is more than one."""
    found = defaultdict(list)
    for path in MODULES:
        if path.stem not in ("__init__", "__main__"):
            found[path.stem].append(str(path.relative_to(ROOT)))
    return {name: paths for name, paths in found.items() if len(paths) > 1 and paths != law(name)}


def law(name: str) -> list[str]:
    """The two modules of a law: one records, the other judges."""
    return [f"moediag/{side}/laws/{name}.py" for side in ("diagnosis", "recorder")]


def test_a_base_name_has_one_meaning() -> None:
    twice = {name: paths for name, paths in repeated().items() if name not in SAME}
    assert twice == {}, "rename one of them, or add the name to SAME with the reason"


def test_every_exception_is_for_a_repeated_name() -> None:
    assert set(SAME) <= set(repeated())


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_documents_its_purpose_and_interface(package: str) -> None:
    found = importlib.import_module(package)
    first = (found.__doc__ or "").strip().split("\n\n")[0]
    assert first.endswith("."), f"{package}: the docstring begins with a sentence"
    offered = found.__all__
    assert len(set(offered)) == len(offered)
    missing = [
        name
        for name in offered
        if not hasattr(found, name) and importlib.util.find_spec(f"{package}.{name}") is None
    ]
    assert missing == []
