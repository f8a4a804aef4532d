"""The result of a search over commits, in words and as JSON. Pure."""

from __future__ import annotations

from typing import Any

from moediag.lab.campaign.bisect.probe_verdict import describe
from moediag.lab.campaign.bisect.search.answer import Answer, Boundary, Status
from moediag.records import dataclass
from moediag.result.wording import plural


@dataclass(frozen=True, slots=True)
class Told:
    """One commit."""

    hash: str
    newer: bool  # on the branch of the newer release; else on the older one's
    date: str = ""  # ISO 8601
    author: str = ""
    subject: str = ""

    @property
    def words(self) -> str:
        return f"{self.hash[:10]} ({self.date[:10]}, {self.author}: {self.subject})"


@dataclass(frozen=True, slots=True)
class CommitAnswer:
    """The commits between the releases ``old`` and ``new``."""

    package: str
    old: str
    new: str
    turns: str  # "bad" if the newer release is bad
    commits: tuple[Told, ...] = ()  # from one release to the other, both ends included, as searched
    answer: Answer | None = None  # its indexes are indexes of ``commits``
    first: Told | None = None  # the first commit with the new behaviour, if known exactly
    probes: int = 0  # number of probes
    problem: str = ""  # why there is no answer, else ""

    @property
    def boundary(self) -> Boundary | None:
        return self.answer.boundaries[0] if self.answer and self.answer.boundaries else None

    @property
    def answered(self) -> bool:
        """Whether one commit, or a range that could not be narrowed further, was found."""
        return self.boundary is not None and self.boundary.good is not None

    @property
    def found(self) -> bool:
        return self.first is not None

    def sentence(self) -> str:
        between = f"{self.package} {self.old} and {self.new}"
        if self.problem:
            return f"The commit between {between} is not known: {self.problem}."
        assert self.answer is not None
        if self.first is not None:
            count = plural(len(self.commits) - 1, "commit")
            if self.first.newer:
                which = f"the first {self.turns} one of {count} between {between}"
                return f"{self.first.words} is {which}."
            state = "good" if self.turns == "bad" else "bad"
            return (
                f"{self.first.words} is on the branch of {self.old} alone: with it that is "
                f"{state}, without it, as in {self.new}, {self.turns}."
            )
        end = self.commits[self.answer.end].hash[:10]
        if self.answer.status == Status.NOT_REPRODUCED:
            return (
                f"The source of the bad release ({end}) over an installed environment does not "
                "show the failure, so no commit can be named."
            )
        if self.boundary is None:
            what = describe(self.answer.end_verdict)
            return f"The source of the bad release ({end}) could not be judged: {what}."
        return self._range(self.boundary)

    def _range(self, boundary: Boundary) -> str:
        if boundary.good is None:
            return "No commit between the two was good: the source of the good release is not."
        candidates = [self.commits[i].hash[:10] for i in boundary.candidates]
        reasons = dict.fromkeys(describe(v) for _, v in boundary.undecided)
        text = f"The first {self.turns} commit is one of {len(candidates)}: {_few(candidates)}"
        if reasons:
            text += f"; {len(boundary.undecided)} could not be judged ({'; '.join(reasons)})"
        if boundary.untried:
            text += f"; {len(boundary.untried)} between them not tried"
        return text + "."

    def to_json(self) -> dict[str, Any]:
        boundary = self.boundary
        candidates = [] if boundary is None else [self.commits[i].hash for i in boundary.candidates]
        first = self.first
        return {
            "turns": self.turns,
            "summary": self.sentence(),
            "first": None
            if first is None
            else {
                "hash": first.hash,
                "date": first.date,
                "author": first.author,
                "subject": first.subject,
                "on_the_older_branch": not first.newer,
            },
            "candidates": candidates,
            "commits": max(0, len(self.commits) - 1),
            "probes": self.probes,
            "problem": self.problem,
        }


def _few(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:3])}, … {names[-1]}"
