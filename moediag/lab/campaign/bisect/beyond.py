"""What is known about a boundary besides its releases: the cause, the commit, the changes.
Pure."""

from __future__ import annotations

from typing import Any

from moediag.lab.campaign.bisect.commits.commit_answer import CommitAnswer
from moediag.lab.campaign.bisect.companions.companion_answer import CompanionAnswer
from moediag.lab.campaign.bisect.suspects import suspects
from moediag.lab.campaign.bisect.suspects.suspects import Attribution
from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class Beyond:
    """Each field is None if it was not requested."""

    attribution: Attribution | None = None
    companions: CompanionAnswer | None = None
    commits: CommitAnswer | None = None

    def sentences(self) -> list[str]:
        found = self.companions.sentences() if self.companions else []
        return [*found, self.commits.sentence()] if self.commits else found

    def lines(self) -> list[str]:
        """Returns lines for a terminal."""
        changed = suspects.lines(self.attribution) if self.attribution else []
        return [*self.sentences(), *changed]

    def markdown(self) -> list[str]:
        text = [line for sentence in self.sentences() for line in (sentence, "")]
        return text + (suspects.markdown(self.attribution) if self.attribution else [])

    def to_json(self) -> dict[str, Any]:
        return {
            "attribution": suspects.to_json(self.attribution) if self.attribution else None,
            "companions": self.companions.to_json() if self.companions else None,
            "commits": self.commits.to_json() if self.commits else None,
        }
