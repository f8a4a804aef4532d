"""Whether a package or its dependencies cause a failure, in words and as JSON. Pure."""

from __future__ import annotations

from typing import Any

from moediag.lab.campaign.bisect.probe_verdict import describe
from moediag.lab.campaign.bisect.search.answer import Answer
from moediag.lab.campaign.bisect.search.corners import AxesAnswer, Blame, Change
from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class CompanionAnswer:
    """What is to blame between two releases of a package."""

    package: str
    old: str
    new: str
    turns: str
    """The verdict of the new release, "bad" or "good"."""
    others: tuple[Change, ...] = ()
    """The companions: the other differences between the two environments."""
    idle: tuple[Change, ...] = ()
    """Differences in packages that are not training libraries and ran no function."""
    corners: AxesAnswer | None = None
    """None if there are no others."""
    releases: tuple[str, ...] = ()
    """If one companion is to blame: its releases between the two environments."""
    boundary: Answer | None = None
    """The release at which the behaviour changes."""
    held: str = ""
    """The package's release that the companion was tried with."""
    probes: int = 0
    problem: str = ""

    @property
    def blamed(self) -> tuple[Change, ...]:
        """Returns the companions if they are to blame, alone or together with the package."""
        blames = (Blame.COMPANION, Blame.EITHER, Blame.TOGETHER)
        return self.others if self.corners and self.corners.blame in blames else ()

    @property
    def companion(self) -> Change | None:
        """Returns the companion that is to blame."""
        return self.blamed[0] if len(self.blamed) == 1 else None

    def sentences(self) -> list[str]:
        """Returns the findings, the most important first."""
        if self.problem:
            return [f"Whether {self.package} alone is to blame is not known: {self.problem}."]
        if self.corners is None:
            what = "nothing else differs between the two environments"
            if self.idle:
                what = f"of {_changes(self.idle)}, which changed as well, no function ran"
            return [f"To blame: {self.package} alone; {what}."]
        words = self.corners.words(self.package, _names(self.others))
        beside = f"between the two environments {_changes(self.others)} changed as well"
        found = [f"To blame: {words}; {beside}."]
        if len(self.blamed) > 1:
            found.append("The companions were tried together; which of them it takes is not known.")
        if self.boundary is not None:
            found.append(self._boundary(self.boundary))
        return found

    def _boundary(self, answer: Answer) -> str:
        assert self.companion is not None
        name, beside = self.companion.name, f"beside {self.package} {self.held}"
        boundary = answer.boundaries[0] if answer.boundaries else None
        if boundary is None or boundary.good is None:
            what = describe(answer.end_verdict)
            return f"{name}'s own boundary {beside} was not found ({what})."
        high = self.releases[boundary.candidates[-1]]
        low = self.releases[boundary.candidates[0] - 1]
        if boundary.exact:
            return f"{name} {high} is the first {self.turns} one {beside}; {low} is not yet."
        return f"{name} turns {self.turns} {beside} after {low}, in {high} at the latest."

    def to_json(self) -> dict[str, Any]:
        corners = self.corners
        boundary = (
            self.boundary.boundaries[0] if self.boundary and self.boundary.boundaries else None
        )
        return {
            "blame": str(corners.blame) if corners else str(Blame.PACKAGE),
            "summary": self.sentences(),
            "changed": [{"name": c.name, "old": c.old, "new": c.new} for c in self.others],
            "changed_but_idle": [c.name for c in self.idle],
            "corners": [
                {
                    "package": self.new if corner.package_new else self.old,
                    "companions": "new" if corner.companion_new else "old",
                    "verdict": verdict.to_json(),
                }
                for corner, verdict in (corners.verdicts if corners else ())
            ],
            "guilty": [c.name for c in self.blamed],
            "minimal": len(self.blamed) == 1 if self.blamed else None,
            "companion_boundary": None
            if boundary is None or boundary.good is None
            else {
                "bad": self.releases[boundary.bad],
                "good": self.releases[boundary.good],
                "exact": boundary.exact,
                "beside": self.held,
            },
            "probes": self.probes,
            "problem": self.problem,
        }


def _names(changes: tuple[Change, ...]) -> str:
    names = [c.name for c in changes]
    if len(names) <= 3:
        return " and ".join(filter(None, [", ".join(names[:-1]), names[-1] if names else ""]))
    return f"its {len(names)} companions"


def _changes(changes: tuple[Change, ...]) -> str:
    listed = [f"{c.name} ({c.old or 'none'} to {c.new or 'none'})" for c in changes]
    if len(listed) <= 4:
        return ", ".join(listed)
    return f"{', '.join(listed[:3])} and {len(listed) - 3} more"
