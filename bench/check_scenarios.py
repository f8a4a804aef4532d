"""Prints what simulated ranks show of each scenario that fails loudly, beside its expectation.

    python -m bench.check_scenarios [--only TEXT] [--jobs N] > reports/check-scenarios.md

The step of a scenario runs as the program of `moediag check --script`: one process for each of its
ranks, on fake process groups. Its expectation is what real ranks are held to (`moediag run`).
Unfixed variants that must hang or mismatch on gloo are run, and one control of each scenario.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.torchrun import ROOT
from moediag.diagnosis import diagnose
from moediag.errors import MoediagError
from moediag.lab.pipeline.check_script import RankRead, Simulation, simulate
from moediag.lab.scenario import catalogue
from moediag.lab.scenario.load import load
from moediag.lab.scenario.plan import PlannedTrial, plan
from moediag.lab.stacks import environment
from moediag.protocol import attempt_folder
from moediag.result import FAILURES, Diagnosis

LOUD = {"hang", "collective-mismatch", "crash"}
PARTED = LOUD - {"crash"}
STEPS = 1000  # a scenario ends by itself
BOUND = 240.0  # seconds for all ranks of a variant


@dataclass(frozen=True)
class Row:
    planned: PlannedTrial
    ranks: tuple[RankRead, ...] = ()
    found: Diagnosis | None = None
    problem: str = ""
    seconds: float = 0.0

    @property
    def expected(self) -> set[str]:
        assert self.planned.expected is not None
        return {*self.planned.expected.verdicts("gloo")}

    @property
    def parted(self) -> bool:
        return self.found is not None and self.found.verdict in FAILURES

    @property
    def named(self) -> bool:
        """Whether the ranks are those that real ranks show."""
        wanted = self.planned.expected.culprits if self.planned.expected is not None else None
        return self.found is not None and (wanted is None or [*self.found.culprits] == wanted)

    @property
    def why(self) -> str:
        """Why nothing was predicted."""
        told = (one.problem or one.unseen for one in self.ranks)
        return self.problem or next(filter(None, told), "the calls agree to the end")

    @property
    def answer(self) -> str:
        """What simulated ranks say, in a word."""
        if self.parted and not self.expected & LOUD:
            return "FALSE ALARM"
        if self.parted:
            return "predicted" if self.named else "predicted, other ranks named"
        if self.expected & LOUD:
            return "not seen"
        return "no alarm"


def variants(only: str) -> tuple[list[PlannedTrial], list[PlannedTrial]]:
    """The unfixed variants that hang or mismatch on gloo, each scenario's followed by a control,
    and those that crash."""
    part: list[PlannedTrial] = []
    crash: list[PlannedTrial] = []
    for name in catalogue.names():
        scenario = load(catalogue.find(name))
        if only not in name:
            continue
        loud, controls = [], []
        for one in plan(scenario, None, "cpu", timed=False).trials:
            role = scenario.variants[one.trial.variant].role
            if one.repeat == 0 and role == "control":
                controls.append(one)
            elif one.repeat == 0 and role == "unfixed" and one.expected is not None:
                verdicts = {*one.expected.verdicts("gloo")}
                loud += [one] * bool(verdicts & PARTED)
                crash += [one] * (verdicts == {"crash"})
        part += [*loud, *controls[: len(loud)][:1]]
    return part, crash


def run(planned: PlannedTrial, folder: Path) -> Row:
    began = time.monotonic()
    try:
        stack = environment.ensure(planned.stack)
    except MoediagError as error:
        return Row(planned, problem=f"its environment cannot be built: {error.message}")
    trial = folder / attempt_folder(0) / "trial.json"
    trial.parent.mkdir(parents=True)
    planned.trial.write(trial.parent)
    world = planned.trial.world_size
    asked = Simulation(
        [str(stack.python), "-m", "moediag.ranks.entry", str(trial)], world, world, STEPS, BOUND,
        os.pathsep.join([str(ROOT), *map(str, stack.pythonpath)]), tuple(range(1, world)),
    )  # fmt: skip
    ranks, _, compared = simulate(asked, folder, lambda *_: None)
    recorded = any(seen.collectives for seen in compared.ranks.values())
    found = diagnose(compared) if recorded else None
    return Row(planned, ranks, found, seconds=time.monotonic() - began)


def page(rows: list[Row], crash: list[PlannedTrial]) -> Iterator[str]:
    yield "# Loud scenarios on real and simulated ranks"
    yield ""
    yield "What real ranks show is the expectation of the scenario, which `moediag run` checks on"
    yield "gloo. Simulated ranks run the same step as `moediag check --script` runs a program. They"
    yield "compare calls up to the first read of data that other ranks would have sent."
    yield ""
    yield "```console"
    yield "$ python -m bench.check_scenarios > reports/check-scenarios.md"
    yield "```"
    yield ""
    yield f"- Hangs and mismatches: {_count([row for row in rows if row.expected & LOUD])}."
    yield f"- Controls, one of each scenario: {_count([r for r in rows if not r.expected & LOUD])}."
    yield f"- Crashes: {len(crash)} variants, not run: a simulated rank that raises is not judged,"
    yield "  because the simulation may be the cause."
    yield ""
    yield "| scenario | variant | real ranks | simulated ranks | call, or why not |"
    yield "|---|---|---|---|---|"
    for row in rows:
        told = row.found.cause if row.found is not None and row.parted else row.why
        trial, text = row.planned.trial, " ".join(told.replace("|", "/").split())
        real = " or ".join(sorted(row.expected))
        yield f"| {trial.scenario} | {trial.variant} | {real} | {row.answer} | {text[:420]} |"
    yield ""
    names = ", ".join(f"{one.trial.scenario}/{one.trial.variant}" for one in crash)
    yield f"Not run: {names or 'none'}."


def _count(rows: list[Row]) -> str:
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.answer] = counts.get(row.answer, 0) + 1
    told = ", ".join(f"{number} {answer}" for answer, number in sorted(counts.items()))
    return f"{len(rows)}: {told or 'none'}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="scenarios whose name contains this")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    part, crash = variants(given.only)
    with ThreadPoolExecutor(given.jobs) as pool:
        rows = list(pool.map(_row, part))
    sys.stdout.write("\n".join(page(rows, crash)) + "\n")
    return 0


def _row(planned: PlannedTrial) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        row = run(planned, Path(folder))
    name = f"{planned.trial.scenario}/{planned.trial.variant}"
    sys.stderr.write(f"{name}: {row.answer}: {row.why[:300]} ({row.seconds:.0f} s)\n")
    return row


if __name__ == "__main__":
    sys.exit(main())
