"""Runs a bisect from its question to its files, and estimates its cost before it starts."""

from __future__ import annotations

import contextlib
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import moediag
from moediag import hardware
from moediag.errors import MoediagError
from moediag.lab.campaign.bisect import answer_page
from moediag.lab.campaign.bisect import state as states
from moediag.lab.campaign.bisect.afterwards import afterwards
from moediag.lab.campaign.bisect.beyond import Beyond
from moediag.lab.campaign.bisect.commits.clone import Clone
from moediag.lab.campaign.bisect.drive import drive, with_end
from moediag.lab.campaign.bisect.follow import Follow
from moediag.lab.campaign.bisect.prober import MakeProber, Prober, made
from moediag.lab.campaign.bisect.question import Question
from moediag.lab.campaign.bisect.search.answer import Answer
from moediag.lab.campaign.bisect.search.rates import Rate
from moediag.lab.campaign.bisect.search.search import Search, most_probes
from moediag.lab.campaign.bisect.state import State
from moediag.lab.campaign.engine import Display, resumable
from moediag.lab.campaign.engine.journal import JOURNAL_FILE
from moediag.lab.campaign.executors import HERE, Choice, Maker
from moediag.lab.stacks import environment
from moediag.lab.stacks.base import cache_root, current_base
from moediag.protocol import write_json
from moediag.records import dataclass
from moediag.report import answer_views
from moediag.result import RESULT_FILE, devices

REPORT_FILE = "report.md"
RUNS = Path("moediag-runs")  # folder of earlier bisects
# Without measurements: a probe is mostly imports, and on two cores they took 10 to 20 s.
GUESS = 15.0
# A guess as well: seconds to build one environment, most of them to fetch packages.
BUILD = 20.0


def run(
    question: Question,
    out: Path | None,
    resume: bool,
    command: Sequence[str],
    make: MakeProber,
    display: Display,
    jobs: int = 1,
    clone: Clone | None = None,
    executor: Choice = HERE,
    begun: Callable[[Maker[Prober]], None] = lambda _: None,
) -> tuple[answer_page.Report, Path]:
    """Returns the report and its folder. The folder has ``result.json`` and ``report.md`` beside
    the journal and the probes' run directories. ``clone``: where to search for the commit;
    ``executor``: what runs the probes; ``begun``: gets what makes them.

    Raises UsageError for a folder that is unusable or belongs to another bisect, Interrupted after
    Ctrl-C, and MoediagError if nothing can be probed.
    """
    name = f"bisect-{question.scenario.name}"
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(states.opened(question.header(command), out, resume, name))
        folder = state.folder
        asked = question.over(state.releases)
        prober = stack.enter_context(made(make, asked, folder, display, executor))
        begun(prober)
        search = drive(asked, state, prober, display, jobs)
        asked = with_end(asked, state)
        beyond: dict[str, Beyond] = {}
        if state.target is not None:
            follow = Follow(state, prober, display, state.target)
            with resumable(state.journal, state.done):
                beyond = dict(afterwards(asked, search, follow, clone, folder))
        report = _report(asked, state, search, beyond, executor)
        page = answer_page.answer(report)
        write_json(folder / RESULT_FILE, page.to_json())
        (folder / REPORT_FILE).write_text(answer_views.markdown(page, level=3), encoding="utf-8")
    return report, folder


# ------------------------------------------------------------------------ the report


def _report(
    question: Question, state: State, search: Search, beyond: Mapping[str, Beyond], executor: Choice
) -> answer_page.Report:
    answer, target = search.answer, state.target
    assert answer is not None
    return answer_page.Report(
        package=question.package,
        scenario=question.scenario.name,
        answer=answer,
        releases=state.releases,
        verdicts=search.verdicts,
        probes=state.probes,
        signatures=target.signatures if target else (),
        match=str(question.asked.match),
        reproduce=tuple(_reproduce(question, answer, state.releases)),
        environment=_environment(question, executor),
        beyond=beyond,
        extras=state.extras,
    )


def _reproduce(question: Question, answer: Answer, releases: Sequence[str]) -> list[str]:
    """Returns a command for each release at a boundary, or for the bad end without one."""
    wanted = {answer.end} if not answer.boundaries else set()
    for boundary in answer.boundaries:
        wanted |= {boundary.bad} | ({boundary.good} if boundary.good is not None else set())
    known = {r.version: r for r in question.releases}
    lines = []
    for place in sorted(wanted):
        with contextlib.suppress(MoediagError):
            lines.append(_command(question, question.request(known[releases[place]])))
    return lines


def _command(question: Question, request: dict[str, str]) -> str:
    """Returns the command that repeats a probe."""
    asked = question.asked
    words = ["moediag", "run", asked.name or question.scenario.name]
    for variant in (question.variant, *question.controls):
        words += ["--variant", variant]
    words += devices.options(asked.device, question.world_size)
    for package, version in request.items():
        words += ["--stack", f"{package}={version}"]
    for override in question.scenario.overrides:  # "--set FIELD=VALUE"
        words += override.split(" ", 1)
    return shlex.join(words)


def _environment(question: Question, executor: Choice) -> dict[str, str]:
    torch = current_base(cache_root()).torch
    held = {**question.asked.hold}
    facts: dict[str, Any] = {
        "moediag": moediag.__version__,
        "python": question.python,
        "torch": held.get("torch", torch) if question.package != "torch" else "as searched",
        "held": ", ".join(f"{n} {v}" for n, v in held.items() if n != "torch"),
        "ranks": f"{question.world_size} on {question.backend}",
    }
    if executor.here:
        machine = hardware.machine()
        facts |= {name: machine[name] for name in ("os", "arch", "cores")}
        facts["gpus"] = ", ".join(machine["gpus"])
    else:  # each probe's result names its machine
        facts["machines"] = f"those of {executor.kind}"
    return {name: str(value) for name, value in facts.items() if value}


# ------------------------------------------------------------------------ before it begins


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a bisect will cost."""

    question: Question
    probes: int  # at most, in a clean history
    built: int  # environments that exist
    mean: float  # seconds per probe
    measured: int  # number of probes of earlier bisects behind ``mean``; 0: a guess

    @property
    def to_build(self) -> int:
        """Environments to build, at most."""
        return min(self.probes, len(self.question.versions) - self.built)

    @property
    def seconds(self) -> float:
        return self.probes * self.mean + self.to_build * BUILD

    def to_json(self) -> dict[str, Any]:
        q = self.question
        return {
            "scenario": q.scenario.name,
            "variant": q.variant,
            "controls": list(q.controls),
            "declared": list(q.declared),
            "package": q.package,
            "releases": list(q.versions),
            "bad": q.bad,
            "good": q.good,
            "window": q.asked.window,
            "match": str(q.asked.match),
            "hold": dict(q.asked.hold),
            "probes_at_most": self.probes,
            "environments_built": self.built,
            "environments_to_build_at_most": self.to_build,
            "seconds_per_probe": round(self.mean, 1),
            "measured_probes": self.measured,
            "seconds_at_most": round(self.seconds, 1),
        }

    def lines(self) -> list[str]:
        from moediag.result import wording

        q = self.question
        asked = q.asked
        what = "the first bad release" + (" and the first good one after it" * asked.window)
        if q.good and q.versions.index(q.good) > q.versions.index(q.bad) and not asked.window:
            what = "the first good release"
        ends = f"bad {q.bad}, good {q.good or 'to be found, in growing steps'}"
        held = ", ".join(f"{n} {v}" for n, v in asked.hold.items())
        day = (
            "companions of each release's own day"
            if q.package == "transformers"
            else ("with " + ", ".join(f"{n} {v}" for n, v in q.pins.items()))
        )
        basis = (
            f"mean of {wording.plural(self.measured, 'probe')} made here"
            if self.measured
            else "a guess: no bisect was made here yet"
        )
        return [
            f"{q.scenario.name}: {what} of {q.package}",
            f"releases   {len(q.versions)}, {q.versions[0]} to {q.versions[-1]} ({ends})",
            f"each probe {q.variant}, expected {' or '.join(q.declared)}; controls "
            f"{', '.join(q.controls)}; {q.world_size} ranks on {q.backend}",
            f"versions   {'; '.join(filter(None, (day, held and f'held: {held}')))}",
            f"failure    learned from {wording.plural(asked.calibrate, 'trial')} on {q.bad}, "
            f"compared {asked.match}",
            f"probes     at most {self.probes} if it is one stretch; {self.built} of "
            f"{len(q.versions)} environments are built",
            "           and 2 at each boundary where companions changed too",
            f"time       at most {wording.seconds(self.seconds)}: "
            f"{self.mean:.0f} s a probe, {basis}",
            *self._building(),
        ]

    def _building(self) -> list[str]:
        from moediag.result import wording

        if not self.to_build:
            return []
        what = wording.plural(self.to_build, "environment")
        return [f"           and at most {what} to build, {BUILD:.0f} s each, a guess"]


def forecast(question: Question) -> Forecast:
    """Returns the forecast. Starts no process, builds nothing and makes no query."""
    options = question.options(question.versions, Rate())
    built = 0
    for release in question.releases:
        with contextlib.suppress(MoediagError):
            built += environment.ready(question.request(release)) is not None
    known = _earlier(question)
    mean = statistics.fmean(known) if known else GUESS
    return Forecast(question, most_probes(len(question.versions), options), built, mean, len(known))


def _earlier(question: Question) -> list[float]:
    """Returns the seconds of launched probes of earlier bisects on this platform in
    ``moediag-runs``; of this scenario if it has any."""
    own: list[float] = []
    others: list[float] = []
    wanted = question.header(()).question
    for path in sorted(RUNS.glob(f"*/{JOURNAL_FILE}")):
        try:
            earlier = states.read(path.parent)
        except MoediagError:
            continue
        there = earlier.journal.header.question
        if any(there.get(name) != wanted[name] for name in ("platform", "Python", "device")):
            continue
        spent = [p.seconds for p in earlier.probes if p.seconds is not None and p.evidence]
        (own if there.get("scenario") == wanted["scenario"] else others).extend(spent)
    return own or others
