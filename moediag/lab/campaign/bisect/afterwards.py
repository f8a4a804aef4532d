"""Finds the cause, the commit and the changes once the releases are known."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from moediag.errors import MoediagError
from moediag.lab.campaign.bisect.beyond import Beyond
from moediag.lab.campaign.bisect.commits.clone import Clone
from moediag.lab.campaign.bisect.commits.commits import Between, name_the_commit
from moediag.lab.campaign.bisect.companions.companions import Sides, who_is_to_blame
from moediag.lab.campaign.bisect.follow import Follow
from moediag.lab.campaign.bisect.question import Question
from moediag.lab.campaign.bisect.search.answer import Boundary
from moediag.lab.campaign.bisect.search.search import Search
from moediag.lab.campaign.bisect.suspects.attribution import attribute, ran
from moediag.lab.campaign.bisect.suspects.suspects import Attribution


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
    try:
        requests = (question.request(known[old]), question.request(known[new]))
    except MoediagError as error:  # no index now, and a companion's release depends on it
        return Beyond(Attribution(package, old, new, problem=error.message))
    turns = "bad" if high == boundary.bad else "good"
    verdicts = (search.verdicts[low], search.verdicts[high])
    fixed = {n: v for n, v in requests[0].items() if n == "python" or n in question.asked.hold}
    probes, target = follow.state.probes, follow.target
    executed = (ran(probes, old, target, folder), ran(probes, new, target, folder))
    sides = Sides(package, old, new, turns, requests, verdicts, executed, fixed)
    return Beyond(
        companions=who_is_to_blame(sides, follow),
        commits=name_the_commit(Between(package, old, new, turns, requests), clone, follow, folder)
        if clone
        else None,
        attribution=attribute(
            package,
            {old: requests[0], new: requests[1]},
            old,
            new,
            probes,
            target,
            folder,
        ),
    )
