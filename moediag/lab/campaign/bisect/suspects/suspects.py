"""What changed between the two releases of a boundary, as sentences, JSON and markdown. Pure."""

from __future__ import annotations

from typing import Any

from moediag.lab.campaign.bisect.suspects.functions import Piece
from moediag.lab.campaign.bisect.suspects.ranking import Suspect
from moediag.records import dataclass
from moediag.result.wording import plural

SHOWN = 8  # functions
DIFFS = 3  # of them with a diff on the page
LINES = 24  # of one diff
BRIEF_DIFFS, BRIEF = 3, 12  # the same in a terminal
WIDTH = 160  # characters of a line


@dataclass(frozen=True, slots=True)
class Attribution:
    """Changes between the releases ``old`` and ``new``, the closest known pair at a boundary."""

    package: str
    old: str
    new: str
    files: int = 0  # files changed in all
    imported: int = 0  # of these files, those that the trials imported
    functions: int = 0  # functions changed in those
    ran: int = 0  # of these functions, those that ran
    suspects: tuple[Suspect, ...] = ()  # the likeliest first
    compare: str = ""
    unread: tuple[str, ...] = ()
    problem: str = ""  # why there is no result, else ""

    @property
    def shown(self) -> tuple[Suspect, ...]:
        """Returns the likeliest; those that did not run only if none did."""
        ran = [s for s in self.suspects if s.ran]
        return tuple((ran or list(self.suspects))[:SHOWN])


def summary(found: Attribution) -> str:
    between = f"{found.package} {found.old} to {found.new}"
    if found.problem:
        return f"What changed from {between} is not known: {found.problem}."
    unread = f"; not readable: {', '.join(found.unread)}" if found.unread else ""
    return (
        f"{between}: {plural(found.files, 'file')} changed, {found.imported} of them imported by "
        f"the trials; {plural(found.functions, 'function')} changed in those, {found.ran} of them "
        f"ran{unread}."
    )


def lines(found: Attribution) -> list[str]:
    """Returns lines for a terminal."""
    text = [summary(found)]
    for place, suspect in enumerate(found.shown):
        change = suspect.change
        text.append(f"  {change.how:<8} {change.name}  {where(suspect)}  ({suspect.why})")
        if place < BRIEF_DIFFS:
            text += [f"    {line}" for line in difference(suspect, BRIEF)]
    if found.compare:
        text.append(f"  {found.compare}")
    return text


def markdown(found: Attribution) -> list[str]:
    text = [summary(found), ""]
    if found.shown:
        text += ["| changed function | | why it is here |", "| --- | --- | --- |"]
        for s in found.shown:
            text.append(f"| `{s.change.name}` in `{s.change.file}` | {s.change.how} | {s.why} |")
        text.append("")
    for s in found.shown[:DIFFS]:
        text += [f"`{s.change.name}` ({where(s)})", "", "```diff", *difference(s), "```", ""]
    if found.compare:
        text += [f"All of it: {found.compare}", ""]
    return text


def to_json(found: Attribution) -> dict[str, Any]:
    return {
        "package": found.package,
        "old": found.old,
        "new": found.new,
        "files_changed": found.files,
        "files_imported": found.imported,
        "functions_changed": found.functions,
        "functions_ran": found.ran,
        "compare": found.compare,
        "unread": list(found.unread),
        "problem": found.problem,
        "summary": summary(found),
        "changed": [
            {
                "file": s.change.file,
                "function": s.change.name,
                "how": str(s.change.how),
                "ran": s.ran,
                "in_stack": s.in_stack,
                "place": s.place if s.depth >= 0 else None,
                "why": s.why,
                "lines": {"old": _span(s.change.old), "new": _span(s.change.new)},
                "diff": difference(s),
            }
            for s in found.shown
        ],
    }


def where(suspect: Suspect) -> str:
    """Returns ``FILE:LINE`` of the newer release, or of the older one if it was removed."""
    change = suspect.change
    piece = change.new or change.old
    return f"{change.file}:{piece.first if piece else 1}"


def difference(suspect: Suspect, most: int = LINES) -> list[str]:
    """Returns at most ``most`` lines, including the first that differ."""
    whole = [_clipped(line) for line in suspect.change.diff]
    if len(whole) <= most:
        return whole
    return [*whole[: most - 1], f"... {len(whole) - most + 1} more lines"]


def _clipped(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 1] + "…"


def _span(piece: Piece | None) -> list[int] | None:
    return [piece.first, piece.last] if piece else None
