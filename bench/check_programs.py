"""Prints what `moediag check --script` says of programs of others, healthy and with a fault.

    python -m bench.check_programs --checkouts DIR [--python FILE] [--only TEXT] \\
        > reports/check-programs.md

The programs, their adaptation to CPU and --checkouts are those of `bench.abroad`; --python is an
interpreter that has their libraries.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.abroad import edits
from bench.abroad.cases import edit
from bench.abroad.edits import Edit
from bench.abroad.programs import PROGRAMS, Program
from bench.abroad.running import MOEDIAG
from moediag.errors import ExitCode

WORLD = 16
# Programs that insist on a divisor of their batch.
WORLDS = {"nanogpt": 4, "llm.c": 6, "build-nanogpt": 4}
BOUND = 400  # seconds for all simulated ranks of a program


@dataclass(frozen=True)
class Case:
    """``fault``: "" for the program as it is. ``line``: what the page must name of a fault."""

    program: str
    fault: str = ""
    faults: tuple[Edit, ...] = ()
    line: str = ""
    options: tuple[str, ...] = ()


CASES = (
    *map(Case, ("nanogpt", "llm.c", "build-nanogpt", "ddp-example", "fsdp2-example", "tp-example",
                "sp-example", "fsdp-tp-example", "mingpt-ddp", "ddp-tutorial", "accelerate-nlp",
                "accelerate-accumulation", "trainer", "trl", "plain-torchrun")),
    Case(
        "nanogpt", "a barrier on the main process only",
        (edit("train.py", "scaler.step(optimizer)",
              "if master_process:\n    torch.distributed.barrier()\n{line}"),),
        "train.py:",
    ),
    Case(
        "llm.c", "rank 1 does one micro-batch more",
        (edit("train_gpt2.py", "for micro_step in range(grad_accum_steps)",
              "for micro_step in range(grad_accum_steps + (ddp_rank == 1)):"),),
    ),
    Case(
        "fsdp2-example", "only rank 0 clips",
        (edit("example.py", "torch.nn.utils.clip_grad_norm_",
              "if torch.distributed.get_rank() == 0:\n    {line}"),),
        "example.py:",
    ),
    Case(
        "fsdp-tp-example", "rank 1 reduces over its tensor-parallel group",
        (edit("fsdp_tp_example.py", "output = sharded_model(inp)",
              "{line}\nif _rank == 1:\n    torch.distributed.all_reduce(torch.zeros(1), "
              "group=device_mesh['tp'].get_group())"),),
        "fsdp_tp_example.py:",
    ),
    Case(
        "ddp-tutorial", "rank 1 has one batch less, run to its end",
        (edit("multigpu_torchrun.py", "for source, targets in self.train_data",
              "for number, (source, targets) in enumerate(self.train_data):\n"
              "    if number == 1 and int(os.environ['RANK']) == 1:\n        continue"),
         edit("multigpu_torchrun.py", "torch.save(snapshot", "pass")),
        "multigpu_torchrun.py:", ("--steps", "1000"),
    ),
    Case(
        "accelerate-nlp", "the main process alone waits for everyone",
        (edit("nlp_example.py", "optimizer.step()",
              "if accelerator.is_main_process:\n    accelerator.wait_for_everyone()\n{line}"),),
        "nlp_example.py:",
    ),
    Case(
        "mingpt-ddp", "a metric of another size on rank 1",
        (edit("trainer.py", "self.optimizer.step()",
              "import torch.distributed as dist\n"
              "dist.all_reduce(torch.zeros(2 if dist.get_rank() == 1 else 1))\n{line}"),),
        "trainer.py:",
    ),
    Case(
        "trainer", "rank 0 evaluates alone after the first step",
        (edit("hf_trainer.py", "eval_steps=8",
              "eval_steps=1 if __import__('os').environ['RANK'] == '0' else 8,"),),
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    case: Case
    code: int
    found: dict[str, Any]
    seconds: float

    @property
    def _said(self) -> str:
        return f"{self.found['cause']} {self.found['next_step']}"

    @property
    def right(self) -> bool:
        """A healthy program is not accused, a fault is found, and its line is named."""
        if not self.case.fault:
            return self.code != ExitCode.FAILURE_FOUND
        return self.code == ExitCode.FAILURE_FOUND and self.case.line in self._said


def run(case: Case, program: Program, folder: Path, checkouts: Path, python: str) -> Row:
    copy = folder / "program"
    program.place(copy, checkouts)
    edits.apply(case.faults, copy)
    words = [python, program.script, *program.arguments]
    ours = [sys.executable, "-c", MOEDIAG, "check", "--script", shlex.join(words), "--world",
            str(WORLDS.get(program.name, WORLD)), "--nproc-per-node", "8", "--json",
            "--timeout", str(BOUND), "--out", str(folder / "run"), *case.options]  # fmt: skip
    began = time.monotonic()
    done = subprocess.run(ours, cwd=copy, env={**os.environ, **dict(program.env)}, text=True,
                          capture_output=True, check=False)  # fmt: skip
    found = json.loads(done.stdout) if done.stdout.startswith("{") else {"problem": done.stderr}
    return Row(case, done.returncode, found, time.monotonic() - began)


def page(rows: list[Row]) -> Iterator[str]:
    healthy = [row for row in rows if not row.case.fault]
    faults = [row for row in rows if row.case.fault]
    yield "# `moediag check --script` on programs that others wrote"
    yield ""
    yield f"Each program ran as {WORLD} ranks (nanogpt and build-nanogpt 4, llm.c 6: their batches"
    yield "do not divide by 16), of which at most six were simulated. Programs and their adaptation"
    yield "to CPU are those of `bench/abroad`; faults are in `bench/check_programs.py`."
    yield ""
    yield "```console"
    yield "$ python -m bench.check_programs --checkouts DIR > reports/check-programs.md"
    yield "```"
    yield ""
    accused = sum(not row.right for row in healthy)
    decided = sum(row.code == ExitCode.OK for row in healthy)
    yield f"- Healthy: {len(healthy)}; wrongly accused {accused}; decided (exit code 0) {decided}."
    yield f"- Faults: {len(faults)}; found with the right line {sum(r.right for r in faults)}."
    yield ""
    yield "| program | fault | exit code | compared calls | not seen | answer | s |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        yield _row(row)


def _row(row: Row) -> str:
    ranks = row.found.get("ranks", [])
    compared, calls = (sum(one[name] for one in ranks) for name in ("compared", "calls"))
    share = f"{compared} of {calls} ({compared / calls:.0%})" if calls else "none"
    unseen = [one["problem"] or one["unseen"] for one in ranks]
    why = next(filter(None, unseen), row.found.get("problem", ""))
    answer = row.found.get("cause", "") or "agree as far as compared"
    cells = [row.case.program, row.case.fault or "none", str(row.code), share, why[:200], answer,
             f"{row.seconds:.0f}"]  # fmt: skip
    return f"| {' | '.join(' '.join(cell.replace('|', '/').split()) for cell in cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--checkouts", type=Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--only", default="", help="programs whose name contains this")
    parser.add_argument("--faults", action="store_true", help="only those with a fault")
    given = parser.parse_args()
    known = {program.name: program for program in PROGRAMS}
    rows = []
    for case in CASES:
        if given.only not in case.program or (given.faults and not case.fault):
            continue
        with tempfile.TemporaryDirectory() as folder:
            row = run(case, known[case.program], Path(folder), given.checkouts, given.python)
        sys.stderr.write(f"{_row(row)}\n")
        rows.append(row)
    sys.stdout.write("\n".join(page(rows)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
