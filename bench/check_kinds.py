"""Prints what `moediag check` answers about fifty model types and healthy set-ups, and its CPU.

    python -m bench.check_kinds [--only TEXT] [--healthy]

Configurations are the defaults of the release's classes. One host of the release answers for all,
so that its imports are counted once; a cell counts those of the model's own module.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.torchrun import ROOT, variables
from moediag.lab.launch.launcher import launcher
from moediag.lab.pipeline import check, check_request, check_verdict
from moediag.lab.pipeline.check_options import CheckOptions
from moediag.lab.pipeline.check_result import CheckResult
from moediag.lab.stacks import environment
from moediag.protocol import FAILS, MAY_FAIL

RELEASE = {"transformers": "5.24.0"}
BOUND = 15.0  # CPU seconds of a check
KINDS = """
    afmoe cohere2_moe dbrx deepseek_v2 deepseek_v3 deepseek_v4 dots1 ernie4_5_moe exaone_moe
    flex_olmo glm4_moe glm4_moe_lite gpt_oss granitemoe granitemoehybrid granitemoeshared
    hunyuan_v1_moe jamba jetmoe kimi_linear lfm2_moe llama4_text longcat_flash mimo_v2_flash
    minimax minimax_m2 mixtral nemotron_h olmoe phimoe qwen2_moe qwen3_5_moe qwen3_moe qwen3_next
    solar_open llama mistral qwen2 qwen3 gemma2 gemma3_text phi3 olmo2 granite cohere2 gpt_neox
    falcon mpt bloom gpt2
""".split()  # noqa: SIM905 - as a list it would take fifty lines
# Supported by a plan of the release, or divided by fully_shard without rest.
HEALTHY: tuple[tuple[str, Mapping[str, int]], ...] = (
    ("llama", {"dp_shard": 8}), ("llama", {"dp_replicate": 2, "dp_shard": 8}),
    ("llama", {"dp_shard": 4, "cp": 2}), ("llama", {"tp": 8}), ("llama", {"dp_shard": 2, "tp": 4}),
    ("mistral", {"dp_shard": 64}), ("mistral", {"dp_shard": 4, "tp": 8}),
    ("qwen2", {"dp_shard": 16}), ("qwen3", {"dp_shard": 16}), ("qwen3", {"dp_shard": 2, "tp": 8}),
    ("gemma2", {"dp_shard": 8}), ("olmo2", {"dp_shard": 8}), ("granite", {"dp_shard": 8}),
    ("mixtral", {"dp_shard": 32}), ("mixtral", {"dp_shard": 4, "ep": 8}),
    ("qwen3_moe", {"dp_shard": 64}), ("qwen3_moe", {"dp_replicate": 2, "dp_shard": 32}),
    ("qwen3_moe", {"dp_shard": 8, "ep": 8}), ("qwen3_moe", {"dp_shard": 4, "ep": 16}),
    ("olmoe", {"dp_shard": 8}), ("olmoe", {"dp_shard": 2, "ep": 8}),
    ("deepseek_v3", {"dp_shard": 64, "ep": 8}), ("glm4_moe", {"dp_shard": 16, "ep": 8}),
    ("gpt_oss", {"dp_shard": 8, "ep": 8}), ("phimoe", {"dp_shard": 8, "ep": 8}),
)  # fmt: skip


# Writes the configurations; runs in a process of the release.
_WRITE = """
import sys
from transformers import CONFIG_MAPPING

for kind in sys.argv[2:]:
    if kind in CONFIG_MAPPING:
        CONFIG_MAPPING[kind]().save_pretrained(f"{sys.argv[1]}/{kind}")
"""


@dataclass(frozen=True)
class Cell:
    kind: str
    layout: Mapping[str, int]
    word: str
    why: str
    cpu: float


def cells(asked: list[tuple[str, Mapping[str, int]]], folder: Path) -> Iterator[Cell]:
    """Checks each set-up, with a simulated step. ``folder`` must be empty."""
    stack = environment.ensure(RELEASE)
    kinds = sorted({kind for kind, _ in asked})
    made = [str(stack.python), "-c", _WRITE, str(folder), *kinds]
    subprocess.run(made, check=True, env=variables(stack), cwd=ROOT, stdout=subprocess.DEVNULL)
    with launcher("fork", stack, folder / "host", check_request.settings(folder)) as host:
        for number, (kind, layout) in enumerate(asked):
            config, before = folder / kind / check_request.CONFIG, _cpu()
            if not config.is_file():
                yield Cell(kind, layout, "no such model type", "", 0.0)
                continue
            options = CheckOptions(str(config), layout, stack=RELEASE, dtype="float32")
            if check_request.wrapper_of(options) == "fsdp2":
                options = dataclasses.replace(options, param_dtype="bfloat16")
            found = check.answered(
                options, host, stack.versions, folder, f"cell-{number}", lambda *_: None
            )
            cell = _of(kind, layout, found, _cpu() - before)
            sys.stderr.write(f"{cell}\n")
            yield cell


def _of(kind: str, layout: Mapping[str, int], found: CheckResult, cpu: float) -> Cell:
    diverging = [f"ranks diverge if {one.case.condition}" for one in found.cases if one.parts]
    word, _ = check_verdict.verdict(found, diverging)
    levels = {FAILS: "FAILS", MAY_FAIL: "MAY FAIL"}
    told = [f"{levels[f.level]}: {f.text}" for f in found.checked.findings if f.level in levels]
    why = "; ".join([*told, *diverging]) or (found.undecided if not word else "")
    return Cell(kind, layout, word or "not decided", why, cpu)


def _cpu() -> float:
    """Returns the CPU seconds of this process's children and of those that they waited for."""
    ticks = 0
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = place.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def page(found: list[Cell]) -> Iterator[str]:
    slow = [one for one in found if one.cpu > BOUND]
    words = [one.word for one in found]
    counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
    yield f"{len(found)} set-ups: {counts}. CPU time: at most {max(one.cpu for one in found):.1f} "
    yield f"s, {len(slow)} above {BOUND:g} s."
    yield ""
    yield "| model type | layout | answer | CPU | reasons |"
    yield "|---|---|---|---|---|"
    reasons: dict[str, int] = {}
    for one in found:
        mark = f"({reasons.setdefault(one.why, len(reasons) + 1)})" if one.why else ""
        axes = ",".join(f"{axis}={size}" for axis, size in one.layout.items())
        yield f"| {one.kind} | `{axes}` | {one.word} | {one.cpu:.1f} s | {mark} |"
    yield ""
    for why, number in reasons.items():
        yield f"{number}. {' '.join(why.split())}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="only model types that contain this text")
    parser.add_argument("--healthy", action="store_true", help="healthy set-ups on their layouts")
    args = parser.parse_args()
    asked = [*HEALTHY] if args.healthy else [(kind, {"dp_shard": 8}) for kind in KINDS]
    asked = [one for one in asked if args.only in one[0]]
    with tempfile.TemporaryDirectory() as folder:
        found = list(cells(asked, Path(folder)))
    sys.stdout.write("\n".join(page(found)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
