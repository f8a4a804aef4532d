"""What pursuing a finding found out. Pure."""

from __future__ import annotations

from moediag.protocol import SIZES, Size, WayOutcome
from moediag.records import dataclass


@dataclass(frozen=True, slots=True)
class Pursued:
    """One finding, in the first family that shows it."""

    family: str
    relation: str
    way: str
    kind: str
    what: str
    size: Size = SIZES[0]
    """The smallest at which it shows."""
    since: str = ""
    """In sentences; "" if it was not searched."""
    program: str = ""
    """The exported file, relative to the hunt's folder; "" without one."""
    problem: str = ""
    """Why there is no file, or why it does not count."""
    draft: str = ""
    """The draft of an issue, relative to the hunt's folder."""

    @property
    def name(self) -> str:
        return f"{self.family} {self.relation} {self.way}"

    def shown_by(self, way: WayOutcome) -> bool:
        """Whether the way fails as this finding does."""
        return way.holds is False and (way.kind, way.what) == (self.kind, self.what)
