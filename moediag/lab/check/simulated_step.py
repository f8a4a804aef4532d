"""Two training steps of a tiny model on simulated ranks, recorded as on real ones.

Each axis of the layout is simulated with two ranks: more of them repeat what these do. A rank is
one process; others' data is answered by :class:`Answers`. The control routes tokens evenly on all
ranks. In every other case the second data-parallel part of the ranks has another routing; the logs
are then those that real ranks would leave up to the first call that does not match.
"""

from __future__ import annotations

import dataclasses
import shutil
import textwrap
import time
from pathlib import Path
from typing import Any, List, Sequence, Tuple

import torch

from moediag.axes import CP, Layout
from moediag.lab.check import configured as reading
from moediag.lab.check import fsdp_units, sharding, simulated_group
from moediag.lab.check.configured import Configured
from moediag.lab.check.simulated_group import ChildRaised, Raised, in_child
from moediag.lab.simulation import Answers
from moediag.lab.step.models import tiny_family
from moediag.lab.step.models.skew import RouterSkew
from moediag.protocol import (
    MAY_FAIL,
    SIZES,
    VOCAB,
    Checked,
    CheckFinding,
    PlannedUnit,
    SimulatedCase,
    SkewSpec,
    StepTask,
    Trial,
    WatchTask,
    events_file,
)
from moediag.recorder.not_applicable import NotApplicable

STEPS = 2  # the second one shows what depends on the first, such as optimizer state
ROWS, LENGTH = 2, 32  # tokens of a batch: a multiple of what an even routing needs
MOST = 8  # simulated ranks
CLIP = 1.0
CONTROL = "control"
# Name -> routing of the skewed ranks, see models.skew, and what it means.
CASES = {
    "idle-experts": (
        "zero-token",
        "on some ranks, but not on others, an expert gets no token of the batch",
    ),
    "one-group": ("one-hot", "on some ranks all tokens go to the first experts"),
}
SCHEDULE = "schedule"


@dataclasses.dataclass(frozen=True)
class Ran:
    """What one simulated rank says beside its log."""

    units: List[PlannedUnit]
    clip: Raised  # why the released clipping failed; empty kind: it did not
    routed: bool  # the requested routing was applied


def simulate(configured: Configured, trial: Trial, folder: Path) -> Checked:
    """Returns the simulated cases. Raises NotApplicable if nothing can be simulated."""
    small = reduced(trial)
    layout, ranks = Layout(small.layout), small.world_size
    skewed = _skewed(layout, ranks)
    sketch = tiny(configured, folder)
    cases, findings, not_seen = [], [], []
    if sketch.model is not configured.model:
        not_seen.append(
            f"calls of parts beside the text model: {sketch.model.__name__} was simulated"
        )
    some_idle = 0 < configured.top_k < configured.experts  # else every token visits every expert
    control, ran = _case(sketch, small, CONTROL, "", "balanced", range(ranks), folder)
    routed = not some_idle or all(one.routed for one in ran)
    cases.append(dataclasses.replace(control, routed=routed))
    if ran[0].clip.kind:
        findings.append(_clipping(ran[0].clip))
    if not routed:
        not_seen.append(
            "which routing parts the ranks: the router does not choose experts by a top-k over all"
        )
    elif some_idle:
        for name, (routing, condition) in CASES.items():
            try:
                case, _ = _case(sketch, small, name, condition, routing, skewed, folder)
                cases.append(case)
            except ChildRaised as error:
                not_seen.append(f"the schedule if {condition} ({error.args[0].words})")
    return Checked(
        cases=cases, findings=findings, not_seen=not_seen, simulated_units=ran[0].units,
        simulated_layout=small.layout,
    )  # fmt: skip


def reduced(trial: Trial) -> Trial:
    """Returns the trial with two ranks along each axis. Raises NotApplicable."""
    layout = Layout(trial.layout)
    inside = trial.world_size < layout.world_size  # tensor parallelism inside expert parallelism
    layout = Layout(dict.fromkeys(layout.active, 2))
    ranks = layout.world_size // (2 if inside else 1)
    if ranks == 1:
        raise NotApplicable("one rank has no schedule to compare")
    if ranks > MOST:
        raise NotApplicable(f"two ranks along each axis are {ranks}, more than {MOST}")
    axes = {str(axis): size for axis, size in layout.axes.items()}
    return dataclasses.replace(trial, layout=axes, world_size=ranks)


def _skewed(layout: Layout, ranks: int) -> List[int]:
    """Returns the ranks with another routing: the second half along the outermost axis whose ranks
    have tokens of their own, or all if the ranks exchange tokens and so have one routing."""
    data = next((axis for axis in layout.active if axis.data_parallel or axis is CP), None)
    if data is None:
        return list(range(ranks))
    outside = layout.active[: layout.active.index(data)]
    period = ranks // 2 ** len(outside)
    return [rank for rank in range(ranks) if rank % period >= period // 2]


def tiny(configured: Configured, folder: Path) -> Configured:
    """Returns the tiny model of the same class, with some of the user's switches."""
    family = configured.family
    if family is None:
        raise NotApplicable("the release's automatic classes lack the model type")

    def find() -> Any:
        return tiny_family.configuration(family, SIZES[0])

    try:
        config = in_child(find, folder)
    except ChildRaised as error:
        raise NotApplicable(
            f"no tiny model of this class could be built: {error.args[0].words}"
        ) from error
    _with_switches(config, configured)
    return reading.of_config(config)


def _with_switches(config: Any, configured: Configured) -> None:
    """Copies true-or-false settings that decide which parameters and calls there are."""
    for small, own in ((config, configured.config), (config.get_text_config(), configured.text)):
        for name in ("tie_word_embeddings", "attention_bias", "qkv_bias", "norm_topk_prob"):
            if type(getattr(small, name, None)) is bool and type(getattr(own, name, None)) is bool:
                setattr(small, name, getattr(own, name))


def _case(
    sketch: Configured, trial: Trial, name: str, condition: str, routing: str,
    ranks: Sequence[int], folder: Path,
) -> Tuple[SimulatedCase, List[Ran]]:  # fmt: skip
    """Simulates ``ranks``; the others have the control's logs. Raises NotApplicable and
    ChildRaised."""
    began = time.monotonic()
    own = folder / name
    own.mkdir()
    skew = SkewSpec(routing=routing) if sketch.experts else SkewSpec()
    changed = dataclasses.replace(trial, variant=name, skew=skew, task=StepTask())
    ran = []
    for rank in ranks:

        def step(rank: int = rank) -> Ran:
            return _rank(sketch, changed, rank, own)

        ran.append(in_child(step, folder))
    for rank in set(range(trial.world_size)) - set(ranks):
        shutil.copy(folder / CONTROL / events_file(rank), own / events_file(rank))
    # No backend: what a mismatch does depends on it.
    dataclasses.replace(changed, task=WatchTask(), backend="").write(own)
    skewed = [] if name == CONTROL else list(ranks)
    return SimulatedCase(name, condition, skewed, name, time.monotonic() - began), ran


def _rank(sketch: Configured, trial: Trial, rank: int, folder: Path) -> Ran:
    from moediag.recorder import install

    torch.set_num_threads(1)
    recorder = install(str(folder), rank, trial.world_size)
    with simulated_group.joined(rank, trial.world_size):
        torch.manual_seed(0)
        model: Any = sketch.build(trial.wrapper.kind != sharding.NATIVE).float()
        wrapped = sharding.wrapped(sketch, model, trial)
        wrapped.make_optimizer()
        routed = RouterSkew(trial.skew, sketch.experts)
        routed.set_rank(rank)
        clip = Raised("", "", "")
        with routed.installed(wrapped.anatomy), Answers():
            for number in range(1, STEPS + 1):
                recorder.set_step(number)
                wrapped.backward(wrapped.loss(batch(number)))
                try:
                    wrapped.clip(CLIP)
                except Exception as error:
                    clip = simulated_group.raised(error)
                wrapped.step()
        units = fsdp_units.units(wrapped.model)
    recorder.finish()
    return Ran(units, clip, routed.applied)


def batch(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(2, VOCAB - 8, (ROWS, LENGTH), generator=generator)


def _clipping(error: Raised) -> CheckFinding:
    return CheckFinding(
        SCHEDULE, MAY_FAIL,
        "if the step clips all parameters with one torch.nn.utils.clip_grad_norm_: it raises "
        f"{error.kind}: {textwrap.shorten(error.text, 160, placeholder=' …')}",
        error.where,
    )  # fmt: skip
