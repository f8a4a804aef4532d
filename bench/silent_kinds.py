"""Kinds of silent errors on two ranks against `verify.step`: found, placed, healthy twins quiet.

python -m bench.silent_kinds [KIND...]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parents[1] / "tests" / "victims" / "silent_kinds.py"
_FEW = 3  # wrong parameters: more are no place


def run(kinds: list[str]) -> list[dict[str, Any]]:
    """Returns what the program prints about each kind and its twin."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", str(PROGRAM), folder, *kinds]
        done = subprocess.run(
            command, env=dict(os.environ, OMP_NUM_THREADS="1"), capture_output=True, text=True,
            timeout=900, check=False,
        )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        sys.stderr.write(done.stderr[-2000:])
    return lines


def placed(found: dict[str, Any]) -> bool:
    """Whether the page begins with the right module, parameter or cause; of an error in all
    parameters, whether it says what all have."""
    first = found["cause"].split(" In step ")[0].split(" which training")[0]
    if not found["truth"]:
        first = found["cause"]
        words = ("times the reference", "weighs the samples", "the loss is", "was not averaged",
                 "instead of the wrapper", "no_sync()")  # fmt: skip
        return any(word in first for word in words)
    few = 0 < len(found["wrong"]) <= _FEW and set(found["wrong"]) <= set(found["truth"])
    # norm.{bias,weight} is norm.weight and norm.bias
    heads = {name.rpartition(".")[0] or name for name in found["truth"]} | set(found["truth"])
    return few or any(f"{name}{end}" in first for name in heads for end in (" ", ",", ".{"))


def main() -> int:
    found = run(sys.argv[1:])
    faults = [one for one in found if one["fault"]]
    for one in faults:
        failed = one["verdict"] not in ("clean", "inconclusive")
        place = "placed" if failed and placed(one) else "-"
        found_text = "found" if failed else "-"
        sys.stdout.write(f"{one['kind']:24}{one['verdict']:18}{found_text:8}{place}\n")
    alarms = [one["kind"] for one in found if not one["fault"] and one["verdict"] != "clean"]
    right = [one for one in faults if one["verdict"] not in ("clean", "inconclusive")]
    sys.stdout.write(
        f"found {len(right)} of {len(faults)}, placed {sum(map(placed, right))}; "
        f"twins that are not clean: {', '.join(alarms) or 'none'}\n"
    )
    return int(bool(alarms) or len(right) < len(faults))


if __name__ == "__main__":
    sys.exit(main())
