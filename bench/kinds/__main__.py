"""``python -m bench.kinds [KIND…]``: kinds of silent errors on two ranks, each with a healthy twin:
what the laws and ``verify.step`` say of them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moediag.result import FAILURES, Verdict

PROGRAM = Path(__file__).with_name("program.py")
_FEW = 3  # wrong parameters: more are no place
# What a page says first of an error in all parameters.
_CAUSES = (
    "times the reference", "weighs the samples", "the loss is", "was not averaged",
    "instead of the wrapper", "no_sync()", "only values of",
)  # fmt: skip
_PAGE = """# Kinds of silent errors

This page is generated: `python -m bench.kinds --out reports/silent-kinds.md` writes it.

Kinds that public trackers know, on two gloo ranks, each with a healthy twin. The laws see eight
steps (**broken**: exit code 1; **suspicious**: on the page, exit code 1 with `--strict`);
`verify.step` compares one step with one process (**found**: exit code 1; **placed**: the page
begins with the right module, parameter or cause). The truth was written before any page was seen,
but moediag was repaired by these programs since: none is held out. A scheduler shows only in the
steps after the first, so `verify.step` cannot see it; the command `moediag verify` does.

When the laws first saw these 26 kinds, they called 4 broken and 6 suspicious. A program before this
one had a fifth broken one: there the optimizer had copies of the parameters, which were not copied
back (`copies-apart`). `zero-not-copied` here writes the old value over the updated one; this was a
law that was missing (`updates-undone`).

"""
_CANNOT = """
What laws cannot decide, because one run does not show it:

- `packing-mask`: attention across documents is a model that many train on purpose. Nothing in the
  run says which tokens belong together, unless the program builds a mask and does not use it.
- `expert-order`: the block is a function of its input as before, only another one, with consistent
  gradients. It would take the rows of every expert's call, matched with the rows of the block's
  output; experts in one matrix have no such calls.

What laws call suspicious may be meant: layers that are trained on each rank alone (`dp-left-out`,
`sp-layernorm`, `sp-router`, `tp-column-input`), tables of two stages that only begin alike
(`pp-tied`), a learning rate or a loss that allows for the number of ranks (`scheduler-by-rank`,
`dp-sum`, `cp-loss-scale`), means of unequal parts (`cp-own-mean`, `accumulation-unequal`),
gradients that are dropped on purpose (`cp-keys-values`), a pruned layer (`pp-lost-layer`), tokens
that are masked (`tp-vocabulary-mask`), a bias that is divided beforehand (`tp-row-bias`), and saved
memory (`accumulation-bfloat16`).
"""
_NOT_IN_A_STEP = ("scheduler-by-rank",)


@dataclass(frozen=True)
class Kind:
    """What was said of a kind, with the error and without it."""

    laws: dict[str, Any]
    verify: dict[str, Any]
    healthy_laws: dict[str, Any]
    healthy_verify: dict[str, Any]

    @property
    def level(self) -> str:
        """That of the laws."""
        if self.laws["verdict"] in FAILURES:
            return "broken"
        return "suspicious" if self.laws["suspicious"] else "nothing"

    @property
    def found(self) -> str:
        if self.verify["kind"] in _NOT_IN_A_STEP:
            return "not in one step"
        if self.verify["verdict"] not in FAILURES:
            return str(self.verify["verdict"])
        return "found, placed" if placed(self.verify) else "found"

    @property
    def alarms(self) -> list[str]:
        """What was said of the healthy twin."""
        one, other = self.healthy_laws, self.healthy_verify
        laws = one["verdict"] != Verdict.CLEAN or one["suspicious"]
        verify = other["verdict"] != Verdict.CLEAN
        return ["laws"] * bool(laws) + [f"verify: {other['verdict']}"] * verify


def placed(found: dict[str, Any]) -> bool:
    """Whether the page begins with the right module, parameter or cause; of an error in all
    parameters, whether it says what all have."""
    first = found["cause"].split(" In step ")[0].split(" which training")[0]
    if not found["truth"]:
        return any(word in found["cause"] for word in _CAUSES)
    few = 0 < len(found["wrong_parameters"]) <= _FEW
    few = few and set(found["wrong_parameters"]) <= set(found["truth"])
    # norm.{bias,weight} is norm.weight and norm.bias
    heads = {name.rpartition(".")[0] or name for name in found["truth"]} | set(found["truth"])
    # A module within the right one, of the kinds whose truth is a module, is a place, too.
    return few or any(f"{name}{end}" in first for name in heads for end in (" ", ",", ".{", "."))


def run(kinds: Sequence[str], folder: Path) -> Iterator[Kind]:
    """Returns what was said of each kind."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(PROGRAM), str(folder), *kinds]
    done = subprocess.run(
        command, env=dict(os.environ, OMP_NUM_THREADS="1"), capture_output=True, text=True,
        timeout=1800, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.stderr.write(done.stderr[-2000:])
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for at in range(0, len(lines) - 3, 4):
        yield Kind(*lines[at : at + 4])


def table(kinds: Sequence[Kind]) -> str:
    rows = [
        f"| `{one.laws['kind']}` | {one.level} | {one.found} | {', '.join(one.alarms) or 'quiet'} |"
        for one in kinds
    ]
    of_steps = [one for one in kinds if one.laws["kind"] not in _NOT_IN_A_STEP]
    levels = [one.level for one in kinds]
    found = [one.found for one in of_steps if one.found.startswith("found")]
    place = sum(text.endswith("placed") for text in found)
    total = (
        f"Of {len(kinds)} kinds the laws call {levels.count('broken')} broken and "
        f"{levels.count('suspicious')} suspicious; `verify.step` finds {len(found)} of "
        f"{len(of_steps)} and places {place}. Twins with an alarm: "
        f"{sum(bool(one.alarms) for one in kinds)}."
    )
    head = "| kind | laws | verify | twin |\n| --- | --- | --- | --- |"
    return "\n".join([head, *rows, "", total]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.kinds", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    parser.add_argument("--pages", action="store_true", help="print the causes, too")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kinds = list(run(asked.kinds, Path(folder)))
    if asked.pages:
        for one in kinds:
            for said in (one.laws, one.verify, one.healthy_laws, one.healthy_verify):
                more = " ".join([said["cause"], *said["suspicious"], "->", said["next_step"]])
                print(said["kind"], said["fault"], said["by"], said["verdict"], more)
    text = table(kinds)
    print(text, end="")
    if asked.out is not None:
        asked.out.write_text(_PAGE + text + _CANNOT, "utf-8")
    return int(any(one.alarms for one in kinds) or not kinds)


if __name__ == "__main__":
    sys.exit(main())
