"""Prints how far the cost that `moediag check` tells is from what real ranks do and hold.

    python -m bench.check_cost [--only TEXT] > reports/check-cost.md

Each layout is planned by `moediag check` and trained by an ordinary program on gloo ranks of this
machine, with the recorder. Calls and bytes are those of the last step; memory is summed over the
tensors of each rank, and of the rank that holds most.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.torchrun import command, launch, variables
from moediag.axes import DP_REPLICATE, TP, Layout
from moediag.evidence.model import Evidence
from moediag.evidence.trial_folder import read_trial
from moediag.lab.families import FAMILIES
from moediag.lab.pipeline import check, check_cost
from moediag.lab.stacks import environment
from moediag.protocol import ModelSpec

RELEASE = {"transformers": "5.23.0"}
NEAR = 0.02  # relative difference that is allowed
BOUND = 240.0  # seconds for the ranks of a layout
# Rows that do not divide by 8: padding is part of what is compared.
MODEL = ModelSpec(hidden=64, heads=8, kv_heads=4, experts=8, layers=2)
VOCAB = 132
ELEMENT = 4  # bytes: the program trains in float32
# Who shards, the layout as `moediag check` gets it, and the DistributedConfig as a user writes it.
LAYOUTS: tuple[tuple[str, dict[str, int], dict[str, int]], ...] = (
    ("fsdp2", {"dp_shard": 2}, {}),
    ("fsdp2", {"dp_shard": 4}, {}),
    ("fsdp2", {"dp_shard": 8}, {}),
    ("fsdp2", {"dp_replicate": 2, "dp_shard": 2}, {}),
    ("fsdp2", {"dp_replicate": 2, "dp_shard": 4}, {}),
    ("fsdp2", {"dp_replicate": 4, "dp_shard": 2}, {}),
    ("transformers", {"dp_shard": 2}, dict(fsdp_size=2)),
    ("transformers", {"dp_shard": 8}, dict(fsdp_size=8)),
    ("transformers", {"dp_replicate": 2, "dp_shard": 2}, dict(dp_replicate_size=2, fsdp_size=2)),
    ("transformers", {"dp_replicate": 2, "dp_shard": 4}, dict(dp_replicate_size=2, fsdp_size=4)),
    ("transformers", {"ep": 2}, dict(fsdp_size=2, ep_size=2)),
    ("transformers", {"ep": 4}, dict(fsdp_size=4, ep_size=4)),
    ("transformers", {"dp_shard": 2, "ep": 2}, dict(fsdp_size=4, ep_size=2)),
    ("transformers", {"dp_shard": 4, "ep": 2}, dict(fsdp_size=8, ep_size=2)),
    ("transformers", {"dp_shard": 2, "ep": 4}, dict(fsdp_size=8, ep_size=4)),
    ("transformers", {"tp": 2}, dict(tp_size=2)),
    ("transformers", {"tp": 4}, dict(tp_size=4)),
    ("transformers", {"dp_shard": 2, "tp": 2}, dict(fsdp_size=2, tp_size=2)),
    ("transformers", {"dp_shard": 2, "tp": 4}, dict(fsdp_size=2, tp_size=4)),
    ("transformers", {"dp_shard": 4, "tp": 2}, dict(fsdp_size=4, tp_size=2)),
    ("transformers", {"dp_shard": 2, "ep": 2, "tp": 2}, dict(fsdp_size=4, ep_size=2, tp_size=2)),
)


@dataclass(frozen=True)
class Number:
    """One number that the page of a check has, and what real ranks show of it."""

    name: str
    told: int
    real: int

    @property
    def difference(self) -> float:
        """Relative to what is real; infinite if nothing was told of something that is."""
        if self.told == self.real:
            return 0.0
        return abs(self.told - self.real) / self.real if self.real else math.inf


@dataclass(frozen=True)
class Row:
    wrapper: str
    layout: dict[str, int]
    numbers: tuple[Number, ...] = ()
    problem: str = ""

    @property
    def wrong(self) -> list[Number]:
        return [number for number in self.numbers if number.difference > NEAR]


def measure(wrapper: str, layout: dict[str, int], arguments: dict[str, int], folder: Path) -> Row:
    """Plans the layout and runs it on as many real ranks. ``folder`` must be empty."""
    stack = environment.ensure(RELEASE)
    model, real, file = folder / "model", folder / "real", folder / "asked.json"
    real.mkdir()
    ranks = math.prod(layout.values())
    fields = {**FAMILIES[MODEL.family].build(MODEL), "vocab_size": VOCAB}
    asked = {
        "folder": str(real), "model": str(model), "family": MODEL.family, "fields": fields,
        "wrapper": wrapper, "layout": layout, "arguments": arguments, "vocab": VOCAB,
        "tp": Layout(layout).size(TP),
    }  # fmt: skip
    file.write_text(json.dumps(asked))
    values, module = variables(stack), "bench.check_cost_rank"
    save = [str(stack.python), "-m", module, str(file), "--save"]
    train = [*command(stack, ranks, module), str(file)]
    problem = launch(save, values, str(folder), BOUND)
    problem = problem or launch(train, values, str(folder), BOUND)
    if problem:
        return Row(wrapper, layout, problem=f"real ranks: {problem}")
    options = check.CheckOptions(
        str(model), layout, stack=RELEASE, wrapper=wrapper, simulate=False, out=folder / "check"
    )
    found = check.check(options, lambda *_: None)
    if found.undecided or not found.checked.plan:
        return Row(wrapper, layout, problem=f"not planned: {found.undecided}")
    held = [json.loads((real / f"held-{rank}.json").read_text()) for rank in range(ranks)]
    told = [*_calls(found, read_trial(real)), *_memory(found, held), *_pieces(found, held)]
    return Row(wrapper, layout, tuple(told))


def _calls(found: check.CheckResult, evidence: Evidence) -> Iterator[Number]:
    seen = check_cost.recorded(evidence)
    for cost in found.costs:
        if cost.ranks == 1:
            continue
        gathers, reductions = (
            seen.get((cost.axis, op), check_cost.Recorded())
            for op in ("all_gather", "reduce_scatter")
        )
        yield Number(f"all-gathers on {cost.axis}", cost.all_gathers, gathers.calls)
        yield Number(f"gathered bytes on {cost.axis}", cost.gathered, gathers.elements * ELEMENT)
        yield Number(f"reduce-scatters on {cost.axis}", cost.reduce_scatters, reductions.calls)
        yield Number(f"reduced bytes on {cost.axis}", cost.reduced, reductions.elements * ELEMENT)
        if cost.replicas > 1:
            replicas = seen.get((str(DP_REPLICATE), "all_reduce"), check_cost.Recorded())
            yield Number("all-reduces over the replicas", cost.all_reduces, replicas.calls)
            yield Number("bytes of them", cost.all_reduced, replicas.elements * ELEMENT)
    largest = max((one.largest for (_, op), one in seen.items() if op == "all_gather"), default=0)
    planned = max((unit.gathered * unit.element for unit in found.checked.units), default=0)
    yield Number("bytes of the largest all-gather", planned, largest * ELEMENT)


def _memory(found: check.CheckResult, held: list[dict[str, Any]]) -> Iterator[Number]:
    assert found.memory is not None
    for name in ("parameters", "gradients", "optimizer"):
        most = max(one[name] for one in held)
        yield Number(f"bytes of {name} on a rank", getattr(found.memory, name), most)


def _pieces(found: check.CheckResult, held: list[dict[str, Any]]) -> Iterator[Number]:
    """Elements of one parameter on the ranks that hold most and least, added up over names."""
    for name in ("most", "least"):
        told = {row.name: getattr(row, name) for row in found.checked.plan}
        bound = max if name == "most" else min
        real = {one: bound(rank["elements"][one] for rank in held) for one in held[0]["elements"]}
        yield Number(f"names whose piece is as planned, {name}", len(told),
                     sum(told.get(one) == elements for one, elements in real.items()))  # fmt: skip
    experts = [row for row in found.checked.plan if row.routed]
    for row in experts[:1]:
        each = math.prod(row.shape[1:])
        most = max(rank["elements"][row.name] for rank in held)
        yield Number("experts on a rank", row.most // each, most // each)


def page(rows: list[Row], versions: Mapping[str, str | None]) -> Iterator[str]:
    stack = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    numbers = [number for row in rows for number in row.numbers]
    yield "# The cost of a check and of real ranks"
    yield ""
    yield "What `moediag check` tells of a step and of memory, and what an ordinary program"
    yield "of gloo ranks did and held (`bench/check_cost_rank.py`): calls and bytes of the third"
    yield "step as recorded, bytes of all tensors of the rank that holds most. AdamW's counters of"
    yield f"steps, 4 bytes for a parameter, are in the real number only. Releases: {stack}."
    yield ""
    yield "```console"
    yield "$ python -m bench.check_cost > reports/check-cost.md"
    yield "```"
    yield ""
    worst = max((number.difference for number in numbers), default=0.0)
    yield f"- Layouts: {len(rows)}, of which {sum(not row.numbers for row in rows)} did not run."
    yield f"- Numbers: {len(numbers)}, of which {sum(n.told == n.real for n in numbers)} are equal;"
    yield f"  the largest difference is {worst:.1%} ({sum(len(r.wrong) for r in rows)} above 2 %)."
    yield ""
    yield "| sharded by | layout | number | check | real ranks | difference |"
    yield "|---|---|---|---|---|---|"
    for row in rows:
        layout = ",".join(f"{axis}={size}" for axis, size in row.layout.items())
        head = f"| {row.wrapper} | `{layout}` |"
        if row.problem:
            yield f"{head} {' '.join(row.problem.replace('|', '/').split())} | | | |"
        for one in row.numbers:
            yield f"{head} {one.name} | {one.told:,} | {one.real:,} | {one.difference:.1%} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="layouts whose words contain this")
    given = parser.parse_args()
    rows = []
    for wrapper, layout, arguments in LAYOUTS:
        if given.only not in f"{wrapper} {layout}":
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(wrapper, layout, arguments, Path(folder)))
        told = rows[-1].problem or ", ".join(n.name for n in rows[-1].wrong) or "within 2 %"
        sys.stderr.write(f"{wrapper} {layout}: {told}\n")
    sys.stdout.write("\n".join(page(rows, environment.ensure(RELEASE).versions)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
