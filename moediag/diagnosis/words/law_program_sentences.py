"""Sentences about what a watched job declared, loaded and left out."""

from __future__ import annotations

from collections.abc import Iterator

from moediag.diagnosis.numbers.law_declared import DeclaredApart, DeclaredFacts
from moediag.diagnosis.numbers.law_loads import LoadFacts, PartLoaded
from moediag.diagnosis.numbers.law_models import ModelFacts
from moediag.result.wording import listed, plural, ranks


def of_declared(d: DeclaredApart) -> str:
    """A tensor that was declared to be equal and is not."""
    at = f" at {d.first.line}" if d.first.line else ""
    what = "a tensor of floats" if d.size else "the model's own input, a tensor of integers"
    much = f" by up to {100 * min(d.size, 1):.0f} % of its norm" if d.size else ""
    steps = ", ".join(map(str, d.steps[:6]))
    return (
        f"In all compared steps ({steps}) {what} ({d.first.shape}){at} differs between "
        f"{ranks(d.ranks)}{much}, though the program declares it to be the same on all ranks of "
        f"{', '.join(d.first.axes)} (DTensor.from_local with Replicate)."
    )


def of_part(p: PartLoaded) -> str:
    """Parameters whose parts come from different places."""
    at = f" at {p.line}" if p.line else ""
    return (
        f"In step {p.step} the shards of {plural(len(p.names), 'parameter')} ({listed(p.names)}) "
        f"do not belong together: {ranks(p.loaded)} loaded the whole parameter{at} before FSDP2 "
        f"sharded it, {ranks(p.others)} did not and had other values, and nothing "
        "changed the shards afterwards."
    )


def notes(declared: DeclaredFacts, models: ModelFacts, loads: LoadFacts) -> tuple[str, ...]:
    """Facts that may be deliberate."""
    return (*_of_models(models), *_of_loads(loads), *_of_declared(declared))


def _of_declared(declared: DeclaredFacts) -> Iterator[str]:
    if declared.others is not None:
        yield of_declared(declared.others)


def _of_models(m: ModelFacts) -> Iterator[str]:
    if m.buffers:
        yield (
            f"{plural(len(m.buffers), 'buffer')} ({listed(m.buffers)}) never changed "
            f"and {'differ' if len(m.buffers) > 1 else 'differs'} between {ranks(m.buffer_ranks)}, "
            "which average their gradients: each computes with other constants."
        )
    if m.left_out:
        yield (
            f"{plural(len(m.left_out), 'parameter')} ({listed(m.left_out)}) had "
            "gradients in all checked steps and never changed: no optimizer that stepped has "
            f"{'them' if len(m.left_out) > 1 else 'it'}."
        )
    if m.frozen_routers:
        yield (
            f"The router's {listed(m.frozen_routers)} does not require gradients, though the "
            "experts do: it keeps its first values."
        )
    if m.averages is not None:
        counts = ", ".join(f"{n} times on rank {rank}" for rank, n in list(m.averages.items())[:4])
        yield (
            f"An AveragedModel was not updated equally often on all ranks ({counts}), since step "
            f"{m.average_step}: the average is complete on some ranks only."
        )
    if m.tied is not None:
        (one, two), (rank, other) = m.tied.names, m.tied.ranks
        yield (
            f"{one} on rank {rank} and {two} on rank {other} had the same values before the first "
            f"update and differ since step {m.tied.step}: if pipeline stages share this matrix, "
            "nothing adds up their gradients."
        )


def _of_loads(loads: LoadFacts) -> Iterator[str]:
    if loads.other_names is not None:
        load = loads.other_names
        at = f" at {load.line}" if load.line else ""
        yield (
            f"load_state_dict{at} left out {plural(load.counts[0], 'name')} of the model "
            f"({listed(load.missing)}) and {plural(load.counts[1], 'name')} of the checkpoint "
            f"({listed(load.unexpected)}): the former keep their first values."
        )
    if loads.forgotten is not None:
        at = f" at {loads.forgotten.line}" if loads.forgotten.line else ""
        yield (
            f"The checkpoint loaded{at} has the state of an optimizer, which no optimizer loaded: "
            f"{loads.forgotten.optimizer} began without state, with the model's parameters loaded."
        )
