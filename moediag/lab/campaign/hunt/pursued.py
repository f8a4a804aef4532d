"""What pursuing a finding found out. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from moediag.protocol import SIZES, Size, WayOutcome, build
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

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Pursued:
        """Raises ValueError for what :meth:`to_json` does not write."""
        found: Pursued = build(cls, raw)
        return found
