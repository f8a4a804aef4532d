"""Helpers of the end-to-end tests: runs the command in this process, with hosts shared by all runs.

A run's fork host imports torch and transformers once per stack, which takes 4 to 8 seconds. Here
the hosts live for the whole session; everything else of a run is the command's own. The tests of
the command as a program (`test_command.py`) start a process with its own hosts.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from moediag.cli import app
from moediag.errors import NoSuchRelease, StackError
from moediag.lab.launch.launcher import launcher
from moediag.lab.stacks import environment
from moediag.launch.base import Launcher, StackLike
from moediag.launch.settings import LaunchOptions

NO_INDEX = ("no network", "cannot ask for the releases", "not every index could be asked")


@dataclass(frozen=True)
class Ran:
    """One `moediag run … --json`: its exit code, stdout parsed, stderr, and its folder."""

    code: int
    result: dict[str, Any]
    progress: str
    folder: Path

    def trial(self, variant: str) -> dict[str, Any]:
        (found,) = [t for t in self.result["trials"] if t["variant"] == variant]
        return found

    def rows(self, variant: str, title: str) -> list[list[Any]]:
        """The rows of this variant in the table whose title begins so: its own table, or the one
        of all variants."""
        shared = [t["rows"] for t in self.result["tables"] if t["title"].startswith(title)]
        if shared:
            return [row[1:] for row in shared[0] if row[0] == variant]
        own = self.trial(variant)["tables"]
        (found,) = [list(t["rows"]) for t in own if t["title"].startswith(title)]
        return found

    @property
    def verdicts(self) -> dict[str, str]:
        return {t["variant"]: t["verdict"] for t in self.result["trials"]}

    @property
    def fixes(self) -> dict[str, bool]:
        return {f["variant"]: f["correct"] for f in self.result["conclusion"]["fixes"]}

    @property
    def reproduced(self) -> bool | None:
        return self.result["conclusion"]["reproduced"]

    def sides(self, variant: str) -> dict[str, tuple[str, int, list[str]]]:
        """rank -> (op, elements, parameters missing) at the first divergence."""
        ranks = self.trial(variant)["first_divergence"]["ranks"]
        return {r: (s["op"], s["numel"], s["parameters_missing"]) for r, s in ranks.items()}


@dataclass
class Hosts:
    """Stands in for moediag.lab.pipeline.trials.launcher: torchrun is not kept."""

    folder: Path
    kept: dict[str, Launcher] = field(default_factory=dict)

    def launcher(
        self, kind: str, stack: StackLike, run_folder: Path, options: LaunchOptions
    ) -> contextlib.AbstractContextManager[Launcher]:
        if kind != "fork":
            return launcher(kind, stack, run_folder, options)
        if stack.key not in self.kept:
            kept = launcher(kind, stack, self.folder, options)
            self.kept[stack.key] = kept.__enter__()
        self.kept[stack.key].options = options
        return contextlib.nullcontext(self.kept[stack.key])

    def close(self) -> None:
        for kept in self.kept.values():
            kept.close()


@dataclass
class Command:
    """`moediag`, in this process. The same command line is run once a session."""

    folder: Path
    done: dict[tuple[str, ...], Ran] = field(default_factory=dict)

    def run(self, *arguments: str, variants: Sequence[str] = ()) -> Ran:
        """`moediag run ARGUMENTS --cpu 2 --json`, unless another --cpu is given. ``variants``: only
        these."""
        arguments += tuple(word for name in variants for word in ("--variant", name))
        if arguments not in self.done:
            out = self.folder / f"run-{len(self.done)}"
            cpu = () if "--cpu" in arguments else ("--cpu", "2")
            line = ["run", *arguments, *cpu, "--json", "--out", str(out)]
            code, stdout, stderr = self.call(*line)
            assert stdout, f"moediag {' '.join(line)} ended with {code}:\n{stderr}"
            self.done[arguments] = Ran(code, json.loads(stdout), stderr, out)
        return self.done[arguments]

    def call(self, *arguments: str) -> tuple[int, str, str]:
        """(exit code, stdout, stderr) of one command line."""
        out, progress = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(progress):
            code = app.main(list(arguments))
        return code, out.getvalue(), progress.getvalue()


def need(request: Mapping[str, str]) -> None:
    """Builds the environment, or skips: there is none in the cache and no index can be asked."""
    try:
        environment.ensure(request)
    except NoSuchRelease:
        raise
    except StackError as error:
        if any(text in error.message for text in NO_INDEX):
            wanted = ", ".join(f"{name} {version}" for name, version in request.items())
            pytest.skip(f"{wanted} is not in the cache and cannot be fetched: {error.message}")
        raise
