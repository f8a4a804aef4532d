"""The page of a check: what fails, what is known, the cost, the experts and the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from moediag.axes import EP
from moediag.lab.pipeline import check_verdict
from moediag.lab.pipeline.check_cost import AxisCost, Wire
from moediag.lab.pipeline.check_fit import GIB, Fit, Moment
from moediag.lab.pipeline.check_result import CheckResult, JudgedCase, share, to_json
from moediag.protocol import (
    FAILS,
    MAY_FAIL,
    NOTE,
    CheckFinding,
    ExpertRange,
    PlannedParameter,
    Traffic,
)
from moediag.result import Table, wording
from moediag.result.answer_blocks import Answer, AnswerState, Block, Case, Row, Section

_TITLES = {FAILS: ("FAILS", "bad"), MAY_FAIL: ("MAY FAIL", "doubt"), NOTE: ("note", "plain")}
_STATUS = {
    "known": "known upstream", "by-design": "documented as a choice", "unreported": "not reported",
}  # fmt: skip
_NAMES = 4  # parameters named in a sentence
_DETAILS = "--details prints findings, costs and the plan; so does --html FILE"
_OTHERS = 3  # scenarios of other releases that are named
ALWAYS = "fragmentation of memory; the network"
_UNCOUNTED = (
    "activations in memory; bytes of token exchanges and of activations between ranks, which "
    "depend on the batch"
)


def answer(result: CheckResult, details: bool = True) -> Answer:
    """``details``: a terminal shows the tables too, not only the verdict and its reasons."""
    axes = ", ".join(f"{axis}={size}" for axis, size in result.layout.axes.items())
    word, reasons = check_verdict.verdict(result, _diverging(result))
    shown = None if details else ()
    return Answer(
        "check",
        f"{result.checked.model or result.config} on {axes}",
        result.state,
        word,
        (
            Section(tuple(_found(result)), "What was found", brief=shown),
            Section(tuple(_known(result)), "What is known", brief=shown),
            Section(tuple(_unseen(result)), "Not seen",
                    brief=None if details else tuple(_unseen(result, short=True))),
            Section(tuple(_cost(result)), "Cost", brief=shown),
            Section(tuple(_plan(result)), "Plan", brief=shown),
            Section(tuple(question(result)), "What was asked"),
        ),
        rows=(*reasons, *(() if details else _next(result))),
        cases=tuple(_cases(result.cases)),
        facts=to_json(result),
    )  # fmt: skip


def _next(result: CheckResult) -> Iterator[Row]:
    """Yields what to type next: for a better layout, if it was asked whether this one fits."""
    ranks, experts = result.ranks, result.checked.experts
    asked = result.fit is not None and result.fit.capacity
    if asked and ranks > 1 and ranks & (ranks - 1) == 0:  # sizes of a sweep double
        axes = f"dp_shard=1..{ranks}"
        axes += f",ep=1..{min(ranks, experts)}" if experts > 1 else ""
        words = f"--sweep {axes},tp=1..{min(ranks, 8)} --world {ranks}"
        yield Row("better", f"{words} instead of --layout: every layout of these ranks", "faint")
    yield Row("details", _DETAILS, "faint")


def _diverging(result: CheckResult) -> list[str]:
    return [_diverge(case, others) for case, others in _distinct(result.cases)]


def _cases(cases: Sequence[JudgedCase]) -> Iterator[Case]:
    for one in cases:
        state = AnswerState.of(one.parts, one.unseen, AnswerState.NO_FAILURE)
        text = _diverge(one, ()) if one.parts else one.unseen
        name = one.case.condition or "no skew"
        yield Case(name, "schedule", state, text, suite="simulated cases")


def _found(result: CheckResult) -> Iterator[Row]:
    """Yields the findings, the worst last."""
    levels = list(_TITLES)
    agreeing = [case for case in result.cases if case.agrees]
    if agreeing and not any(case.parts for case in result.cases):
        yield Row("schedule", _agreed(result, agreeing))
    for finding in sorted(result.checked.findings, key=lambda f: -levels.index(f.level)):
        label, style = _TITLES[finding.level]
        yield Row(label, _finding(finding), style)
    for text in _diverging(result):
        yield Row("FAILS", text, "bad")


def _unseen(result: CheckResult, short: bool = False) -> Iterator[Row]:
    problem = [result.undecided] if result.checked.problem else []
    for text in (*problem, *result.not_seen, *result.unseen_cases):
        yield Row("NOT SEEN", text, "doubt")
    if result.checked.plan and not short:
        measured = result.fit is not None and result.fit.measured
        yield Row("NOT SEEN", ALWAYS if measured else f"{_UNCOUNTED}; {ALWAYS}", "faint")


def question(result: CheckResult, layout: bool = True) -> Iterator[Row]:
    """Yields what was asked. ``layout``: also who shards on which ranks."""
    checked = result.checked
    experts = f", {checked.experts} experts, top {checked.top_k}" if checked.experts else ""
    size = f", {_number(checked.parameters)} parameters" if checked.parameters else ""
    yield Row("model", f"{checked.model or result.config}{size}{experts}")
    axes = " x ".join(f"{axis}={size}" for axis, size in result.layout.axes.items())
    inside = " (tp inside ep)" if result.ranks < result.layout.world_size else ""
    sizes = Counter(checked.stages)
    stages = [f"{wording.plural(n, 'stage')} of {size}" for size, n in sizes.items()]
    layers = f", {' and '.join(stages)} layers" if stages else ""
    if layout:
        yield Row("layout", f"{axes}{inside}, {wording.plural(result.ranks, 'rank')}{layers}")
    yield Row("stack", ", ".join(f"{name} {v}" for name, v in result.versions.items() if v))
    if result.dtypes:
        yield Row("dtypes", result.dtypes)
    if layout and checked.asked:
        yield Row("sharded", f"by {checked.asked}")


def _number(parameters: int) -> str:
    billions = parameters / 1e9
    return f"{billions:.1f} billion" if billions >= 1 else f"{parameters / 1e6:.3g} million"


def _finding(finding: CheckFinding) -> str:
    return f"{finding.text}{f' ({finding.where})' if finding.where else ''}"


def _distinct(cases: Sequence[JudgedCase]) -> list[tuple[JudgedCase, list[str]]]:
    """Returns the cases whose ranks diverge, each place once, with the other conditions that lead
    there."""
    found: dict[tuple[object, ...], tuple[JudgedCase, list[str]]] = {}
    for one in cases:
        first = one.diagnosis.first_divergence
        if one.parts:
            place = (first.index, first.axis, first.module) if first else (one.case.name,)
            if place in found:
                found[place][1].append(one.case.condition)
            else:
                found[place] = (one, [])
    return list(found.values())


def _diverge(one: JudgedCase, others: Sequence[str]) -> str:
    """The condition and the call in a simulated case whose ranks' schedules differ."""
    found = one.diagnosis.first_divergence
    head = f"If {one.case.condition}" if one.case.condition else "Without any skew"
    if found is None:
        return f"{head}, the ranks' schedules differ: {one.diagnosis.cause}"
    sides: dict[tuple[str, int], list[int]] = {}
    missing: dict[str, None] = {}
    for rank, side in found.ranks.items():
        sides.setdefault((side.op, side.numel), []).append(int(rank))
        missing.update(dict.fromkeys(side.parameters_missing))
    told = ", ".join(
        f"{wording.ranks(ranks)}: {'no call' if op == 'none' else f'{op} of {numel:,} elements'}"
        for (op, numel), ranks in sides.items()
    )
    where = f" of {found.module}" if found.module else ""
    text = (
        f"{head}, the ranks diverge at call {found.index} on axis {found.axis}, in {found.phase}"
        f"{where}: {told}."
    )
    if missing:
        text += f" Left out: {wording.listed(list(missing))}, which have no gradient there."
    text += "".join(f" Also if {condition}." for condition in others)
    skewed = f", {wording.ranks(one.case.skewed)} with that routing" if one.case.skewed else ""
    return f"{text} (Simulated with a tiny model of the same class{skewed}.)"


def _agreed(result: CheckResult, agreeing: Sequence[JudgedCase]) -> str:
    axes = " x ".join(f"{a}={n}" for a, n in result.checked.simulated_layout.items())
    cases = [f"if {one.case.condition}" for one in agreeing if one.case.condition]
    also = f"; also {', and '.join(cases)}" if cases else ""
    return f"the calls of simulated ranks agree (tiny model of the same class, {axes}){also}"


def _plan(result: CheckResult) -> Iterator[Block]:
    plan = result.checked.plan
    if plan:
        head = ("parameter", "shape", "placement", "on a rank", "rule")
        yield Table("plan", head, tuple(map(_planned, plan)))
    for owner in result.checked.owners:
        yield Row("experts", _owner(owner, result.layout.size(EP)))
    if plan and result.layout.active:
        yield Row("sums", _sums(result))


def _planned(row: PlannedParameter) -> tuple[str, ...]:
    number = f" ({row.count}x)" if row.count > 1 else ""
    shape = "x".join(map(str, row.shape))
    return f"{row.name}{number}", shape, _placement(row), _elements(row), row.rule


def _placement(row: PlannedParameter) -> str:
    parts = [
        f"dim {one.dim} / {one.axis}[{one.size}]"
        for one in row.slices if one.dim is not None and one.size > 1
    ]  # fmt: skip
    return ", ".join(parts) or "whole"


def _elements(row: PlannedParameter) -> str:
    if row.least == row.most:
        return f"{row.most:,}"
    return f"{row.least:,} to {row.most:,}"


def _owner(owner: ExpertRange, ways: int) -> str:
    held = [last - first for first, last in owner.ranges]
    most, least = max(held), min(held)
    none = sum(count == 0 for count in held)
    each = f"{most}" if most == least else f"{least} to {most}"
    text = f"{', '.join(owner.names[:_NAMES])}: {each} of {owner.experts} experts on a rank"
    if none:
        text += f", none on {none} of {len(held)} ranks"
    if ways > 1:
        text += f"; {owner.experts // ways} for each of {ways} places on ep"
    times = "once" if owner.copies == 1 else f"{owner.copies} times (replicas or parts)"
    return f"{text}; each expert is held {times}"


def _sums(result: CheckResult) -> str:
    """Over which axes gradients must be summed."""
    layout = result.layout
    rest, experts = (_over(layout.sums(routed, "")) for routed in (False, True))
    apart = bool(result.checked.owners) and rest != experts
    text = f"gradients must be summed over {rest}"
    return f"{text}; those of the routed experts over {experts}" if apart else text


def _over(axes: Sequence[str]) -> str:
    return " x ".join(map(str, axes)) or "no axis"


def _cost(result: CheckResult) -> Iterator[Row]:
    yield from (Row("cost", _axis_cost(cost)) for cost in result.costs if cost.ranks > 1)
    if result.checked.timeline.traffic:
        yield Row("cost", _others(result.checked.timeline.traffic))
    yield from (Row("wires", _wire(wire)) for wire in result.wires)
    if result.fit is not None:
        yield from _fit(result.fit)
    memory = result.memory
    if memory is not None:
        gather = f" + {_bytes(memory.resident)} that stay gathered" if memory.resident else ""
        if memory.largest_gather:
            largest = _bytes(memory.largest_gather)
            gather += f" + {largest} largest all-gather ({memory.largest_unit})"
        yield Row(
            "memory",
            f"{_bytes(memory.total)} on the rank that holds most: {_bytes(memory.parameters)} "
            f"parameters + {_bytes(memory.gradients)} gradients + {_bytes(memory.optimizer)} "
            f"optimizer{gather}",
        )


def _others(traffic: Sequence[Traffic]) -> str:
    """Returns what a rank sends beside FSDP2's calls."""
    parts = ", ".join(
        f"{_bytes(one.bytes)} on {one.name}[{one.ranks}] ({one.calls:,} calls)" for one in traffic
    )
    return f"tokens and activations, each step: a rank sends {parts}"


def _fit(fit: Fit) -> Iterator[Row]:
    """The peak, where it is, and whether it fits."""
    recomputed = "" if fit.recompute == "none" else f", --recompute {fit.recompute}"
    asked = f"{wording.plural(fit.batch, 'sequence')} of {fit.length:,} tokens{recomputed}"
    if fit.measured:
        yield Row("peak", f"{moment(fit.peak)} ({asked} on a rank)")
        if fit.worst is not None:
            text = f"if other ranks send this one all tokens that they can: {moment(fit.worst)}"
            yield Row("worst load", text)
    if fit.reserved is not None:
        yield Row(
            "reserved",
            f"{fit.reserved.segments / GIB:.1f} GiB by torch's allocator after some steps, "
            f"{fit.reserved.expandable / GIB:.1f} with expandable_segments:True",
        )
    yield from check_verdict.fits(fit)


def moment(one: Moment) -> str:
    """Returns ``backward of layer 47: 61.2 GiB: 38.0 activations, 14.1 state, 9.1 gathered``."""
    parts = {
        "activations": one.activations, "state": one.state, "gathered": one.gathered,
        "temporary": one.temporary,
    }  # fmt: skip
    largest = sorted(parts.items(), key=lambda part: -part[1])
    told = ", ".join(f"{size / GIB:.1f} {name}" for name, size in largest if size >= GIB / 20)
    return f"{one.at}: {one.total / GIB:.1f} GiB: {told or 'less than 0.1 of each kind'}"


def _axis_cost(cost: AxisCost) -> str:
    text = (
        f"FSDP2 on {cost.axis}[{cost.ranks}], each step: {cost.all_gathers} all-gathers of "
        f"{_bytes(cost.gathered)}, {cost.reduce_scatters} reduce-scatters of {_bytes(cost.reduced)}"
    )
    if cost.all_reduces:
        text += f", {cost.all_reduces} all-reduces over the replicas"
    padding = share(cost.padding, cost.gathered)
    if padding >= 0.01:
        text += f"; {padding:.0%} of the gathered bytes are padding of rows that do not divide"
    return f"{text}; a rank sends {_bytes(cost.sent)}"


def _wire(wire: Wire) -> str:
    where = "between nodes" if wire.between else "in the node"
    text = f"{wire.axis}: {wire.seconds:.3g} s a step ({_bytes(wire.bytes)} at {wire.gbps:g} GB/s"
    share = "" if wire.share is None else f", {wire.share:.0%} of the step unless it overlaps"
    return f"{text} {where}){share}"


def _known(result: CheckResult) -> Iterator[Row]:
    for one in result.known:
        if one.measured:
            fixes = "; ".join(one.fixes[:2]) or "none in the catalogue"
            yield Row("known", f"{one.title} (moediag run {one.name}). Fixes: {fixes}.", "doubt")
    for entry in result.found:
        since = f", since {entry.since}" if entry.since else ""
        fixed = f", fixed in {entry.fixed}" if entry.fixed else ""
        words = f"{entry.summary} ({_STATUS[entry.status]}{since}{fixed}: {entry.where})."
        yield Row("found", words, "faint" if entry.status == "by-design" else "doubt")
    others = [one for one in result.known if not one.measured and one.releases]
    if others:
        told = ", ".join(f"{one.name} ({', '.join(one.releases)})" for one in others[:_OTHERS])
        more = f" and {len(others) - _OTHERS} more" if len(others) > _OTHERS else ""
        text = f"scenarios of this family and these axes on other releases: {told}{more}"
        yield Row("related", text, "faint")


def _bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
