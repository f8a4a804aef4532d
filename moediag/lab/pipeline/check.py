"""`moediag check`: plans a layout for a model and simulates its ranks, without GPUs and weights.

The library part is one process in the environment of the requested releases. The simulated ranks
leave the logs of real ones; everything after them is shared with watched jobs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moediag.axes import Layout
from moediag.diagnosis import diagnose
from moediag.evidence.model import Evidence, RankEvidence
from moediag.evidence.trial_folder import read_trial
from moediag.lab.launch.launcher import launcher
from moediag.lab.pipeline import check_cost, check_fit, check_reserved, known_scenarios, register
from moediag.lab.pipeline.check_cost import AxisCost, Bandwidth, Memory, Wire
from moediag.lab.pipeline.check_fit import Fit, FitWord
from moediag.lab.pipeline.check_options import CheckOptions
from moediag.lab.pipeline.check_request import (
    completed,
    find_config,
    number_of_ranks,
    settings,
    trial_of,
    wrapper_of,
)
from moediag.lab.pipeline.check_result import UNSIMULATED, CheckResult, JudgedCase, to_json
from moediag.lab.pipeline.single_process import why_no_answer
from moediag.lab.stacks import environment
from moediag.pipeline.run_folder import run_folder
from moediag.protocol import Checked, Trial, write_json
from moediag.result import wording

RESULT = "check.json"
WORKED = "worker"  # folder of the worker's files
STEPS = ("schedule", "forward")  # parts of a check that ran a step of a tiny model


def check(options: CheckOptions, tell: Callable[[str, float | None], None]) -> CheckResult:
    """Returns what was found; ``check.json`` in its folder has the same. ``tell``: called with what
    happens now. Raises UsageError, LayoutError and StackError."""
    options = completed(options)
    config = find_config(options.config)
    trial_of(options)  # raises before an environment is built
    stack = environment.ensure(options.stack, tell)
    folder = run_folder(options.out, f"check-{config.parent.name.lower() or 'model'}")
    tell("planning and simulating", None)
    with launcher("fork", stack, folder / "hosts", settings(config)) as one:
        result = answered(options, one, stack.versions, folder, WORKED, tell)
    write_json(folder / RESULT, to_json(result))
    return result


def answered(
    options: CheckOptions, one: Any, versions: Mapping[str, str | None], folder: Path, name: str,
    tell: Callable[[str, float | None], None], alike: CheckResult | None = None,
    measured: CheckResult | None = None,
) -> CheckResult:  # fmt: skip
    """Returns the answer of a running host. ``name``: of the worker's folder; ``alike``: the answer
    for other sizes of the same axes, whose simulated step is this one's too; ``measured``: that for
    another number of data-parallel ranks, whose activations are this one's too."""
    layout = Layout(options.layout)
    ranks = number_of_ranks(layout, options.world)
    if alike is not None:
        options = dataclasses.replace(options, simulate=False)
    place = folder / name
    asked = options if measured is None else dataclasses.replace(options, batch=0)
    checked = ask(trial_of(asked), one, place)
    if alike is not None:
        checked = _with_steps(checked, alike.checked)
    memory, fit = _memory(checked, options)
    timeline = dataclasses.replace(checked.timeline, events=[])  # no part of the answer
    checked = dataclasses.replace(checked, timeline=timeline)
    if memory is not None and measured is not None and measured.memory is not None:
        timeline = check_fit.resharded(measured.checked.timeline, measured.memory, memory)
        checked = dataclasses.replace(checked, timeline=timeline)
        fit = check_fit.of(timeline, memory, options)
    if fit is not None and fit.word == FitWord.NO and not options.brief:
        fit = _with_change(fit, options, one, place, tell)
    cases, evidence = [], None
    for case in checked.cases if alike is None else ():
        read = _comparable(read_trial(place / case.folder))
        evidence = evidence or read
        cases.append(JudgedCase(case, diagnose(read)))
    held = check_cost.as_recorded(checked.simulated_units, evidence) if evidence else ""
    active = [str(axis) for axis in layout.active]
    costs = check_cost.by_axis(checked.units) if not held else ()
    unsimulated = [] if options.simulate or alike is not None else [UNSIMULATED]
    return CheckResult(
        config=str(find_config(options.config)),
        layout=layout,
        ranks=ranks,
        versions=versions,
        checked=checked,
        cases=tuple(cases) if alike is None else alike.cases,
        costs=costs,
        memory=memory,
        fit=fit,
        wires=_wires(checked, costs, layout, ranks, options.bandwidth),
        dtypes=_dtypes(checked, options),
        known=known_scenarios.concerning(checked.model_type, active, wrapper_of(options), versions),
        found=tuple(e for e in register.read() if e.concerns(checked.model_type, active)),
        not_seen=(
            *checked.not_seen, *([f"the cost: {held}"] if held else []), *unsimulated
        ),
        folder=folder,
    )  # fmt: skip


def _with_steps(checked: Checked, other: Checked) -> Checked:
    """Returns it with what the steps of ``other`` showed, which no size of an axis changes."""
    steps = [one for one in other.findings if one.part in STEPS]
    unseen = [text for text in other.not_seen if text.startswith("the schedule")]
    return dataclasses.replace(
        checked, findings=[*checked.findings, *steps], not_seen=[*checked.not_seen, *unseen],
        simulated_units=other.simulated_units, simulated_layout=other.simulated_layout,
        cases=other.cases,
    )  # fmt: skip


def _wires(
    checked: Checked, costs: Sequence[AxisCost], layout: Layout, ranks: int,
    bandwidth: Bandwidth | None,
) -> tuple[Wire, ...]:  # fmt: skip
    """Returns the times of FSDP2's calls and of the others, if those were counted."""
    if bandwidth is None:
        return ()
    sizes = {str(axis): size for axis, size in layout.axes.items()}
    return (
        *check_cost.wires(costs, sizes, ranks, bandwidth),
        *check_cost.wires_of(checked.timeline.traffic, bandwidth),
    )


def ask(trial: Trial, one: Any, place: Path) -> Checked:
    """Returns the worker's answer, from a host of the requested releases. ``place``: its folder."""
    record = one.run(trial, place)
    try:
        return Checked.read(place)
    except (OSError, ValueError):
        return Checked(problem=why_no_answer(record, place))


def _memory(checked: Checked, options: CheckOptions) -> tuple[Memory | None, Fit | None]:
    if not checked.plan:
        return None, None
    memory = check_cost.memory(checked.plan, checked.units, options.optimizer, options.master)
    if not options.batch:
        return memory, None
    fit = check_fit.of(checked.timeline, memory, options)
    if checked.timeline.events:
        reserved = check_reserved.of(checked.timeline, memory, options.accumulate)
        fit = dataclasses.replace(fit, reserved=reserved)
    return memory, fit


def _with_change(
    fit: Fit, options: CheckOptions, one: Any, place: Path,
    tell: Callable[[str, float | None], None],
) -> Fit:  # fmt: skip
    """Returns it with the first change under which the step fits, each measured in the same way."""
    ranks = number_of_ranks(Layout(options.layout), options.world)
    alone = dataclasses.replace(options, simulate=False, brief=True, reserved=False)
    tried = check_fit.changes(alone, fit, ranks)
    for number, (words, changed) in enumerate(tried):
        tell(f"it does not fit; trying {words}", None)
        checked = ask(trial_of(changed), one, place.with_name(f"{place.name}-change-{number}"))
        _, found = _memory(checked, changed)
        if found is not None and found.word in (FitWord.FITS, FitWord.TIGHT):
            peak = f"{found.peak.total / check_fit.GIB:.1f} GiB"
            tight = f", {found.word}" if found.word == FitWord.TIGHT else ""
            return dataclasses.replace(fit, change=f"{words} ({peak}{tight})")
    return fit


def _dtypes(checked: Checked, options: CheckOptions) -> str:
    """Returns which dtypes were used; "" if nothing was planned."""
    if not checked.plan:
        return ""
    stored = Counter[str]()
    for row in checked.plan:
        stored[row.dtype] += row.count
    own = stored.pop(checked.dtype, 0)
    kept = "".join(f", {wording.plural(n, 'parameter')} {dtype}" for dtype, n in stored.items())
    held = f"parameters {checked.dtype} ({checked.dtype_from}){kept}" if own else kept[2:]
    computed = options.param_dtype or checked.dtype
    states = check_cost.OPTIMIZERS[options.optimizer]
    words = states.words.format(dtype="float32" if options.master else "the parameters' dtype")
    master = ", and a float32 copy of each parameter" if options.master else ""
    return (
        f"{held}; gathered in {computed}, gradients reduced in "
        f"{options.reduce_dtype or computed}; {options.optimizer}: {words}{master}"
    )


def _comparable(evidence: Evidence) -> Evidence:
    """Returns the evidence without the sizes of token exchanges: a simulated rank answers them by
    its own counts."""
    ranks = {rank: _without_counts(seen) for rank, seen in evidence.ranks.items()}
    return dataclasses.replace(evidence, ranks=ranks)


def _without_counts(seen: RankEvidence) -> RankEvidence:
    calls = tuple(
        dataclasses.replace(call, numel_in=0, numel_out=0, splits_in=None, splits_out=None)
        if call.op == "all_to_all" else call
        for call in seen.collectives
    )  # fmt: skip
    return dataclasses.replace(seen, collectives=calls)
