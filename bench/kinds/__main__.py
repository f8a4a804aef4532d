"""``python -m bench.kinds [KIND…]``: kinds of silent errors, each with a healthy twin: what
``watch --laws`` and ``verify`` say of them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from moediag.result.verdicts import Verdict

PROGRAM = Path(__file__).with_name("program.py")
# What the page must name: any of these texts.
KINDS = {
    "tp-vocab-mask": ("embed",),
    "tp-input-grad": ("norm2",),
    "tp-bias": ("down",),
    "tp-stale": ("embed.weight",),
    "sp-norm": ("norm",),
    "sp-router": ("router",),
    "cp-scale": ("0.5", "half"),
    "cp-kv": ("qkv",),
    "cp-mean": ("2x", "2.0", "twice"),
    "pp-layer": ("layers.0",),
    "pp-tied": ("embed",),
    "dp-layer": ("layers.1.down",),
    "dp-sum": ("2x", "2.0", "twice"),
    "dp-clip": ("clip", "norm"),
    "ddp-module": ("module",),
    "ddp-no-sync": ("no_sync",),
    "ddp-replaced": ("head.weight",),
    "acc-mean": ("loss", "token"),
    "acc-bf16": ("bfloat16", "rounding", "gradient"),
    "zero-not-sent": ("layers.0.norm2",),
    "zero-master": ("norm2", "qkv", "layers"),
    "zero-tie": ("head.weight",),
    "recompute-input": ("layers.0", "layers.1"),
    "packing": ("layers.0",),
    "expert-order": ("moe",),
    "scheduler": ("learning rate",),
}


@dataclass(frozen=True)
class Seen:
    """What one command said."""

    verdict: str
    exit: int
    noted: str
    page: str

    @property
    def level(self) -> str:
        if self.exit == 1:
            return "broken"
        return {3: "undecided"}.get(self.exit, "suspicious" if self.noted else "nothing")


def seen(command: list[str], run: Path) -> Seen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "moediag", *command], env=environment, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    try:
        result = json.loads((run / "result.json").read_text())
        trial = result["trials"][0]
    except (OSError, LookupError):
        return Seen("", done.returncode, "", done.stdout + done.stderr)
    return Seen(
        trial["verdict"], done.returncode, " ".join(trial.get("suspicious", ())), done.stdout
    )


def asked(kind: str, healthy: bool, folder: Path, tool: str) -> Seen:
    run = folder / f"{kind}-{healthy}-{tool}"
    job = ["torchrun", "--nproc-per-node", "2", str(PROGRAM), kind, *["healthy"] * healthy]
    if tool == "laws":
        return seen(["watch", "--laws", "--out", str(run), "--", *job], run)
    reference = f"{sys.executable} {PROGRAM} {kind}"
    return seen(["verify", "--out", str(run), "--reference", reference, "--", *job], run)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kinds", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    parser.add_argument("--tool", choices=("laws", "verify"), action="append")
    parser.add_argument("--pages", action="store_true", help="print what was said, too")
    asked_for = parser.parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    tools = asked_for.tool or ["laws", "verify"]
    print("| kind |" + "".join(f" {tool} | place | healthy |" for tool in tools))
    print("| --- |" + " --- | --- | --- |" * len(tools))
    with tempfile.TemporaryDirectory() as folder:
        for kind in asked_for.kinds or KINDS:
            row = [kind]
            for tool in tools:
                faulty, twin = (asked(kind, one, Path(folder), tool) for one in (False, True))
                told = faulty.page if faulty.level == "broken" else faulty.noted
                place = any(word in told for word in KINDS[kind])
                quiet = twin.exit == 0 and twin.verdict == Verdict.CLEAN and not twin.noted
                row += [
                    f"{faulty.level} {faulty.verdict}", "yes" if place else "no",
                    "quiet" if quiet else f"{twin.level} {twin.verdict}",
                ]  # fmt: skip
                if asked_for.pages:
                    print(faulty.page, "" if quiet else f"HEALTHY\n{twin.page}", file=sys.stderr)
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
