"""`moediag check --sweep`: every layout of some ranges in one answer, the best first.

One host of the requested releases answers for all of them. Layouts with the same axes share one
simulated step: it does not depend on their sizes. Those that differ only in the number of
data-parallel ranks share one step on fake tensors.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moediag.axes import Layout
from moediag.errors import UsageError
from moediag.lab.launch.launcher import launcher
from moediag.lab.pipeline import check_request
from moediag.lab.pipeline.check import RESULT, answered
from moediag.lab.pipeline.check_fit import FitWord
from moediag.lab.pipeline.check_options import CheckOptions
from moediag.lab.pipeline.check_result import CheckResult
from moediag.lab.stacks import environment
from moediag.pipeline.run_folder import run_folder
from moediag.protocol import FAILS, MAY_FAIL, write_json
from moediag.records import dataclass
from moediag.result.answer_blocks import AnswerState
from moediag.result.verdicts import StrEnum

MOST = 128  # layouts
_EXAMPLE = "For example: --sweep dp_shard=8..512,ep=1..64,tp=1..8 --world 512"


class Word(StrEnum):
    """What a layout is, the best first."""

    FITS = "FITS"
    TIGHT = "TIGHT"
    NO_FAILURE = "no failure"
    UNDECIDED = "undecided"
    NO = "DOES NOT FIT"
    FAILS = "FAILS"


@dataclass(frozen=True, slots=True)
class Swept:
    """One layout."""

    layout: Mapping[str, int]
    ranks: int
    word: Word
    peak: int | None
    """Bytes of the rank that holds most, in a step if --card or --batch asks for it; None: unknown.
    """
    sent: int | None
    """Bytes that a rank sends in a step; without --card and --batch only those of FSDP2. None: it
    was not planned."""
    seconds: float | None
    """For them on the wires; None: without --bandwidth."""
    fails: tuple[str, ...]
    may_fail: tuple[str, ...]
    undecided: str
    """Why it is not known whether it fails."""

    @property
    def name(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self.layout.items() if size > 1)

    @property
    def good(self) -> bool:
        return self.word in (Word.FITS, Word.TIGHT, Word.NO_FAILURE)


@dataclass(frozen=True, slots=True)
class SweepResult:
    sweep: str
    """As asked."""
    first: CheckResult
    """Of one of the layouts: the model and what was asked."""
    rows: tuple[Swept, ...]
    """The best first."""
    took: float
    """Seconds, without building an environment."""
    folder: Path

    @property
    def state(self) -> AnswerState:
        undecided = any(row.word == Word.UNDECIDED for row in self.rows)
        good = any(row.good for row in self.rows)
        return AnswerState.of(not (good or undecided), not good, AnswerState.ANSWERED)


def sweep(
    text: str, options: CheckOptions, tell: Callable[[str, float | None], None]
) -> SweepResult:
    """Returns the answers for all layouts of ``text``; ``check.json`` has the same. Raises
    UsageError, LayoutError and StackError."""
    layouts = parsed(text, options.world)
    asked = [_of(layout, options) for layout in layouts]
    config = check_request.find_config(options.config)
    stack = environment.ensure(options.stack, tell)
    folder = run_folder(options.out, f"sweep-{config.parent.name.lower() or 'model'}")
    began, results = time.monotonic(), []
    alike: dict[tuple[Any, ...], CheckResult] = {}
    measured: dict[tuple[Any, ...], CheckResult] = {}
    with launcher("fork", stack, folder / "hosts", check_request.settings(config)) as one:
        for number, own in enumerate(asked):
            tell(f"layout {number + 1} of {len(asked)}", number / len(asked))
            axes, rest = Layout(own.layout).active, _beside_data(own)
            found = answered(
                own, one, stack.versions, folder, f"layout-{number}", tell, alike.get(axes),
                measured.get(rest),
            )  # fmt: skip
            if not found.checked.problem:
                alike.setdefault(axes, found)
            if found.checked.timeline.phases:
                measured.setdefault(rest, found)
            results.append(found)
    rows = sorted(map(swept, results), key=_place)
    result = SweepResult(text, results[0], tuple(rows), time.monotonic() - began, folder)
    write_json(folder / RESULT, to_json(result))
    return result


def _beside_data(options: CheckOptions) -> tuple[Any, ...]:
    """Returns what the activations of a rank depend on: which axes there are, who shards, and the
    sizes of the axes that are not data parallel."""
    layout = Layout(options.layout)
    sizes = {axis: size for axis, size in layout.axes.items() if not axis.data_parallel}
    return (check_request.wrapper_of(options), layout.active, *sorted(sizes.items()))


def _of(layout: Mapping[str, int], options: CheckOptions) -> CheckOptions:
    """Returns the question about one layout. Raises UsageError and LayoutError."""
    own = dataclasses.replace(options, layout=layout, world=None, brief=True)
    own = check_request.completed(own)
    check_request.trial_of(own)
    return own


def parsed(text: str, world: int | None) -> list[dict[str, int]]:
    """Returns the layouts of ``dp_shard=8..512,tp=1..8``, of ``world`` ranks if that is given. A
    range doubles. Raises UsageError."""
    ranges: dict[str, list[int]] = {}
    for part in text.split(","):
        name, _, sizes = (one.strip() for one in part.partition("="))
        low, _, high = sizes.partition("..")
        first, last = (int(n) if n.isdecimal() else 0 for n in (low, high or low))
        if not name or name in ranges or not 0 < first <= last:
            raise UsageError(
                f"--sweep {text!r}: {part!r} is not of the form AXIS=N or AXIS=N..M, or is "
                "repeated", _EXAMPLE,
            )  # fmt: skip
        ranges[name] = [first * 2**k for k in range((last // first).bit_length())]
    found = []
    for sizes_of in itertools.product(*ranges.values()):
        layout = dict(zip(ranges, sizes_of, strict=True))
        size = Layout(layout).world_size
        if size > 1 and world in (None, size):
            found.append(layout)
    if not found:
        raise UsageError(f"--sweep {text!r} has no layout of {world or 2} ranks", _EXAMPLE)
    if len(found) > MOST:
        raise UsageError(
            f"--sweep {text!r} has {len(found)} layouts, more than {MOST}",
            "Narrow the ranges, or give the number of ranks: --world 512",
        )
    return found


def swept(result: CheckResult) -> Swept:
    """Returns the row of one layout."""
    findings = result.checked.findings
    fails = [one.text for one in findings if one.level == FAILS]
    fails += [f"the ranks diverge if {case.case.condition}" for case in result.cases if case.parts]
    fit, memory = result.fit, result.memory
    return Swept(
        {str(axis): size for axis, size in result.layout.axes.items()},
        result.ranks,
        _word(result, fails),
        fit.peak.total if fit is not None else memory.total if memory is not None else None,
        _sent(result),
        sum(wire.seconds for wire in result.wires) if result.wires else None,
        tuple(fails),
        tuple(one.text for one in findings if one.level == MAY_FAIL),
        result.undecided,
    )


def _word(result: CheckResult, fails: list[str]) -> Word:
    if fails:
        return Word.FAILS
    fit = result.fit.word if result.fit is not None else None
    if fit == FitWord.NO:
        return Word.NO
    if result.undecided:
        return Word.UNDECIDED
    return Word.NO_FAILURE if fit is None else Word(fit)


def _sent(result: CheckResult) -> int | None:
    """Returns None if nothing was planned."""
    if not result.checked.plan:
        return None
    of_fsdp = sum(cost.sent + cost.sent_to_replicas for cost in result.costs)
    return of_fsdp + sum(one.bytes for one in result.checked.timeline.traffic)


def _place(row: Swept) -> tuple[Any, ...]:
    """Where a row stands: by its word, then by its seconds on the wires, else by its peak."""
    number = row.seconds if row.seconds is not None else row.peak
    return list(Word).index(row.word), number is None, number or 0, row.ranks


def to_json(result: SweepResult) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "config": result.first.config,
        "model": result.first.checked.model,
        "sweep": result.sweep,
        "versions": dict(result.first.versions),
        **result.state.to_json(),
        "layouts": [dataclasses.asdict(row) for row in result.rows],
        "took": result.took,
    }
