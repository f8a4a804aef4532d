"""Finds the commit between the two releases of a boundary, in a local clone.

Trying a commit overlays its Python files on the environment of the older release. If that decides
nothing, the environment of the newer one is used, because newer code may need newer companions. A
commit that cannot be imported is a SKIP, as everywhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from moediag.errors import StackError, UsageError
from moediag.lab.campaign.bisect.commits.clone import ABBREVIATED, Clone, Commit, overlay_folder
from moediag.lab.campaign.bisect.commits.commit_answer import CommitAnswer, Told
from moediag.lab.campaign.bisect.follow import Follow, Ready, settle
from moediag.lab.campaign.bisect.installed_source import installed
from moediag.lab.campaign.bisect.probe_verdict import ProbeVerdict
from moediag.lab.campaign.bisect.question import PATIENCE, Setting
from moediag.lab.campaign.bisect.search.answer import Answer
from moediag.lab.campaign.bisect.search.search import Options, Probe, Search
from moediag.lab.stacks import environment
from moediag.records import dataclass

FOLDER = "source"  # for worktrees, in the bisect's folder
_MOST = 200  # probes; halving 10,000 commits takes 14


@dataclass(frozen=True, slots=True)
class Between:
    """Two adjacent releases of ``package``, the older first."""

    package: str
    old: str
    new: str
    turns: str  # the verdict of the newer one: "bad" or "good"
    requests: tuple[Mapping[str, str], ...]  # their environments


def tops_of(package: str, request: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the import names of ``package``. Raises UsageError if it has compiled modules,
    StackError if it is not installed."""
    stack = environment.ready(request)
    if stack is None:
        raise StackError(f"the environment of {package} is not there any more")
    found = installed(stack.python, package)
    if found.compiled:
        raise UsageError(
            f"--repo: {package} has compiled parts, so its source cannot be laid over a release",
            "Leave --repo away, or build its commits yourself and use `git bisect run` with "
            "--git-bisect.",
        )
    return found.tops


def name_the_commit(between: Between, clone: Clone, follow: Follow, folder: Path) -> CommitAnswer:
    """Returns the commit; the answer's ``problem`` says why there is none."""
    nothing = CommitAnswer(between.package, between.old, between.new, between.turns)
    try:
        old, new = (clone.tagged(between.package, v) for v in (between.old, between.new))
        tops = tops_of(between.package, between.requests[0])
        places = {f for end in (old, new) for top in tops if (f := clone.folder(end, top))}
        if not places:
            raise UsageError(f"{clone.path} does not hold {between.package}")
        path = clone.path_between(old, new, sorted(places))
    except (UsageError, StackError) as error:
        return dataclasses.replace(nothing, problem=error.message)
    before = follow.made
    source = Source(clone, tops, folder / FOLDER, between.requests)

    def probe(question: Probe) -> ProbeVerdict:
        commit = path[question.index]
        return follow.probe(commit.name, source.of(commit), question.attempt)

    bad, good = (len(path) - 1, 0) if between.turns == "bad" else (0, len(path) - 1)
    rate = follow.target.rate
    search = Search(len(path), Options(bad=bad, good=good, patience=PATIENCE, rate=rate))
    answer = settle(search, probe, _MOST)
    if answer is None:
        return dataclasses.replace(nothing, problem=f"it takes more than {_MOST} probes")
    return dataclasses.replace(
        nothing,
        commits=tuple(Told(c.hash, c.newer) for c in path),
        answer=answer,
        first=_first(answer, path, clone),
        probes=follow.made - before,
    )


@dataclass(frozen=True, slots=True)
class Source:
    """Settings built from a clone. ``tops``: import names; ``folder``: for worktrees."""

    clone: Clone
    tops: tuple[str, ...]
    folder: Path
    requests: tuple[Mapping[str, str], ...]

    def of(self, commit: Commit) -> Ready:
        return lambda: self._laid_out(commit)

    @contextlib.contextmanager
    def _laid_out(self, commit: Commit) -> Iterator[Setting]:
        parts = {top: self.clone.folder(commit.hash, top) for top in self.tops}
        there = {top: part for top, part in parts.items() if part is not None}
        if not there:
            raise StackError(f"{commit.name} has no {self.tops[0]}")
        place = self.folder / commit.hash[:ABBREVIATED]
        with self.clone.worktree(commit.hash, list(there.values()), place / "tree") as tree:
            inside = {top: tree / part for top, part in there.items()}
            source = overlay_folder(place / "import", inside)
            yield Setting(commit.name, self.requests, source)


def _first(answer: Answer, path: Sequence[Commit], clone: Clone) -> Told | None:
    """Returns the first commit. Between neighbours on the older release's branch it is the one that
    the newer lacks."""
    boundary = answer.boundaries[0] if answer.boundaries else None
    if boundary is None or not boundary.exact or boundary.good is None:
        return None
    low, high = sorted((boundary.bad, boundary.good))
    commit = path[high] if path[high].newer else path[low]
    about = clone.about(commit.hash)
    return Told(commit.hash, commit.newer, about.date, about.author, about.subject)
