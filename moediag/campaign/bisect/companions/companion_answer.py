"""Which of the packages that changed between two environments are to blame, in words and as JSON.
Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moediag.campaign.bisect.probe_verdict import describe
from moediag.campaign.bisect.search.answer import Answer
from moediag.campaign.bisect.search.corners import AxesAnswer, Blame, Change, GuiltyAnswer


@dataclass(frozen=True, slots=True)
class CompanionAnswer:
    """Between the releases ``old`` and ``new`` of ``package``. ``others``: what else differs
    between their environments; ``idle``: what differs too, but is no training library and no
    function of it ran; ``corners``: None where there are no others; ``guilty``: which of
    ``others`` are needed, alone or together with the package; ``companion``, ``releases`` and
    ``boundary``: of the one guilty companion its releases between the two and where it turns,
    with the package at ``held``. ``probes``: how many it took."""

    package: str
    old: str
    new: str
    turns: str
    others: tuple[Change, ...] = ()
    idle: tuple[Change, ...] = ()
    corners: AxesAnswer | None = None
    guilty: GuiltyAnswer | None = None
    releases: tuple[str, ...] = ()
    boundary: Answer | None = None
    held: str = ""
    probes: int = 0
    problem: str = ""

    @property
    def blamed(self) -> tuple[Change, ...]:
        """The guilty ones of ``others``; all of them where they could not be told apart."""
        if self.corners is None or self.corners.blame == Blame.PACKAGE:
            return ()
        if self.guilty is None or self.guilty.problem:
            return self.others
        return tuple(self.others[i] for i in self.guilty.guilty)

    @property
    def companion(self) -> Change | None:
        return self.blamed[0] if len(self.blamed) == 1 else None

    def sentences(self) -> list[str]:
        """The most important first."""
        if self.problem:
            return [f"Whether {self.package} alone is to blame is not known: {self.problem}."]
        if self.corners is None:
            what = "nothing else differs between the two environments"
            if self.idle:
                what = f"of {_changes(self.idle)}, which changed as well, no function ran"
            return [f"To blame: {self.package} alone; {what}."]
        words = self.corners.words(self.package, _names(self.blamed or self.others))
        if self.corners.blame == Blame.COMPANION and len(self.blamed) > 1:
            words = f"{_names(self.blamed)}, only together"
        beside = f"between the two environments {_changes(self.others)} changed as well"
        found = [f"To blame: {words}; {beside}."]
        if self.guilty is not None and self.guilty.problem:
            found.append(f"Which of them is not known: {self.guilty.problem}.")
        elif self.guilty is not None and not self.guilty.minimal:
            unsure = _names(tuple(self.others[i] for i in self.guilty.unsure))
            found.append(f"Whether {unsure} can be left out could not be judged.")
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
            "minimal": self.guilty.minimal if self.guilty else None,
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
