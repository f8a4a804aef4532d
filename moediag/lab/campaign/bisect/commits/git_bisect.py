"""An adapter for ``git bisect run``: returns the verdict on the checkout as an exit code.

git starts one process per commit. What must outlive it (the target failure, verdicts) is in a state
file in git's own folder for the working tree.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from moediag.errors import ExitCode, MoediagError, StackError, UsageError
from moediag.lab.campaign.bisect import state as states
from moediag.lab.campaign.bisect.commits.clone import ABBREVIATED, Clone, overlay_folder
from moediag.lab.campaign.bisect.commits.commits import tops_of
from moediag.lab.campaign.bisect.follow import Follow
from moediag.lab.campaign.bisect.probe_verdict import Kind, ProbeVerdict
from moediag.lab.campaign.bisect.prober import MakeProber, Prober, made, probe
from moediag.lab.campaign.bisect.question import Question, Setting
from moediag.lab.campaign.bisect.signature_match import Target
from moediag.lab.campaign.bisect.state import State
from moediag.lab.campaign.bisect.timeline import probe_line, probe_name, target_lines
from moediag.lab.campaign.engine import Display, resumable
from moediag.lab.campaign.engine.journal import JOURNAL_FILE
from moediag.lab.campaign.executors import HERE, Choice, Maker

GOOD, BAD, SKIP, ABORT = 0, 1, 125, 128  # what git bisect run reads from an exit code
FOLDER = "moediag-bisect"


class NotShown(MoediagError):
    """The bad release does not show the failure, so commits cannot be compared with it."""

    exit_code = ExitCode.INCONCLUSIVE


def code(verdict: ProbeVerdict) -> int:
    """Returns the exit code; verdicts other than BAD and GOOD do not move git's bounds."""
    return {Kind.BAD: BAD, Kind.GOOD: GOOD}.get(verdict.kind, SKIP)


def judge_checkout(
    question: Question,
    clone: Clone,
    out: Path | None,
    command: Sequence[str],
    make: MakeProber,
    display: Display,
    executor: Choice = HERE,
) -> ProbeVerdict:
    """Judges the working tree of ``clone``, overlaid on the environment of the bad release, or of
    the good one if that decides nothing. ``out``: folder of the state and the runs.

    Raises NotShown, and UsageError for a package that cannot be overlaid.
    """
    folder = (out or clone.own_file(FOLDER) / question.scenario.name).absolute()
    known = {r.version: r for r in question.releases}
    versions = [v for v in (question.bad, question.good) if v]
    requests = tuple(question.request(known[v]) for v in versions)
    with contextlib.ExitStack() as stack:
        state = stack.enter_context(_opened(folder, question, command))
        prober = stack.enter_context(made(make, question, folder, display, executor))
        with resumable(state.journal, state.done):
            target = _target(question, state, prober, display)
            tops = tops_of(question.package, requests[0])
            commit = clone.head
            # Uncommitted changes can differ in every call.
            name = f"commit {commit[:ABBREVIATED]}" + (" as changed" if clone.changed else "")
            follow = Follow(state, prober, display, target)
            attempt = 1
            while clone.changed and state.known(probe_name(name, attempt)):
                attempt += 1

            @contextlib.contextmanager
            def laid_out() -> Iterator[Setting]:
                parts = {t: p for t in tops if (p := clone.present(t)) is not None}
                if not parts:
                    raise StackError(f"{name} has no {tops[0]}")
                place = folder / "import"
                try:
                    yield Setting(name, requests, overlay_folder(place, parts))
                finally:
                    shutil.rmtree(place, ignore_errors=True)

            return follow.probe(name, laid_out, attempt)


def _opened(folder: Path, question: Question, command: Sequence[str]) -> State:
    header = question.header(command)
    try:
        if (folder / JOURNAL_FILE).exists():
            return states.resume(folder, header)
        return states.create(folder, header)
    except UsageError as error:
        raise UsageError(
            error.message, f"For another bisect remove {folder}, or give another --out."
        ) from error


def _target(question: Question, state: State, prober: Maker[Prober], display: Display) -> Target:
    """Returns the failure of the bad release as installed; learned once."""
    if state.target is None:
        display.begun(question.bad)
        found = probe(prober, question.setting(question.bad), 1, None)
        display.finished(question.bad, probe_line(found.record))
        if found.target is None:
            raise NotShown(f"{question.package} {question.bad}: {found.problem}")
        state.learned(found.target)
        for text in target_lines(found.target):
            display.say(text)
    assert state.target is not None
    return state.target
