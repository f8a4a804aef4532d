"""A case: a program of others, the fault that is edited into it, and what is true of it.

A truth is what was injected: the rank that departs from the program, the class of failure that
gloo makes of it, and the lines of the program from which one finds the fault. ``known`` is False
where no evidence can tell which of the two sides is wrong (two ranks took different ways and the
program's text does not say which was meant): then naming nobody is right too.

In the faults ``bad_shard`` is true on the rank of the truth only (``inside/`` sets it): a fault
that depends on data must not be found by reading a condition on the rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.abroad.edits import Edit, Line

PARTED = ("hang", "collective-mismatch")
LEFT = (*PARTED, "crash")  # the waiting rank may find its peer gone
# Any finding: no class was decided on beforehand. moediag then got replica-divergence for it.
FINDING = (*LEFT, "replica-divergence", "inconclusive")


@dataclass(frozen=True)
class Truth:
    """``verdicts``: any is right. ``ranks``: exactly those at fault. ``lines``: one of them must be
    named, if there are any. ``says``: a word that the page must contain."""

    verdicts: tuple[str, ...]
    ranks: tuple[int, ...] = ()
    lines: tuple[Line, ...] = ()
    known: bool = True
    says: str = ""

    @property
    def healthy(self) -> bool:
        return self.verdicts == ("clean",)


@dataclass(frozen=True)
class Case:
    """A program with ``faults`` edited in, and ``signal`` (``STOP:1:5``: to rank 1 after its fifth
    optimizer step)."""

    program: str
    fault: str
    truth: Truth
    faults: tuple[Edit, ...] = ()
    signal: str = ""
    arguments: tuple[str, ...] = ()
    held_out: bool = False
    laws: bool = False  # only --laws can find it
    patience: str = "5"  # of `moediag watch`
    launcher: str = ""  # another one than the program's, with --attach only

    @property
    def name(self) -> str:
        return f"{self.program}/{self.fault}" + (f", {self.launcher}" if self.launcher else "")


CLEAN = Truth(("clean",))


def edit(file: str, has: str, new: str, nth: int = 0) -> Edit:
    return Edit(Line(file, has, nth), new)


def lines(file: str, *has: str | tuple[str, int]) -> tuple[Line, ...]:
    return tuple(Line(file, one) if isinstance(one, str) else Line(file, *one) for one in has)


def healthy(*programs: str) -> tuple[Case, ...]:
    return tuple(Case(program, "healthy", CLEAN) for program in programs)


def fault(
    program: str, name: str, rank: int, edits: tuple[Edit, ...] | Edit, at: tuple[Line, ...],
    verdicts: tuple[str, ...] = LEFT,
) -> Case:  # fmt: skip
    """A fault of one rank that is known: others agree against it, or it fails by itself."""
    edits = (edits,) if isinstance(edits, Edit) else edits
    return Case(program, name, Truth(verdicts, (rank,), at), edits)


def signalled(program: str, name: str, verdict: str, signal: str) -> Case:
    return Case(program, name, Truth((verdict,), (int(signal.split(":")[1]),)), signal=signal)
