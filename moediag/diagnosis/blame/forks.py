"""Where two groups of ranks took different paths through the user's source.

From the last call that both made, the control flow of the function that they share shows which
statements lead one side to its call and not the other: a ``break``, a handler, an early return, a
loop that ended. What the evidence rules out is left out. What remains is the decision, or a few of
which it is one; nothing is named that does not part the two sides.
"""

from __future__ import annotations

import ast

from moediag.diagnosis.blame.fork_search import Decision, Search
from moediag.diagnosis.blame.fork_sides import Side, sides_of
from moediag.diagnosis.schedules.align import Aligned
from moediag.diagnosis.schedules.diverge import Divergence
from moediag.evidence.control_flow import FALSE, TRUE
from moediag.evidence.model import Condition, Evidence, Frame
from moediag.evidence.program_source import Program
from moediag.evidence.source_tree import leaves_by
from moediag.records import dataclass

_WAYS_OUT = ("return", "continue", "break")
_MOST = 3  # decisions of which one parted the ranks; more tell nothing


@dataclass(frozen=True, slots=True)
class Fork:
    """Two sides, and the decisions that may have parted them: one if that is certain."""

    sides: tuple[Side, Side]
    decisions: tuple[Decision, ...]
    program: Program

    def decided(self, condition: Condition) -> bool:
        """Whether the ranks certainly parted at a condition."""
        where = [(one.file, one.line) for one in self.decisions]
        return where == [(condition.file, condition.line)]

    @property
    def left(self) -> tuple[int, ...]:
        """The ranks for which a test was true whose branch leaves (``if bad(batch): continue``), if
        the sides certainly parted there; else ()."""
        one = self.decisions[0] if len(self.decisions) == 1 else None
        if one is None or {*one.ways} != {TRUE, FALSE}:
            return ()
        file = self.program.file(one.file, one.line)
        node = file.node(one.line) if file is not None else None
        if not isinstance(node, ast.If) or leaves_by(node.body) not in _WAYS_OUT or node.orelse:
            return ()
        return tuple(self.sides[one.ways.index(TRUE)].ranks)

    def text(self, line: Frame) -> str:
        """A line as written; "" if its file is not known."""
        file = self.program.file(line.file, line.line, line.function)
        return file.text(line.line) if file is not None else ""


def fork(found: Divergence, aligned: Aligned, evidence: Evidence) -> Fork | None:
    """Where the two sides of a divergence parted; None if they are not two, or the source does not
    show it."""
    sides = sides_of(found, aligned, evidence) if evidence.sources else []
    if len(sides) != 2:
        return None
    one, two = sides
    if not one.chain or (two.chain and len(two.ranks) > len(one.ranks)):
        one, two = two, one
    if not one.chain:
        return None
    search = Search(evidence, (one, two))
    try:
        decisions = sorted(set(search.decisions()), key=lambda one: (one.file, one.line))
    except RecursionError:  # source that is nested too deeply
        decisions = []
    told = tuple(decisions) if len(decisions) <= _MOST else ()
    return Fork((one, two), told, search.program)
