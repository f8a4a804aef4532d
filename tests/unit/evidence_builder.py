"""Builds evidence for tests: simulates the programs of ranks and writes a trial's folder.

`Job.run` executes the ranks' programs like a communication library without a timeout: a rank stays
in a collective that cannot complete because a rank is missing or the calls do not match. The
evidence is exactly what a recorder, a watchdog and workers would record.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from moediag import protocol
from moediag.evidence.model import (
    Collective,
    Evidence,
    ExitStatus,
    Group,
    RankError,
    RankEvidence,
    Stall,
    TokenCount,
)
from moediag.protocol import GradientError, Outcome, write_json


@dataclass(frozen=True)
class Op:
    """One call in a rank's program; ``numel`` is the whole tensor."""

    group: str
    op: str = "all_reduce"
    numel: int = 8
    dtype: str = "float32"
    parameters: tuple[str, ...] | None = None
    missing: tuple[str, ...] = ()
    splits_in: tuple[int, ...] | None = None
    splits_out: tuple[int, ...] | None = None
    reduce: str | None = None
    peer: int | None = None
    asynchronous: bool = False
    step: int = 1
    phase: str = "other"
    module: str = ""


@dataclass
class Job:
    """``groups``: name -> (ranks, axis); ``programs``: one list of calls for each rank."""

    groups: dict[str, tuple[tuple[int, ...], str | None]]
    programs: list[list[Op]]
    tokens: dict[int, tuple[TokenCount, ...]] = field(default_factory=dict)
    backend: str = "gloo"

    @property
    def world(self) -> int:
        return len(self.programs)

    def run(self) -> Evidence:
        return _Run(self).evidence()

    def whole(self) -> Evidence:
        """Runs every program to its end, with unknown completion: a simulated schedule."""
        ranks = {}
        for rank in range(self.world):
            positions: dict[str, int] = {}
            calls = []
            for index, op in enumerate(self.programs[rank]):
                position = positions.get(op.group, 0)
                positions[op.group] = position + 1
                calls.append(call(self, op, index, position, float(index)))
            ranks[rank] = self._rank(rank, calls, finished=True)
        return Evidence(self.world, ranks, backend=self.backend)

    def _rank(self, rank: int, calls: Sequence[Collective], finished: bool) -> RankEvidence:
        groups = {n: Group(n, r, a) for n, (r, a) in self.groups.items() if rank in r}
        return RankEvidence(
            rank=rank,
            collectives=tuple(calls),
            groups=groups,
            tokens=self.tokens.get(rank, ()),
            exit=ExitStatus(code=0) if finished else ExitStatus(signal="SIGKILL", by_us=True),
            versions={"torch": "2.13.0"},
            finished=finished,
        )


def call(job: Job, op: Op, index: int, position: int, time: float) -> Collective:
    size = len(job.groups[op.group][0])
    part = op.numel // size if op.numel % size == 0 else op.numel
    into = part if op.op == "all_gather" else op.numel
    out = part if op.op == "reduce_scatter" else op.numel
    if op.op == "all_to_all" and op.splits_out is not None:
        out = sum(op.splits_out)
    return Collective(
        index=index,
        group=op.group,
        position=position,
        op=op.op,
        numel_in=into,
        numel_out=out,
        dtype=op.dtype,
        phase=op.phase,
        module=op.module,
        step=op.step,
        splits_in=op.splits_in,
        splits_out=op.splits_out,
        peer=op.peer,
        reduce=op.reduce,
        parameters=op.parameters,
        parameters_missing=op.missing,
        time=time,
        asynchronous=op.asynchronous,
    )


class _Run:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.at = [0] * job.world
        self.calls: list[list[Collective]] = [[] for _ in range(job.world)]
        self.positions: list[dict[str, int]] = [{} for _ in range(job.world)]
        self.met: dict[tuple[str, int], dict[int, Op]] = {}
        self.blocked: dict[int, tuple[str, int]] = {}
        self.clock = 0.0

    def evidence(self) -> Evidence:
        moved = True
        while moved:  # one call of each rank in turn
            moved = sum(self._advance(rank) for rank in range(self.job.world)) > 0
        ranks = {}
        for rank in range(self.job.world):
            finished = rank not in self.blocked and self.at[rank] == len(self.job.programs[rank])
            calls = [
                replace(c, completed=self._complete((c.group, c.position)))
                for c in self.calls[rank]
            ]
            ranks[rank] = self.job._rank(rank, calls, finished)
        waiting = tuple(sorted(self.blocked))
        stall = Stall(self.clock, 3.0, waiting) if waiting else None
        return Evidence(self.job.world, ranks, backend=self.job.backend, stall=stall)

    def _advance(self, rank: int) -> bool:
        """Executes one call of one rank; False if the rank cannot continue."""
        if rank in self.blocked:
            if not self._complete(self.blocked[rank]):
                return False
            del self.blocked[rank]
        if self.at[rank] == len(self.job.programs[rank]):
            return False
        op = self.job.programs[rank][self.at[rank]]
        position = self.positions[rank].get(op.group, 0)
        self.positions[rank][op.group] = position + 1
        self.clock += 1.0
        self.calls[rank].append(call(self.job, op, self.at[rank], position, self.clock))
        self.at[rank] += 1
        self.met.setdefault((op.group, position), {})[rank] = op
        if not op.asynchronous:
            self.blocked[rank] = (op.group, position)
        return True

    def _complete(self, event: tuple[str, int]) -> bool:
        ranks = self.job.groups[event[0]][0]
        met = self.met.get(event, {})
        if len(met) < len(ranks):
            return False
        # All-to-all may be uneven: its pairs must fit, not its totals.
        sizes = {o.numel for o in met.values() if o.op != "all_to_all"}
        if len(sizes) > 1 or len({(o.op, o.dtype, o.reduce) for o in met.values()}) > 1:
            return False
        return all(
            met[i].splits_in is None
            or met[j].splits_out is None
            or met[i].splits_in[b] == met[j].splits_out[a]
            for a, i in enumerate(ranks)
            for b, j in enumerate(ranks)
        )


# ------------------------------------------------------------------------ an FSDP2 step


EXPERTS, LAYERS = 8, 2
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def expert(layer: int, number: int) -> tuple[str, ...]:
    return tuple(f"model.layers.{layer}.mlp.experts.{number}.{p}.weight" for p in PROJECTIONS)


def layer_parameters(layer: int) -> tuple[str, ...]:
    router = (
        f"model.layers.{layer}.self_attn.q_proj.weight",
        f"model.layers.{layer}.mlp.gate.weight",
    )
    return router + tuple(p for e in range(EXPERTS) for p in expert(layer, e))


ROOT = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
PARAMETERS = ROOT + tuple(p for layer in range(LAYERS) for p in layer_parameters(layer))


def numel(parameters: Sequence[str]) -> int:
    return 512 * len(parameters)


def fsdp2_step(starved: set[tuple[int, int]], step: int = 1) -> list[Op]:
    """One rank's step with one FSDP group a layer; ``starved``: (layer, expert) without tokens."""
    ops = []
    units = [("", ROOT)] + [(f"model.layers.{n}", layer_parameters(n)) for n in range(LAYERS)]
    for module, of in units:
        ops.append(
            Op("0", "all_gather", numel(of), parameters=of, asynchronous=True, step=step,
               phase="forward", module=module)
        )  # fmt: skip
    for module, of in reversed(units):
        gone = {p for layer, e in starved for p in expert(layer, e)}
        carried = tuple(p for p in of if p not in gone)
        left = tuple(p for p in of if p in gone)
        ops.append(
            Op("0", "reduce_scatter", numel(carried), parameters=carried, missing=left, step=step,
               reduce="avg", phase="backward", module=module)
        )  # fmt: skip
    ops.append(Op("0", "all_reduce", 1, reduce="sum", step=step))
    return ops


def expert_step(starved: set[int], step: int = 1) -> list[Op]:
    """One rank's step with one layer and one FSDP group for each of its experts."""
    used = [e for e in range(EXPERTS) if e not in starved]
    ops = []
    for e in used:
        of = expert(0, e)
        ops.append(
            Op("0", "all_gather", numel(of), parameters=of, step=step, phase="forward",
               module=f"model.layers.0.mlp.experts.{e}")
        )  # fmt: skip
    for e in reversed(used):
        of = expert(0, e)
        ops.append(
            Op("0", "reduce_scatter", numel(of), parameters=of, step=step, reduce="avg",
               phase="backward", module=f"model.layers.0.mlp.experts.{e}")
        )  # fmt: skip
    return ops


def fsdp2_job(*starved: set[tuple[int, int]], steps: int = 1, from_step: int = 1) -> Job:
    """One rank for each set, all in one group; ``from_step``: where starving begins."""
    world = len(starved)
    programs = [
        [
            op
            for step in range(1, steps + 1)
            for op in fsdp2_step(mine if step >= from_step else set(), step)
        ]
        for mine in starved
    ]
    tokens = {
        rank: tuple(
            routed(layer, {e for n, e in mine if n == layer} if step >= from_step else set(), step)
            for step in range(1, steps + 1)
            for layer in range(LAYERS)
        )
        for rank, mine in enumerate(starved)
    }
    return Job({"0": (tuple(range(world)), "dp_shard")}, programs, tokens)


def expert_job(*starved: set[int]) -> Job:
    return Job(
        {"0": (tuple(range(len(starved))), "dp_shard")},
        [expert_step(mine) for mine in starved],
        {rank: (routed(0, mine, 1),) for rank, mine in enumerate(starved)},
    )


def routed(layer: int, starved: set[int], step: int) -> TokenCount:
    counts = tuple(0 if e in starved else 4 + e for e in range(EXPERTS))
    return TokenCount(step, f"model.layers.{layer}.mlp", counts)


def measured(
    evidence: Evidence, wrong: Sequence[str] = (), compared: Sequence[str] = PARAMETERS
) -> Evidence:
    """With each rank's outcome; ``wrong``: parameters whose gradient is off by 3e-3."""
    gradients = {
        p: GradientError(3e-3 if p in wrong else 0.0, 0.1, wrong=p in wrong) for p in compared
    }
    ranks = {
        rank: replace(
            seen,
            outcome=Outcome(rank, {"1": gradients}, [4.85], gradient_norms=[1.2], steps_done=1),
        )
        for rank, seen in evidence.ranks.items()
    }
    return replace(evidence, ranks=ranks)


def died(
    evidence: Evidence, rank: int, error: RankError | None = None, signal: str | None = None
) -> Evidence:
    """``rank`` exited by itself, without a stall; the launcher ended the others."""
    ranks = dict(evidence.ranks)
    end = ExitStatus(code=None if signal else 1, signal=signal)
    ranks[rank] = replace(ranks[rank], exit=end, error=error, finished=False)
    return replace(evidence, ranks=ranks, stall=None)


RESET = RankError("RuntimeError", "[gloo/transport/tcp/pair.cc:537] Connection reset by peer")
ABORTED = (
    "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
    "  what():  op.preamble.length <= op.nbytes. 15696 vs 14160. "
    "Is there a distributed collective mismatch in your code?",
)


def aborted_on_gloo(evidence: Evidence, rank: int) -> Evidence:
    """A size mismatch on gloo: ``rank`` aborts, its peers lose the connection."""
    ranks = {
        r: replace(seen, exit=ExitStatus(code=1), error=replace(RESET, time=1e6))
        for r, seen in evidence.ranks.items()
    }
    ranks[rank] = replace(
        ranks[rank],
        exit=ExitStatus(signal="SIGABRT"),
        error=RankError("gloo::EnforceNotMet", ABORTED[1].strip()),
        last_lines=ABORTED,
    )
    return replace(evidence, ranks=ranks, stall=None)


# ------------------------------------------------------------------------ files


def write(evidence: Evidence, folder: Path) -> Path:
    """Writes the folder from which this evidence can be read."""
    folder.mkdir(parents=True, exist_ok=True)
    protocol.Trial(
        "t", "s", "unfixed", world_size=evidence.world_size, backend=evidence.backend
    ).write(folder)
    for rank, seen in evidence.ranks.items():
        lines = [json.dumps(event) + "\n" for event in events(seen, evidence.world_size)]
        (folder / protocol.events_file(rank)).write_text("".join(lines))
        (folder / protocol.output_file(rank)).write_text("\n".join(seen.last_lines))
        if seen.outcome is not None:
            seen.outcome.write(folder)
    stall = evidence.stall
    write_json(
        folder / "launch.json",
        {
            "started": 0.0,
            "ended": 1.0,
            "exits": {
                str(r): dataclasses.asdict(seen.exit)
                for r, seen in evidence.ranks.items()
                if seen.exit is not None
            },
            "deaths": [{"rank": r, "time": float(i)} for i, r in enumerate(evidence.deaths)],
            "stall": None if stall is None else dataclasses.asdict(stall),
            "timed_out": evidence.timed_out,
            "interrupted": evidence.interrupted,
            "launch_error": evidence.launch_error,
            "not_seen": list(evidence.not_seen),
        },
    )
    return folder


def events(seen: RankEvidence, world_size: int) -> list[dict[str, object]]:
    """The recorder's log of one rank, as objects."""
    out: list[dict[str, object]] = [
        {"e": "start", "t": 0.0, "rank": seen.rank, "world_size": world_size, **seen.versions}
    ]
    out += [
        {"e": "group", "t": 0.0, "group": group.name, "desc": group.desc, "axis": group.axis,
         "ranks": list(group.ranks), "backend": group.backend}
        for group in seen.groups.values()
    ]  # fmt: skip
    names: dict[tuple[str, ...], int] = {}

    def interned(fqns: tuple[str, ...] | None) -> int | None:
        if fqns is None:
            return None
        if fqns not in names:
            names[fqns] = len(names)
            out.append({"e": "names", "t": 0.0, "id": names[fqns], "fqns": list(fqns)})
        return names[fqns]

    out += [{"e": "tokens", "t": 0.0, **dataclasses.asdict(line)} for line in seen.tokens]
    out += [{"e": "finding", "t": 0.0, **dataclasses.asdict(one)} for one in seen.findings]
    out += [
        {"e": "decision", "t": one.time, "what": one.what, "value": one.value, "step": one.step}
        for one in seen.decisions
    ]
    out += [{"e": "weights", "t": 0.0, **dataclasses.asdict(held)} for held in seen.weights]
    if seen.experts_used:
        out.append({"e": "experts_used", "t": 0.0, "rows": dict(seen.experts_used)})
    out += [{"e": "note", "t": 0.0, "text": text} for text in seen.notes]
    for c in seen.collectives:
        carries = interned(c.parameters)
        of = None if c.parameters is None else interned(c.parameters + c.parameters_missing)
        out.append(
            {"e": "collective", "t": c.time, "n": c.index, "group": c.group, "k": c.position,
             "op": c.op, "numel_in": c.numel_in, "numel_out": c.numel_out, "dtype": c.dtype,
             "splits_in": c.splits_in, "splits_out": c.splits_out, "peer": c.peer,
             "reduce": c.reduce, "phase": c.phase, "module": c.module, "carries": carries,
             "of": of, "sizes": None, "site": c.site, "step": c.step, "async": c.asynchronous}
        )  # fmt: skip
        if c.completed:
            out.append({"e": "done", "t": c.time, "n": c.index})
    if seen.error is not None:
        out.append(
            {"e": "error", "t": seen.error.time, "type": seen.error.type,
             "message": seen.error.message, "where": seen.error.where}
        )  # fmt: skip
    if seen.finished:
        out.append({"e": "end", "t": 9e9})
    return out
