"""Whether the package or its companions are to blame, by the four corners. Pure.

A good and a bad state differ in the package and in its companions (the accelerate of that day). The
two mixed corners show whether one of the two is sufficient.
"""

from __future__ import annotations

from collections.abc import Sequence

from moediag.lab.campaign.bisect.probe_verdict import DECIDED, Kind, ProbeVerdict
from moediag.lab.campaign.bisect.search.search_machine import Ask, Machine
from moediag.records import dataclass
from moediag.result.verdicts import StrEnum


@dataclass(frozen=True, slots=True, order=True)
class Corner:
    """The state of the package and of the companion; ``new`` is the far end."""

    package_new: bool
    companion_new: bool


OLD = Corner(False, False)
NEW = Corner(True, True)
PACKAGE_ONLY = Corner(True, False)
COMPANION_ONLY = Corner(False, True)


class Blame(StrEnum):
    PACKAGE = "package alone"
    COMPANION = "companion alone"
    EITHER = "either"
    TOGETHER = "only together"
    UNDECIDED = "undecided"
    NO_CHANGE = "no change"  # the two ends agree, or one of them was not decided


@dataclass(frozen=True, slots=True)
class AxesAnswer:
    """What the corners show."""

    blame: Blame
    turns: Kind | None  # the new end's verdict (BAD: broken; GOOD: fixed), None without a change
    verdicts: tuple[tuple[Corner, ProbeVerdict], ...]  # of every corner that was needed

    def words(self, package: str, companion: str) -> str:
        """Returns e.g. ``transformers alone``, ``only transformers and accelerate together``."""
        seen = dict(self.verdicts)
        if self.blame == Blame.PACKAGE:
            return f"{package} alone"
        if self.blame == Blame.COMPANION:
            return f"{companion} alone"
        if self.blame == Blame.EITHER:
            return f"either of {package} and {companion}"
        if self.blame == Blame.TOGETHER:
            return f"only {package} and {companion} together"
        if self.blame == Blame.NO_CHANGE:
            return f"no change between the two ends ({_short(seen[OLD])}, {_short(seen[NEW])})"
        parts = []
        for corner, name, held in (
            (PACKAGE_ONLY, package, companion),
            (COMPANION_ONLY, companion, package),
        ):
            verdict = seen[corner]
            if not verdict.decided:
                parts.append(f"new {name} with old {held} decided nothing ({_short(verdict)})")
            else:
                enough = "is enough" if verdict.kind == self.turns else "is not enough"
                parts.append(f"{name} alone {enough}")
        return "; ".join(parts)


class Corners(Machine[Corner, AxesAnswer]):
    """The four corners: both ends, then the two mixed ones. ``answer`` says what is to blame. For
    ``only together`` each axis is a separate search, with the other held new."""

    def _check(self, question: Corner) -> None:
        if not isinstance(question, Corner):
            raise ValueError(f"{question!r} is no corner")

    def _decide(self, ask: Ask[Corner]) -> AxesAnswer:
        old, new = ask(OLD, 0.5), ask(NEW, 0.5)
        ends = ((OLD, old), (NEW, new))
        if {old.kind, new.kind} != DECIDED:
            return AxesAnswer(Blame.NO_CHANGE, None, ends)
        package, companion = ask(PACKAGE_ONLY, 0.5), ask(COMPANION_ONLY, 0.5)
        verdicts = (*ends, (PACKAGE_ONLY, package), (COMPANION_ONLY, companion))
        if not (package.decided and companion.decided):
            return AxesAnswer(Blame.UNDECIDED, new.kind, verdicts)
        names = {
            (True, False): Blame.PACKAGE,
            (False, True): Blame.COMPANION,
            (True, True): Blame.EITHER,
            (False, False): Blame.TOGETHER,
        }
        turned = (package.kind == new.kind, companion.kind == new.kind)
        return AxesAnswer(names[turned], new.kind, verdicts)


# ------------------------------------------------------------------------ environments


@dataclass(frozen=True, slots=True)
class Change:
    """One package that differs between two environments; None: not installed there."""

    name: str
    old: str | None
    new: str | None


def changes(old: Sequence[str], new: Sequence[str]) -> tuple[Change, ...]:
    """Returns what differs between two resolutions (``name==version`` each), by name.

    Raises ValueError for a line of another form.
    """
    before, after = _pins(old), _pins(new)
    names = sorted(before.keys() | after.keys())
    return tuple(
        Change(name, before.get(name), after.get(name))
        for name in names
        if before.get(name) != after.get(name)
    )


def applied(old: Sequence[str], chosen: Sequence[Change]) -> tuple[str, ...]:
    """Returns the resolution ``old`` with the chosen changes applied, sorted by name."""
    pins: dict[str, str | None] = dict(_pins(old))
    for change in chosen:
        pins[change.name] = change.new
    return tuple(f"{name}=={version}" for name, version in sorted(pins.items()) if version)


def _pins(resolution: Sequence[str]) -> dict[str, str]:
    found = {}
    for line in resolution:
        name, separator, version = line.partition("==")
        if not (name and separator and version):
            raise ValueError(f"{line!r} is not name==version")
        found[name.strip()] = version.strip()
    return found


def _short(verdict: ProbeVerdict) -> str:
    return f"{verdict.kind} ({verdict.text})" if verdict.text else str(verdict.kind)
