"""What is known about a boundary besides its releases: the cause, the commit, the comparison.
Pure."""

from __future__ import annotations

from typing import Any

from moediag.lab.campaign.bisect.commits.commit_answer import CommitAnswer
from moediag.lab.campaign.bisect.companions.companion_answer import CompanionAnswer
from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class Beyond:
    """Each answer is None if it was not requested or cannot be found."""

    companions: CompanionAnswer | None = None
    commits: CommitAnswer | None = None
    compare: str = ""
    """The page of the package's repository that compares the two releases."""

    def sentences(self) -> list[str]:
        found = self.companions.sentences() if self.companions else []
        found += [self.commits.sentence()] if self.commits else []
        return [*found, f"All changes: {self.compare}"] if self.compare else found

    def to_json(self) -> dict[str, Any]:
        return {
            "companions": self.companions.to_json() if self.companions else None,
            "commits": self.commits.to_json() if self.commits else None,
            "compare": self.compare,
        }
