"""The cells of a hunt, and what they show: findings by signature. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field

from moediag.lab.campaign.hunt.pursued import Pursued
from moediag.lab.pipeline.register import Entry
from moediag.protocol import ListedFamily, RelationOutcome, WayOutcome
from moediag.records import dataclass
from moediag.result.verdicts import StrEnum

Key = tuple[str, str]  # family, relation


class State(StrEnum):
    """In the order of the page."""

    NEW = "new"
    UNREPORTED = "unreported"
    KNOWN = "known"
    BY_DESIGN = "by design"
    NOT_CONFIRMED = "not confirmed"


@dataclass(frozen=True, slots=True)
class HuntCell:
    """The result of one relation on one family."""

    outcome: RelationOutcome
    seconds: float | None = None
    evidence: str = ""
    """Its folder, relative to the hunt's; "" for a cell without a finding."""
    release: str = ""
    """The release of ``--against``; "" for the one that the hunt is about."""

    @property
    def key(self) -> Key:
        return self.outcome.family, self.outcome.relation

    @property
    def undecided(self) -> str:
        """Returns why nothing can be said, "" if something can."""
        ways = [w for w in self.outcome.ways if w.holds is None]
        return self.outcome.problem or "; ".join(f"{w.way}: {w.text}" for w in ways)


@dataclass(frozen=True, slots=True)
class Shown:
    """One family in which a finding shows."""

    family: str
    way: WayOutcome
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause, as far as its signature tells: the same relation fails in the same way."""

    relation: str
    kind: str  # wrong | crash
    what: str
    state: State
    shown: tuple[Shown, ...]
    entry: Entry | None = None
    """Of the register."""

    @property
    def signature(self) -> str:
        return f"{self.relation}:{self.kind}:{self.what}"

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one.family for one in self.shown))

    @property
    def ways(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one.way.way for one in self.shown))


@dataclass(frozen=True, slots=True)
class Hunt:
    """Everything that a hunt found out."""

    versions: Mapping[str, str | None]
    relations: Mapping[str, str]  # name -> what must hold
    families: tuple[ListedFamily, ...]  # that were asked for
    cells: Mapping[Key, HuntCell]
    register: tuple[Entry, ...] = ()
    incomplete: str = ""
    before: Hunt | None = None
    """The same on the release of ``--against``."""
    traces: Mapping[str, Pursued] = field(default_factory=dict)
    """What pursuing found out, by signature."""
    resolutions: tuple[str, ...] = ()
    """What the requested names of families stand for, where it is not evident."""
    findings: tuple[Finding, ...] = field(init=False)

    def __post_init__(self) -> None:
        found = tuple(group(self.cells.values(), self.register))
        object.__setattr__(self, "findings", found)

    @property
    def not_built(self) -> dict[str, str]:
        """Returns family -> why no tiny model was built."""
        known = {f.name: f.problem for f in self.families if f.problem}
        cells = [cell.outcome for cell in self.cells.values()]
        return {**known, **{c.family: c.problem for c in cells if not c.built}}

    @property
    def undecided(self) -> dict[Key, str]:
        """Returns the cells about which nothing can be said, without those of families that were
        not built."""
        found = {key: cell.undecided for key, cell in self.cells.items() if cell.outcome.built}
        return {key: why for key, why in found.items() if why}

    @property
    def missing(self) -> int:
        """Returns the number of cells that were not run."""
        families = [f.name for f in self.families if f.name not in self.not_built]
        return sum((f, r) not in self.cells for f in families for r in self.relations)

    @property
    def not_run(self) -> dict[str, str]:
        """Returns relation -> the package that it needs and the stack lacks."""
        outcomes = [cell.outcome for cell in self.cells.values()]
        return {one.relation: one.lacks for one in outcomes if one.lacks}

    def of(self, state: State) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.state == state)


def remaining(
    families: Sequence[ListedFamily], relations: Iterable[str], cells: Mapping[Key, HuntCell]
) -> list[Key]:
    """Returns the cells to run, family by family: one if a family was not built before."""
    names = list(relations)
    refused = {family for (family, _), cell in cells.items() if not cell.outcome.built}
    return [
        (family.name, relation)
        for family in families
        if not family.problem and family.name not in refused
        for relation in names
        if (family.name, relation) not in cells
    ]


def group(cells: Iterable[HuntCell], register: Sequence[Entry]) -> list[Finding]:
    """Returns the findings, the new ones first, those in more families before others."""
    found: dict[tuple[str, str, str, State, Entry | None], list[Shown]] = {}
    for cell in cells:
        for way in cell.outcome.ways:
            if way.holds is not False:
                continue
            relation, family = cell.outcome.relation, cell.outcome.family
            entry = next((e for e in register if e.matches(relation, family, way)), None)
            key = (relation, way.kind, way.what, _state(way, entry), entry)
            found.setdefault(key, []).append(Shown(family, way, cell.evidence))
    findings = [
        Finding(relation, kind, what, state, tuple(shown), entry)
        for (relation, kind, what, state, entry), shown in found.items()
    ]
    order = list(State)
    return sorted(findings, key=lambda f: (order.index(f.state), -len(f.families), f.signature))


def _state(way: WayOutcome, entry: Entry | None) -> State:
    """What the register lists only has to show twice."""
    if entry is not None and way.repeated:
        return State(entry.status.replace("-", " "))
    return State.NEW if way.confirmed else State.NOT_CONFIRMED
