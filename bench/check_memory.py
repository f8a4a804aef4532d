"""Prints how far the peak that `moediag check` tells is from what torch counts on real ranks.

    python -m bench.check_memory [--only TEXT] > reports/check-memory.md

Each model of six layers is trained by an ordinary program on gloo ranks of this machine; torch's
memory tracker counts its tensors. `moediag check` runs fewer layers, on fake tensors.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.torchrun import command, launch, variables
from moediag.lab.pipeline import check
from moediag.lab.stacks import environment

RELEASE = {"transformers": "5.23.0"}
NEAR = 0.05  # relative difference that is allowed
BOUND = 240.0  # seconds for the ranks
VOCAB, LENGTH, BATCH = 512, 256, 2
_SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=64, num_hidden_layers=6, num_attention_heads=8,
    num_key_value_heads=4, intermediate_size=128,
)  # fmt: skip
_EXPERTS: dict[str, Any] = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3", {**_SIZES, "head_dim": 8}),
    "experts": ("qwen3_moe", {**_SIZES, **_EXPERTS, "head_dim": 8}),
    "two kinds of layers": (
        "qwen3_moe", {**_SIZES, **_EXPERTS, "head_dim": 8, "mlp_only_layers": [0, 1]},
    ),
}  # fmt: skip
# Model, dtype, recomputation, layout, and the DistributedConfig as a user writes it.
Case = tuple[str, str, str, dict[str, int], dict[str, int]]
CASES: tuple[Case, ...] = (
    *(
        (model, dtype, recompute, {"dp_shard": 2}, {})
        for model in MODELS
        for dtype in ("float32", "bfloat16")
        for recompute in ("none", "layers", "selective")
    ),
    ("experts", "float32", "none", {"ep": 2}, {"fsdp_size": 2, "ep_size": 2}),
    ("experts", "bfloat16", "layers", {"ep": 2}, {"fsdp_size": 2, "ep_size": 2}),
    ("dense", "float32", "none", {"tp": 2}, {"tp_size": 2}),
)


@dataclass(frozen=True)
class Peak:
    case: Case
    told: int = 0
    real: int = 0
    at: str = ""
    problem: str = ""

    @property
    def difference(self) -> float:
        return (self.told - self.real) / self.real if self.real else math.inf


def measure(case: Case, folder: Path) -> Peak:
    """Runs the case on real ranks and checks it. ``folder`` must be empty."""
    model, dtype, recompute, layout, arguments = case
    family, fields = MODELS[model]
    stack = environment.ensure(RELEASE)
    real, file, config = folder / "real", folder / "asked.json", folder / "config.json"
    real.mkdir()
    config.write_text(json.dumps({"model_type": family, **fields}))
    ranks = math.prod(layout.values())
    file.write_text(json.dumps({
        "folder": str(real), "model": str(folder / "model"), "family": family, "fields": fields,
        "dtype": dtype, "recompute": recompute, "arguments": arguments, "vocab": VOCAB,
        "batch": BATCH, "length": LENGTH,
    }))  # fmt: skip
    train = [*command(stack, ranks, "bench.check_memory_rank"), str(file)]
    problem = launch(train, variables(stack), str(folder), BOUND)
    if problem:
        return Peak(case, problem=f"real ranks: {problem}")
    options = check.CheckOptions(
        str(config), layout, stack=RELEASE, simulate=False, batch=BATCH, length=LENGTH,
        recompute=recompute, dtype=dtype, optimizer="adamw-fused", out=folder / "check",
    )  # fmt: skip
    found = check.check(options, lambda *_: None)
    if found.fit is None or not found.fit.measured:
        return Peak(case, problem=f"not measured: {found.undecided or found.not_seen}")
    held = [json.loads((real / f"peak-{rank}.json").read_text()) for rank in range(ranks)]
    peak = found.fit.peak
    return Peak(case, peak.total, max(one["Total"] for one in held), peak.at)


def page(peaks: list[Peak]) -> Iterator[str]:
    good = [one for one in peaks if not one.problem]
    worst = max((abs(one.difference) for one in good), default=0.0)
    yield (
        f"{len(peaks)} set-ups, {len(good)} measured; the largest difference is {worst:.1%} "
        f"({sum(abs(one.difference) > NEAR for one in good)} above {NEAR:.0%})."
    )
    yield ""
    yield "| model | dtype | `--recompute` | layout | check | real ranks | difference | where |"
    yield "|---|---|---|---|---|---|---|---|"
    for one in peaks:
        model, dtype, recompute, layout, _ = one.case
        axes = ",".join(f"{axis}={size}" for axis, size in layout.items())
        head = f"| {model} | {dtype} | {recompute} | `{axes}` |"
        if one.problem:
            yield f"{head} {' '.join(one.problem.replace('|', '/').split())} | | | |"
        else:
            yield f"{head} {one.told:,} | {one.real:,} | {one.difference:+.1%} | {one.at} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="only set-ups whose words contain this text")
    args = parser.parse_args()
    peaks = []
    for case in CASES:
        if args.only in str(case):
            with tempfile.TemporaryDirectory() as folder:
                peaks.append(measure(case, Path(folder)))
                sys.stderr.write(f"{peaks[-1]}\n")
    sys.stdout.write("\n".join(page(peaks)) + "\n")
    return int(any(one.problem or abs(one.difference) > NEAR for one in peaks))


if __name__ == "__main__":
    sys.exit(main())
