"""All ranks of a job create tensors of the same dtype: the law of docs/extending/add-a-law.md."""

from __future__ import annotations

from collections import defaultdict

from moediag.diagnosis.facts import Facts
from moediag.diagnosis.laws.law import Broken, Findings, law, recorded
from moediag.result import Verdict
from moediag.result.wording import ranks

_HALF = ("torch.float16", "torch.bfloat16")


@law(Verdict.REPLICA_DIVERGENCE)
def default_dtypes_apart(facts: Facts) -> Findings:
    """Ranks of a watched job create tensors of different dtypes by default in the same step."""
    steps: dict[int, dict[int, str]] = defaultdict(dict)
    for rank, own in facts.of(recorded).items():
        for step, dtype in own.rows("default_dtype", step=int, dtype=str):
            steps[step][rank] = dtype
    for step, dtypes in sorted(steps.items()):
        if len(dtypes) < facts.evidence.world_size:
            continue  # a rank that is unknown does not differ
        sides: dict[str, list[int]] = defaultdict(list)
        for rank, dtype in dtypes.items():
            sides[dtype].append(rank)
        if len(sides) > 1:
            told = ", ".join(f"{dtype} on {ranks(who)}" for dtype, who in sides.items())
            yield Broken(
                f"In step {step} new tensors are {told}.",
                pattern="default dtype",
                next_step="Call torch.set_default_dtype alike on every rank.",
            )
            return
        if sides.keys() <= {*_HALF}:
            yield f"In step {step} new tensors are {dtypes[0]}, states of optimizers as well."
            return
