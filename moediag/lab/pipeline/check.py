"""`moediag check`: plans a layout for a model and simulates its ranks, without GPUs and weights.

The library part is one process in the environment of the requested releases. The simulated ranks
leave the logs of real ones; everything after them is shared with watched jobs.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from moediag.axes import CP, EP, TP, Layout
from moediag.diagnosis import diagnose
from moediag.errors import LayoutError, UsageError
from moediag.evidence.model import Evidence, RankEvidence
from moediag.evidence.trial_folder import read_trial
from moediag.lab.launch.launcher import launcher
from moediag.lab.pipeline import check_cost, check_fit, known_scenarios, register
from moediag.lab.pipeline.check_cost import AxisCost, Memory, Wire
from moediag.lab.pipeline.check_fit import Fit, FitWord
from moediag.lab.pipeline.check_options import CheckOptions
from moediag.lab.pipeline.known_scenarios import Known
from moediag.lab.pipeline.register import Entry
from moediag.lab.pipeline.single_process import OFFLINE, why_no_answer
from moediag.lab.stacks import environment
from moediag.launch.settings import LaunchOptions
from moediag.pipeline.run_folder import run_folder
from moediag.protocol import (
    FAILS,
    Checked,
    CheckTask,
    SimulatedCase,
    Trial,
    WrapperSpec,
    write_json,
)
from moediag.records import dataclass
from moediag.result import FAILURES, Diagnosis, Verdict, wording
from moediag.result.answer_blocks import AnswerState

CONFIG = "config.json"
RESULT = "check.json"
WORKED = "worker"  # folder of the worker's files
UNSIMULATED = "whether ranks diverge in a step (--plan-only)"
# Meshes of simulated ranks are of the CPU.
_SETTINGS = LaunchOptions(environment={**OFFLINE, "CUDA_VISIBLE_DEVICES": ""})


@dataclass(frozen=True, slots=True)
class JudgedCase:
    """A simulated case and what its logs show."""

    case: SimulatedCase
    diagnosis: Diagnosis

    @property
    def parts(self) -> bool:
        """Whether the ranks' schedules differ."""
        return self.diagnosis.verdict in FAILURES

    @property
    def agrees(self) -> bool:
        """Whether the logs show that the ranks' schedules agree. Without logs neither is known."""
        return self.diagnosis.verdict == Verdict.CLEAN

    @property
    def unseen(self) -> str:
        """Why it is not known whether they agree; "" if it is."""
        condition = f" if {self.case.condition}" if self.case.condition else ""
        known = self.parts or self.agrees
        return "" if known else f"the schedule{condition}: {self.diagnosis.cause}"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Everything that a check found out."""

    config: str
    layout: Layout
    ranks: int
    versions: Mapping[str, str | None]
    checked: Checked
    cases: tuple[JudgedCase, ...]
    costs: tuple[AxisCost, ...]
    memory: Memory | None
    fit: Fit | None
    """None: it was not asked."""
    wires: tuple[Wire, ...]
    dtypes: str
    """In which parameters are stored, gathered and reduced, and the optimizer's states."""
    known: tuple[Known, ...]
    found: tuple[Entry, ...]
    """Findings of the hunt."""
    not_seen: tuple[str, ...]
    folder: Path

    @property
    def failing(self) -> bool:
        found = any(finding.level == FAILS for finding in self.checked.findings)
        found = found or (self.fit is not None and self.fit.word == FitWord.NO)
        return found or any(case.parts for case in self.cases)

    @property
    def undecided(self) -> str:
        """Returns why nothing can be said, "" if something can."""
        if self.checked.problem:
            return self.checked.problem
        whole = (text for text in self.not_seen if text.startswith("the schedule:"))
        asked = self.fit is not None and self.fit.capacity and self.fit.word is None
        fits = ("whether a step fits: its activations were not measured",) if asked else ()
        return next(iter((*whole, *self.unseen_cases, *fits)), "")

    @property
    def simulated(self) -> bool:
        """Whether a step was simulated, so that agreement of ranks means something."""
        return UNSIMULATED not in self.not_seen

    @property
    def unseen_cases(self) -> tuple[str, ...]:
        return tuple(case.unseen for case in self.cases if case.unseen)

    @property
    def state(self) -> AnswerState:
        return AnswerState.of(self.failing, self.undecided, AnswerState.NO_FAILURE)


def check(options: CheckOptions, tell: Callable[[str, float | None], None]) -> CheckResult:
    """Returns what was found; ``check.json`` in its folder has the same. ``tell``: called with what
    happens now. Raises UsageError, LayoutError and StackError."""
    layout = Layout(options.layout)
    ranks = number_of_ranks(layout, options.world)
    if options.card:
        check_fit.capacity(options.card)
    if options.card or options.batch or options.recompute != "none":
        options = dataclasses.replace(
            options, batch=options.batch or 1, length=options.length or check_fit.LENGTH
        )
    config = find_config(options.config)
    trial = trial_of(options)
    stack = environment.ensure(options.stack, tell)
    folder = run_folder(options.out, f"check-{config.parent.name.lower() or 'model'}")
    place = folder / WORKED
    tell("planning and simulating", None)
    with launcher("fork", stack, folder / "hosts", _SETTINGS) as one:
        checked = ask(trial, one, place)
        memory, fit = _memory(checked, options)
        if fit is not None and fit.word == FitWord.NO:
            fit = _with_change(fit, options, one, place, tell)
    cases, evidence = [], None
    for case in checked.cases:
        read = _comparable(read_trial(place / case.folder))
        evidence = evidence or read
        cases.append(JudgedCase(case, diagnose(read)))
    held = check_cost.as_recorded(checked.simulated_units, evidence) if evidence else ""
    active = [str(axis) for axis in layout.active]
    costs = check_cost.by_axis(checked.units) if not held else ()
    sizes = {str(axis): size for axis, size in layout.axes.items()}
    result = CheckResult(
        config=str(config),
        layout=layout,
        ranks=ranks,
        versions=stack.versions,
        checked=checked,
        cases=tuple(cases),
        costs=costs,
        memory=memory,
        fit=fit,
        wires=check_cost.wires(costs, sizes, ranks, options.bandwidth) if options.bandwidth else (),
        dtypes=_dtypes(checked, options),
        known=known_scenarios.concerning(
            checked.model_type, active, _wrapper(options), stack.versions
        ),
        found=tuple(e for e in register.read() if e.concerns(checked.model_type, active)),
        not_seen=(
            *checked.not_seen,
            *([f"the cost: {held}"] if held else []),
            *([] if options.simulate else [UNSIMULATED]),
        ),
        folder=folder,
    )
    write_json(folder / RESULT, to_json(result))
    return result


def ask(trial: Trial, one: Any, place: Path) -> Checked:
    """Returns the worker's answer, from a host of the requested releases. ``place``: its folder."""
    record = one.run(trial, place)
    try:
        return Checked.read(place)
    except (OSError, ValueError):
        return Checked(problem=why_no_answer(record, place))


def trial_of(options: CheckOptions) -> Trial:
    """Returns what the worker is given. Raises UsageError and LayoutError."""
    layout = Layout(options.layout)
    wrapper = _wrapper(options)
    if (options.param_dtype or options.reduce_dtype) and wrapper != "fsdp2":
        raise UsageError(
            "--param-dtype and --reduce-dtype are arguments of fully_shard, and here "
            "from_pretrained shards",
            "Leave them out, or add --wrapper fsdp2",
        )
    return Trial(
        name="check", scenario="check", variant="check",
        task=CheckTask(
            str(find_config(options.config)), options.simulate, options.length, options.dtype,
            options.batch, options.recompute,
        ),
        world_size=number_of_ranks(layout, options.world),
        layout={str(axis): size for axis, size in layout.axes.items()},
        wrapper=WrapperSpec(
            kind=wrapper, reshard_after_forward=None, param_dtype=options.param_dtype,
            reduce_dtype=options.reduce_dtype,
        ),
        record=False, timeout=options.timeout,
    )  # fmt: skip


def _memory(checked: Checked, options: CheckOptions) -> tuple[Memory | None, Fit | None]:
    if not checked.plan:
        return None, None
    memory = check_cost.memory(checked.plan, checked.units, options.optimizer, options.master)
    return memory, check_fit.of(checked.timeline, memory, options) if options.batch else None


def _with_change(
    fit: Fit, options: CheckOptions, one: Any, place: Path,
    tell: Callable[[str, float | None], None],
) -> Fit:  # fmt: skip
    """Returns it with the first change under which the step fits, each measured in the same way."""
    ranks = number_of_ranks(Layout(options.layout), options.world)
    tried = check_fit.changes(dataclasses.replace(options, simulate=False), fit, ranks)
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
    master = " and a float32 copy of each parameter" if options.master else ""
    return (
        f"{held}; gathered in {computed}, gradients reduced in "
        f"{options.reduce_dtype or computed}; {options.optimizer}: {states.words}{master}"
    )


def find_config(name: str) -> Path:
    """Returns the config.json of a folder, a file or a hub name in the local cache. Raises
    UsageError."""
    path = Path(name)
    for found in (path, path / CONFIG):
        if found.is_file():
            return found.resolve()
    if path.is_dir():
        raise UsageError(f"{name} has no {CONFIG}", "Give the folder of a model, or the file.")
    cached = _cached(name)
    if len(cached) > 1:
        raise UsageError(
            f"{name}: the cache has {len(cached)} snapshots, and no refs/main that names one",
            f"Give the path of one, for example {cached[0]}",
        )
    if cached:
        return cached[0]
    raise UsageError(
        f"{name}: no such file or folder, and no model of that name in {_cache()}",
        f"Nothing is downloaded. Type `hf download {name} {CONFIG}` first, or give a path.",
    )


def _cached(name: str) -> list[Path]:
    """Returns the config.json of the snapshot that ``refs/main`` names, as the hub's client reads
    it; without that file those of all snapshots."""
    model = _cache() / f"models--{name.replace('/', '--')}"
    main = model / "refs" / "main"
    commit = main.read_text(encoding="utf-8").strip() if main.is_file() else "*"
    return sorted(model.glob(f"snapshots/{commit}/{CONFIG}"))


def _cache() -> Path:
    """Returns the hub's cache, by the variables that its client reads."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    return Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()


def number_of_ranks(layout: Layout, world: int | None) -> int:
    """Returns the number of ranks. Those of tensor parallelism may lie inside expert parallelism,
    as transformers counts them: then their size is no factor. Raises LayoutError."""
    product, tp, ep = layout.world_size, layout.size(TP), layout.size(EP)
    if world is None or world == product:
        return product
    if tp > 1 and ep % tp == 0 and world * tp == product:
        return world
    raise LayoutError(
        f"{layout}, but --world is {world}",
        f"The product of the axes is {product}."
        + (f" With {TP} inside {EP} it is {product // tp}." if tp > 1 and ep % tp == 0 else ""),
    )


def _wrapper(options: CheckOptions) -> str:
    layout = Layout(options.layout)
    if options.wrapper:
        return options.wrapper
    divided = any(not axis.data_parallel and axis != CP for axis in layout.active)
    return "transformers" if divided else "fsdp2"


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


def to_json(result: CheckResult) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "config": result.config,
        "layout": {str(axis): size for axis, size in result.layout.axes.items()},
        "ranks": result.ranks,
        "versions": dict(result.versions),
        "dtypes": result.dtypes,
        **result.state.to_json(),
        "undecided": result.undecided,
        **{k: v for k, v in dataclasses.asdict(result.checked).items()
           if k not in ("cases", "not_seen", "problem")},
        "cases": [
            {
                **dataclasses.asdict(one.case),
                "parts": one.parts,
                "verdict": str(one.diagnosis.verdict),
                "culprits": list(one.diagnosis.culprits),
                "first_divergence": dataclasses.asdict(one.diagnosis.first_divergence)
                if one.diagnosis.first_divergence else None,
            }
            for one in result.cases
        ],
        "costs": [{**dataclasses.asdict(cost), "sent": cost.sent} for cost in result.costs],
        "wires": [dataclasses.asdict(wire) for wire in result.wires],
        "memory": dataclasses.asdict(result.memory) if result.memory else None,
        "fit": dataclasses.asdict(result.fit) if result.fit else None,
        "fits": result.fit.word if result.fit else None,
        "known": [dataclasses.asdict(one) for one in result.known],
        "found": [dataclasses.asdict(one) for one in result.found],
        "not_seen": [*result.not_seen, *result.unseen_cases],
    }  # fmt: skip


def share(part: float, whole: float) -> float:
    return part / whole if whole and math.isfinite(whole) else 0.0
