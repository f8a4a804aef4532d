"""The plan: what the sharded model says about each parameter, and what is odd about it."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

from moediag.axes import CP, DP_SHARD, EP, PP, TP, Layout
from moediag.lab.check import (
    activations,
    checkpoint_names,
    expert_owners,
    fsdp_units,
    sharding,
)
from moediag.lab.check.configured import Configured
from moediag.lab.check.plan_rules import PLAN, Rules
from moediag.lab.check.tensor_places import axes, listed, sizes, slices
from moediag.lab.step.models import moe_configs
from moediag.lab.step.models.plan_names import generic
from moediag.lab.step.shard.wrapped import Wrapped
from moediag.protocol import (
    FAILS,
    MAY_FAIL,
    NOTE,
    Checked,
    CheckFinding,
    CheckTask,
    MemoryTimeline,
    PlannedParameter,
    Trial,
)
from moediag.protocol.names import clean_fqn
from moediag.recorder.not_applicable import NotApplicable
from moediag.recorder.step import pieces

_HEADS = re.compile(r"(^|\.)(q|k|v)_proj\.weight$")
_LAYER = re.compile(r"layers\.(\d+)\.")
_VIEW = re.compile(r"-1,\s*(self\.)?head_dim\b")  # of a view: the number of heads is what is left


def of_model(configured: Configured, trial: Trial, folder: Path) -> Checked:
    """Returns the plan of the model without weights. In a simulated process group."""
    assert isinstance(trial.task, CheckTask)
    dtype, why = configured.dtype(trial.task.dtype)
    whole: Any = configured.on_meta(dtype)
    tied = _tied(whole)
    sizes = {name: tuple(p.shape) for name, p in whole.named_parameters()}
    native = trial.wrapper.kind == sharding.NATIVE

    def another() -> Wrapped:
        return sharding.wrapped(configured, configured.on_meta(dtype, tied=not native), trial)

    stored: List[CheckFinding] = []
    not_seen: List[str] = []
    try:
        stored = checkpoint_names.findings(configured.folder, whole, tied)
    except checkpoint_names.NotRead as reason:
        not_seen.append(f"the checkpoint: {reason}")
    found = another() if native else sharding.wrapped(configured, whole, trial)
    plan = _Plan(configured, trial, found, sizes, tied).checked()
    timeline = MemoryTimeline()
    if trial.task.batch:
        try:
            timeline = activations.measured(configured, another, trial, folder)
        except NotApplicable as reason:
            not_seen.append(f"the memory of activations: {reason}")
    return dataclasses.replace(
        plan, findings=[*plan.findings, *stored], not_seen=[*plan.not_seen, *not_seen],
        dtype=str(dtype).replace("torch.", ""), dtype_from=why, timeline=timeline,
    )  # fmt: skip


class _Plan:
    def __init__(
        self,
        configured: Configured,
        trial: Trial,
        wrapped: Wrapped,
        sizes: Dict[str, Tuple[int, ...]],
        tied: Sequence[Sequence[str]],
    ) -> None:
        self.configured, self.trial, self.wrapped, self.tied = configured, trial, wrapped, tied
        self.layout = Layout(trial.layout)
        self.model: Any = wrapped.model
        self.rules = Rules(self.model, self.layout, trial.wrapper.kind)
        self.elements = sum(math.prod(shape) for shape in sizes.values())
        self.parameters = [(clean_fqn(n), p) for n, p in self.model.named_parameters()]
        self.not_seen: List[str] = []

    def checked(self) -> Checked:
        rows = list(self.rows())
        experts = self.configured.experts
        owners, wrong = expert_owners.owners(
            self.model, experts, self.parameters, self.layout.size(EP)
        )
        return Checked(
            model=type(self.model).__name__.replace("FSDP", "", 1),
            model_type=self.configured.config.model_type,
            parameters=self.elements,
            experts=max([one.experts for one in owners], default=experts),
            top_k=self.configured.top_k,
            asked=sharding.words(self.trial),
            plan=rows,
            stage_layers=self._layers() if self.layout.size(PP) > 1 else 0,
            stages=self._stages(),
            units=fsdp_units.units(self.model),
            owners=owners,
            findings=[*self.findings(rows), *wrong],
            not_seen=self.not_seen,
        )

    def _layers(self) -> int:
        found = (_LAYER.search(name) for name, _ in self.parameters)
        return len({match[1] for match in found if match})

    def _stages(self) -> List[int]:
        """Returns the layers of each stage, as the release divides them; empty if not shown."""
        divide = getattr(getattr(self.model, "_pp_stage", None), "layer_range_for_rank", None)
        if divide is None:
            return []
        count = len(getattr(self.model, self.model.base_model_prefix).layers)
        ranges = (divide(stage, count) for stage in range(self.layout.size(PP)))
        return [last - first for first, last in ranges]

    # -------------------------------------------------------------- parameters

    def rows(self) -> Iterator[PlannedParameter]:
        groups: Dict[Any, List[Any]] = {}
        for name, parameter in self.parameters:
            key = (
                generic(name),
                tuple(parameter.shape),
                str(parameter.dtype),
                pieces.axes_of(parameter),
            )
            groups.setdefault(key, []).append(parameter)
        for (name, shape, dtype, _), members in groups.items():
            first = members[0]
            most, least = sizes(first)
            if pieces.distributed(first) and pieces.local(first).numel() > most:
                self.not_seen.append(f"how much of {name} the other ranks hold (placement unknown)")
            rule, where = self.rules.of(name)
            routed = expert_owners.routed(name, self.configured.experts)
            yield PlannedParameter(
                name, len(members), list(shape), dtype.replace("torch.", ""),
                first.element_size(), slices(first), most, least, routed, rule, where,
            )  # fmt: skip

    # -------------------------------------------------------------- findings

    def findings(self, rows: Sequence[PlannedParameter]) -> Iterator[CheckFinding]:
        yield from self._undivided(rows)
        yield from partial_heads(rows, self.configured.text, self._views_heads)
        yield from self._uneven(rows)
        yield from self.rules.findings()
        yield from self._mixed()
        yield from fsdp_units.mixed_dtypes(self.model, PLAN)
        yield from parted(self.model, self.tied)

    def _undivided(self, rows: Sequence[PlannedParameter]) -> Iterator[CheckFinding]:
        """Axes that divide nothing, and large parameters that stay whole along one."""
        native = self.trial.wrapper.kind == sharding.NATIVE
        names = {TP: (TP,), EP: (EP,), DP_SHARD: ("fsdp", "efsdp", DP_SHARD, f"{DP_SHARD}_{CP}")}
        if not native:
            del names[TP], names[EP]
        for axis in (a for a in names if a in self.layout.active):
            cut = [r for r in rows if any(s.axis in names[axis] and s.dim is not None
                                          for s in r.slices)]  # fmt: skip
            size = self.layout.size(axis)
            if not cut:
                yield CheckFinding(
                    PLAN, FAILS, f"no parameter is divided over {axis}={size}: each of its ranks "
                    "holds and computes the same", self.rules.file,
                )  # fmt: skip
                continue
            layers = [row for row in cut if "*" in row.name]
            if not layers and any("*" in row.name for row in rows):
                yield CheckFinding(
                    PLAN, FAILS, f"no parameter of a layer is divided over {axis}={size}, only "
                    f"{listed([row.name for row in cut])}: each of its ranks holds and computes "
                    "the layers whole", self.rules.file,
                )  # fmt: skip
                continue
            whole = [r for r in rows if r not in cut and (r.routed or axis is not EP)]
            if whole:
                share = sum(math.prod(r.shape) * r.count for r in whole) / max(self.elements, 1)
                yield CheckFinding(
                    PLAN, NOTE, f"{listed([r.name for r in whole])}: whole along {axis}, "
                    f"{share:.1%} of all elements",
                )  # fmt: skip

    def _uneven(self, rows: Sequence[PlannedParameter]) -> Iterator[CheckFinding]:
        empty = [row for row in rows if row.slices and row.least == 0]
        if empty:
            yield CheckFinding(
                PLAN, NOTE,
                f"{listed([row.name for row in empty])}: fewer rows than ranks that divide them, "
                "so that some ranks hold none; the others hold no less than with fewer ranks",
            )  # fmt: skip

    def _mixed(self) -> Iterator[CheckFinding]:
        """Kinds of tensors in one optimizer group."""
        kinds = Counter(axes(parameter) for _, parameter in self.parameters)
        meshes = [kind for kind in kinds if kind]
        if "" in kinds and meshes:
            plain = [generic(name) for name, p in self.parameters if not axes(p)]
            yield CheckFinding(
                PLAN, MAY_FAIL,
                "if one optimizer group holds all parameters and runs foreach or fused (the "
                f"default on GPUs): {kinds['']} plain tensors ({listed(sorted(set(plain)))}) are "
                f"beside DTensors on {' and '.join(meshes)}, which torch refuses in one call",
            )  # fmt: skip
        elif len(meshes) > 1:
            told = ", ".join(f"{kinds[mesh]} on {mesh}" for mesh in meshes)
            yield CheckFinding(
                PLAN, NOTE, f"parameters lie on {len(meshes)} meshes ({told}): clip and step them "
                "by functions that accept several",
            )  # fmt: skip

    def _views_heads(self, name: str) -> bool:
        """Whether the attention that has this parameter views its projections as whole heads."""
        parent = name.rpartition(".")[0].rpartition(".")[0]
        found = (m for n, m in self.model.named_modules() if generic(clean_fqn(n)) == parent)
        attention: Any = next(found, None)
        try:
            return _VIEW.search(inspect.getsource(type(attention).forward)) is not None
        except (OSError, TypeError, AttributeError):
            return False


def partial_heads(
    rows: Sequence[PlannedParameter], text: Any, views_heads: Callable[[str], bool]
) -> Iterator[CheckFinding]:
    """A rank of tensor parallelism needs whole heads if attention views its part as heads."""
    counts = {"q": moe_configs.value(text, "num_attention_heads") or 0}
    size = moe_configs.value(text, "head_dim")
    if size is None and counts["q"]:  # as the classes take it; the rows below must agree
        size = (moe_configs.value(text, "hidden_size") or 0) // counts["q"]
    counts["k"] = counts["v"] = moe_configs.value(text, "num_key_value_heads") or 0
    for row in rows:
        cut = next((s for s in row.slices if s.axis == TP and s.dim == 0), None)
        match = _HEADS.search(row.name)
        if cut is None or match is None or not isinstance(size, int):
            continue
        # Other attention, such as a latent one, has rows of another meaning.
        if counts[match[2]] * size == row.shape[0] and row.shape[0] % (size * cut.size):
            raises = views_heads(row.name)
            effect = "the first forward raises: attention views its part as whole heads"
            doubt = "attention must not take its part for whole heads"
            yield CheckFinding(
                PLAN, FAILS if raises else MAY_FAIL,
                f"{row.name} has {row.shape[0]} rows, {_heads(row.shape[0], size)} of {size}: "
                f"tp={cut.size} gives a rank {row.shape[0] / cut.size / size:.3g} heads; "
                f"{effect if raises else doubt}",
                row.where,
            )  # fmt: skip


def parted(model: Any, tied: Sequence[Sequence[str]]) -> Iterator[CheckFinding]:
    """Tied parameters that have different placements now, so that they cannot be one tensor."""
    now = dict(model.named_parameters(remove_duplicate=False))
    for names in tied:
        present = [name for name in names if name in now]
        if len({pieces.axes_of(now[name]) for name in present}) > 1:
            yield CheckFinding(
                PLAN, FAILS, f"tied parameters part: {listed(present)} have different placements, "
                "so that each is a tensor of its own and trains apart",
            )  # fmt: skip


def _tied(model: Any) -> List[List[str]]:
    """Returns the names of parameters that are one tensor."""
    by_tensor: Dict[int, List[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(parameter), []).append(name)
    return [names for names in by_tensor.values() if len(names) > 1]


def _heads(rows: int, size: int) -> str:
    count = rows / size
    return f"{count:g} head{'' if count == 1 else 's'}"
