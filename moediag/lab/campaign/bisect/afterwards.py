"""Finds the cause and the commit once the releases are known."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from moediag.errors import MoediagError
from moediag.lab.campaign.bisect.beyond import Beyond
from moediag.lab.campaign.bisect.commits.clone import Clone
from moediag.lab.campaign.bisect.commits.commits import Between, name_the_commit
from moediag.lab.campaign.bisect.companions.companion_answer import CompanionAnswer
from moediag.lab.campaign.bisect.companions.companions import Sides, who_is_to_blame
from moediag.lab.campaign.bisect.follow import Follow
from moediag.lab.campaign.bisect.installed_source import compare, installed
from moediag.lab.campaign.bisect.question import Question
from moediag.lab.campaign.bisect.search.answer import Boundary
from moediag.lab.campaign.bisect.search.search import Search
from moediag.lab.campaign.bisect.timeline import ProbeRecord
from moediag.lab.stacks import environment
from moediag.protocol import read_stored

FILES = "rank-*.executed.txt"  # see executed_file


def afterwards(
    question: Question, search: Search, follow: Follow, clone: Clone | None, folder: Path
) -> Iterator[tuple[str, Beyond]]:
    """Returns what is known of each two-sided boundary, "began" or "ended"."""
    assert search.answer is not None
    for name, boundary in (("began", search.answer.began), ("ended", search.answer.ended)):
        if boundary is not None and boundary.good is not None:
            yield name, _beyond(question, search, boundary, follow, clone, folder)


def _beyond(
    question: Question,
    search: Search,
    boundary: Boundary,
    follow: Follow,
    clone: Clone | None,
    folder: Path,
) -> Beyond:
    assert boundary.good is not None
    package, versions = question.package, follow.state.releases
    low, high = sorted((boundary.bad, boundary.good))
    old, new = versions[low], versions[high]
    known = {r.version: r for r in question.releases}
    turns = "bad" if high == boundary.bad else "good"
    try:
        requests = (question.request(known[old]), question.request(known[new]))
    except MoediagError as error:  # no index now, and a companion's release depends on it
        return Beyond(CompanionAnswer(package, old, new, turns, problem=error.message))
    verdicts = (search.verdicts[low], search.verdicts[high])
    fixed = {n: v for n, v in requests[0].items() if n == "python" or n in question.asked.hold}
    probes = follow.state.probes
    executed = (_ran(probes, old, folder), _ran(probes, new, folder))
    sides = Sides(package, old, new, turns, requests, verdicts, executed, fixed)
    return Beyond(
        companions=who_is_to_blame(sides, follow),
        commits=name_the_commit(Between(package, old, new, turns, requests), clone, follow, folder)
        if clone
        else None,
        compare=_compare(package, (old, new), requests),
    )


def _ran(probes: Iterable[ProbeRecord], version: str, folder: Path) -> frozenset[str]:
    """Returns the files of which the deciding probes of ``version`` ran a function."""
    runs = [p.evidence for p in probes
            if p.version == version and p.verdict.decided and p.evidence]  # fmt: skip
    return frozenset().union(*(read_executed(folder / run) for run in runs))


def _compare(
    package: str, versions: tuple[str, str], requests: tuple[Mapping[str, str], ...]
) -> str:
    """Returns the page that compares the two releases, "" if no metadata names a repository."""
    for request in requests:
        with contextlib.suppress(MoediagError, OSError):
            stack = environment.ready(request)
            if stack and (address := installed(stack.python, package).repository):
                return compare(address, *versions)
    return ""


def read_executed(folder: Path) -> frozenset[str]:
    """Returns the files, as imported, of all ranks of the trials below ``folder``; empty if no rank
    recorded them. The incomplete last line of a killed rank is left out."""
    found: set[str] = set()
    for path in folder.rglob(FILES):
        found.update(read_stored(path).decode("utf-8", "replace").split("\n")[:-1])
    return frozenset(found)
