"""Prints how long `moediag check` plans real configurations on six layouts, and what it answers.

    python -m bench.check_layouts > reports/check-layouts.md

Configurations are those of the release's classes at the model's real size; there are no weights.
One process of the requested releases plans them, each in a forked process, whose CPU time and peak
memory are printed. The schedule is not simulated: its cost does not depend on the number of ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RELEASE = {"transformers": "5.24.0"}


@dataclass(frozen=True)
class Model:
    kind: str
    """Model type of its configuration class."""
    published: float
    """Parameters in billions, as its authors tell them. A second check of the settings."""
    source: str
    """Where all its sizes were compared with the class's defaults and ``settings``."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Those that are not defaults of the class."""


_SLIME = "scripts/models/{} of slime (THUDM)"
MODELS: dict[str, Model] = {
    "Qwen3-30B-A3B": Model(
        "qwen3_moe", 30.5, _SLIME.format("qwen3-30B-A3B.sh"),
        dict(num_hidden_layers=48, head_dim=128),
    ),
    "Qwen3-235B-A22B": Model(
        "qwen3_moe", 235, _SLIME.format("qwen3-235B-A22B.sh"),
        dict(num_hidden_layers=94, hidden_size=4096, intermediate_size=12288,
             num_attention_heads=64, moe_intermediate_size=1536, head_dim=128),
    ),
    "DeepSeek-V3": Model("deepseek_v3", 671, _SLIME.format("deepseek-v3.sh")),
    "Mixtral 8x22B": Model(
        "mixtral", 141, "params_mixtral_8x22b.yaml of Cerebras modelzoo, for v0.1",
        dict(num_hidden_layers=56, hidden_size=6144, intermediate_size=16384,
             num_attention_heads=48),
    ),
    "GLM-4.5": Model(
        "glm4_moe", 355, _SLIME.format("glm4.5-355B-A32B.sh")
        + " and docs/models/llm/glm45.md of Megatron-Bridge; the published number counts the "
        "next-token layer, which the class does not build",
        dict(num_hidden_layers=92, hidden_size=5120, intermediate_size=12288,
             n_routed_experts=160, moe_intermediate_size=1536, head_dim=128,
             first_k_dense_replace=3, attention_bias=True, use_qk_norm=True),
    ),
    "gpt-oss-120b": Model("gpt_oss", 117, "gpt_oss/torch/model.py of openai/gpt-oss"),
    "Llama 4 Scout": Model(
        "llama4_text", 109, "Llama4Experts16Config of NeMo; the published number counts the "
        "vision tower, which is not planned here",
    ),
    "OLMoE-1B-7B": Model(
        "olmoe", 6.9, "docs/models/llm/olmoe.md of Megatron-Bridge", dict(intermediate_size=1024)
    ),
    "Qwen1.5-MoE-A2.7B": Model(
        "qwen2_moe", 14.3, "copies of its config.json in the tests of other projects"
    ),
    "Phi-3.5-MoE": Model(
        "phimoe", 41.9, "the listing of its config.json in Phi-3.5-MoE-and-Mini-Fine-tuning",
        dict(attention_bias=True, lm_head_bias=True),
    ),
    "ERNIE 4.5 21B-A3B": Model(
        "ernie4_5_moe", 21, "model_configs/ERNIE-4p5-21B-A3B/model_config.json of PaddlePaddle/"
        "ERNIE, which builds 30 layers and removes two",
    ),
    "MiniMax-Text-01": Model(
        "minimax", 456, "README.md of MiniMax-AI/MiniMax-01; key-value heads: its paper "
        "(arXiv 2501.08313), groups of 8",
        dict(vocab_size=200064, num_hidden_layers=80, hidden_size=6144, intermediate_size=9216,
             num_attention_heads=64, num_key_value_heads=8, head_dim=128, num_local_experts=32,
             layer_types=[*["linear_attention"] * 7, "full_attention"] * 10),
    ),
}  # fmt: skip
LAYOUTS: tuple[tuple[str, dict[str, int]], ...] = (
    ("fsdp2", {"dp_shard": 64}),
    ("fsdp2", {"dp_shard": 1024}),
    ("fsdp2", {"dp_shard": 8192}),
    ("transformers", {"dp_shard": 8, "ep": 8}),
    ("transformers", {"dp_shard": 128, "ep": 8}),
    ("transformers", {"dp_shard": 64, "ep": 16, "tp": 8}),
)


def rows() -> Iterator[dict[str, Any]]:
    """Plans every cell; in a process of the release."""
    from transformers import CONFIG_MAPPING

    from moediag.lab import check
    from moediag.protocol import CheckTask, Trial, WrapperSpec

    with tempfile.TemporaryDirectory() as place:
        for number, (name, model) in enumerate(MODELS.items()):
            folder = Path(place) / str(number)
            CONFIG_MAPPING[model.kind](**model.settings).save_pretrained(folder)
            for wrapper, layout in LAYOUTS:
                trial = Trial(
                    name="check", scenario="check", variant="check", record=False, layout=layout,
                    task=CheckTask(str(folder), simulate=False, dtype="bfloat16"),
                    world_size=math.prod(layout.values()),
                    wrapper=WrapperSpec(kind=wrapper, reshard_after_forward=None),
                )  # fmt: skip
                yield {"model": name, "wrapper": wrapper, "layout": layout, **_cell(check, trial)}


def _cell(check: Any, trial: Any) -> dict[str, Any]:
    """Runs one check in a child, whose CPU time and memory are counted with those of its own."""
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            found = check.run(trial, Path(folder))
            levels = [[f.level, f.text, f.where] for f in found.findings]
            answer = {
                "problem": found.problem, "parameters": found.parameters, "findings": levels,
                "copies": sorted({one.copies for one in found.owners}),
            }  # fmt: skip
            with os.fdopen(writing, "w") as file:
                json.dump(answer, file)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as file:
            text = file.read()
        _, _, used = os.wait4(child, 0)  # with the children that it waited for
    answer = json.loads(text) if text else {"problem": "the process left no answer", "findings": []}
    seconds, cpu = time.monotonic() - began, used.ru_utime + used.ru_stime
    return {**answer, "seconds": seconds, "cpu": cpu, "mb": used.ru_maxrss // 1024}


def page(found: list[dict[str, Any]], versions: dict[str, str | None]) -> Iterator[str]:
    stack = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    yield "# Twelve models on six layouts"
    yield ""
    yield "What `moediag check --plan-only` answers, and what it costs. Configurations are those of"
    yield "the release's classes with the settings in `bench/check_layouts.py`; no weights, in "
    yield "bfloat16."
    yield f"Releases: {stack}."
    yield ""
    yield "```console"
    yield "$ python -m bench.check_layouts > reports/check-layouts.md"
    yield "```"
    yield ""
    worst: dict[int, list[dict[str, Any]]] = {}
    for row in found:
        worst.setdefault(math.prod(row["layout"].values()), []).append(row)
    yield "| ranks | cells | longest CPU time | most memory |"
    yield "|---|---|---|---|"
    for ranks, cells in sorted(worst.items()):
        cpu, memory = max(r["cpu"] for r in cells), max(r["mb"] for r in cells)
        yield f"| {ranks:,} | {len(cells)} | {cpu:.1f} s | {memory} MB |"
    yield ""
    yield from _sources(found)
    yield "| model | sharded by | layout | answer | CPU | memory |"
    yield "|---|---|---|---|---|---|"
    reasons: dict[str, int] = {}
    for row in found:
        layout = ",".join(f"{axis}={size}" for axis, size in row["layout"].items())
        why: list[str] = [f"FAILS: {t}{f' ({w})' if w else ''}" for level, t, w in row["findings"]
               if level == "fails"]  # fmt: skip
        why += [f"not planned: {row['problem']}"] if row["problem"] else []
        marks = [str(reasons.setdefault(one, len(reasons) + 1)) for one in why]
        answer = "nothing fails" if not why else f"{why[0].partition(':')[0]} ({', '.join(marks)})"
        yield (
            f"| {row['model']} | {row['wrapper']} | `{layout}` | {answer} | {row['cpu']:.1f} s "
            f"| {row['mb']} MB |"
        )
    yield ""
    for reason, number in reasons.items():
        yield f"{number}. {reason}"


def _sources(found: list[dict[str, Any]]) -> Iterator[str]:
    planned = {row["model"]: row["parameters"] for row in found if row.get("parameters")}
    yield "Sizes that differ from the defaults of the class, and where all sizes were compared."
    yield "Planned parameters are those of the model that the class builds."
    yield ""
    yield "| model | planned | published | not defaults | compared with |"
    yield "|---|---|---|---|---|"
    for name, model in MODELS.items():
        told = ", ".join(
            f"{field} {value}" for field, value in model.settings.items()
            if not isinstance(value, list)
        )  # fmt: skip
        yield (
            f"| {name} | {planned.get(name, 0) / 1e9:.1f} B | {model.published:g} B "
            f"| {told or 'none'} | {model.source} |"
        )
    yield ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--plan", metavar="FILE", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.plan:
        Path(given.plan).write_text(json.dumps(list(rows())))
        return 0
    from bench.torchrun import ROOT, variables
    from moediag.lab.stacks import environment

    stack = environment.ensure(RELEASE)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [str(stack.python), "-m", "bench.check_layouts", "--plan", str(file)]
        subprocess.run(
            command, check=True, env=variables(stack), cwd=ROOT, stdout=subprocess.DEVNULL
        )
        found = json.loads(file.read_text())
    sys.stdout.write("\n".join(page(found, stack.versions)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
