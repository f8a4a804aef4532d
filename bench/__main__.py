"""``make bench``: prints the project's aims beside the measurements, as ratios or differences of
two things timed in the same run. The exit code is always 0, because a busy machine is not a
failure."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import bisect_probes, diagnose_speed
from bench.attach_to_page import attach_to_page
from bench.stall_to_page import stall_to_page
from moediag.lab.stacks import environment

HERE = Path(__file__).parent
MOEDIAG = [sys.executable, "-m", "moediag"]


def timed(command: list[str], **options: object) -> float:
    """Returns the seconds of a command; raises CalledProcessError with its output."""
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=900, **options)
    return time.perf_counter() - began


def rank_environment(stack: environment.Stack) -> dict[str, str]:
    variables = dict(os.environ, OMP_NUM_THREADS="1")
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    # The scripts share modules of this package, which no stack has.
    variables["PYTHONPATH"] = os.pathsep.join(map(str, (*stack.pythonpath, HERE.parent)))
    return variables


def torchrun(stack: environment.Stack, script: str, *arguments: str) -> list[str]:
    command = [str(stack.python), "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return [*command, str(HERE / script), *arguments]


def trials_against_torchrun(stack: environment.Stack) -> tuple[float, str]:
    """Returns (all trials of expert-starvation : one bare torchrun of the same step), both warm."""
    bare = torchrun(stack, "bare_step.py")
    variables = rank_environment(stack)
    timed(bare, env=variables)
    with tempfile.TemporaryDirectory() as folder:
        run = [*MOEDIAG, "run", "expert-starvation", "--cpu", "2", "--json"]
        timed([*run, "--out", f"{folder}/warm"])
        before = timed(bare, env=variables)
        whole = timed([*run, "--out", f"{folder}/run"])
        after = timed(bare, env=variables)
        trials = json.loads((Path(folder) / "run" / "result.json").read_text())["trials"]
    yardstick = (before + after) / 2
    return whole / yardstick, f"{len(trials)} trials {whole:.1f} s, bare torchrun {yardstick:.1f} s"


def recorded_seconds(stack: environment.Stack) -> dict[str, list[float]]:
    """Returns the seconds of each round's step: recorder off, on, and on with its guard."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/seconds.json"
        command = torchrun(stack, "recorder_overhead.py", out, "48")
        timed(command, env=rank_environment(stack))
        found: dict[str, list[float]] = json.loads(Path(out).read_text())
    return found


def small_steps(stack: environment.Stack) -> dict[str, dict[str, list[list[float]]]]:
    """Returns, by step and by kind of recording, the wall and CPU seconds of each round's step."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/seconds.json"
        timed(torchrun(stack, "small_steps.py", out, "24"), env=rank_environment(stack))
        found: dict[str, dict[str, list[list[float]]]] = json.loads(Path(out).read_text())
    return found


def ratio_of_cpu(
    seconds: dict[str, list[list[float]]], one: str = "on", other: str = "off"
) -> tuple[float, str]:
    """Returns the median over rounds of the CPU time of a step (recorder on : off)."""
    cpu = {kind: [cpu for _, cpu in rounds] for kind, rounds in seconds.items()}
    value, detail = ratio_of_steps(cpu, one, other)
    added = statistics.median(a - b for a, b in zip(cpu[one], cpu[other], strict=True))
    return value, f"{1e3 * added:.2f} ms more; {detail}"


def ratio_of_laws(seconds: dict[str, list[float]]) -> tuple[float, str]:
    """Returns the median over rounds of the mean of the first 200 steps with laws, 8 of which are
    checked : the same step with the recorder alone."""
    pairs = zip(seconds["laws"], seconds["checked"], strict=True)
    mean = {**seconds, "laws": [0.96 * plain + 0.04 * checked for plain, checked in pairs]}
    value, detail = ratio_of_steps(mean, "laws", "on")
    return value, f"{detail}; checked {1e3 * statistics.median(seconds['checked']):.0f} ms"


def ratio_of_steps(seconds: dict[str, list[float]], one: str, other: str) -> tuple[float, str]:
    """Returns the median over rounds of (step with ``one`` : the same step with ``other``), and
    where it lies with a probability of 95 % whatever the distribution."""
    ratios = sorted(a / b for a, b in zip(seconds[one], seconds[other], strict=True))
    # Of n values, those at these places from both ends: a sign test.
    low = max(0, round(len(ratios) / 2 - 0.98 * math.sqrt(len(ratios))))
    step = statistics.median(seconds[other])
    between = f"95 %: {ratios[low]:.3f} to {ratios[-1 - low]:.3f}"
    return statistics.median(ratios), f"step {1e3 * step:.1f} ms, {between}"


def hang_to_verdict() -> tuple[float, str]:
    """Returns the seconds from the last progress to the verdict, minus the quiescence window."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*MOEDIAG, "run", "expert-starvation-hang", "--variant", "unfixed", "--cpu", "2"]
        timed([*command, "--json", "--out", f"{folder}/run"])
        run = Path(folder) / "run"
        trial = json.loads((run / "result.json").read_text())["trials"][0]
        launch = json.loads((run / trial["evidence"] / "launch.json").read_text())
    waited = trial["seconds"]["stall_to_verdict"]
    window = launch["stall"]["window"]
    return (
        waited - window,
        f"verdict {trial['verdict']} after {waited:.1f} s, window {window:.1f} s",
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", metavar="WORD", default="", help="rows whose name has WORD")
    parser.add_argument(
        "--bisect", action="store_true", help="also compare a bisect with a plain serial one"
    )
    asked = parser.parse_args()
    progress = Console(stderr=True)
    stack = environment.ensure({"transformers": "4.53.2"})
    table = Table(title="moediag bench")
    for column in ("measured side by side", "value", "aim", "detail"):
        table.add_column(column)
    steps = functools.cache(lambda: recorded_seconds(stack))
    small = functools.cache(lambda: small_steps(stack))
    rows = (
        ("all trials : one bare torchrun", lambda: trials_against_torchrun(stack), "<= 2 x", "x"),
        (
            "recorder on : off, mid-size step",
            lambda: ratio_of_steps(steps(), "on", "off"),
            "<= 1.01 x",
            "x",
        ),
        (
            "guard on : off, same step",
            lambda: ratio_of_steps(steps(), "guard", "on"),
            "<= 1.03 x",
            "x",
        ),
        ("the same, CPU time of a DDP step of about 1.7 ms", lambda: ratio_of_cpu(small()["ddp"]),
         "<= 1.15 x", "x"),
        ("the same, CPU time of a small FSDP2 step", lambda: ratio_of_cpu(small()["fsdp2"]),
         "<= 1.1 x", "x"),
        ("laws : recorder alone, mid-size step, first 200 steps", lambda: ratio_of_laws(steps()),
         "<= 1.01 x", "x"),
        ("laws : recorder alone, CPU time of a DDP step, first 600 steps",
         lambda: ratio_of_cpu(small()["laws"], "laws", "on"), "<= 1.05 x", "x"),
        ("moediag --version less python -c pass", diagnose_speed.starts, "<= 0.12 s", "s"),
        ("hang to verdict beyond the window", hang_to_verdict, "<= 3 s", "s"),
        ("watch: stall to page beyond the window, 4 ranks", stall_to_page, "<= 1.5 s", "s"),
        ("attach: command to page, 8 ranks", lambda: attach_to_page(8), "<= 5 s", "s"),
        ("attach: command to page, 64 ranks", lambda: attach_to_page(64), "<= 15 s", "s"),
        ("diagnose : torchfrtrace, entries per second", diagnose_speed.throughput, ">= 10 x", "x"),
        ("the same without their starts", diagnose_speed.throughput_after_start, ">= 10 x", "x"),
        ("diagnose 16 dumps, beyond python -c pass", diagnose_speed.sixteen_dumps, "<= 0.3 s", "s"),
        ("diagnose 1,024 ranks x 2,000 entries", diagnose_speed.largest, "<= 20 s", "s"),
        ("diagnose 16,384 ranks x at most 200 entries", diagnose_speed.huge, "<= 120 s", "s"),
        ("diagnose per entry, 1,024 ranks : 16 ranks", diagnose_speed.growth, "<= 1 x", "x"),
        ("bisect probes : ceil(log2 n) + 4 checks, both ends given",
         bisect_probes.both_ends_given, "<= 1 x", "x"),
        ("the same without a good end", bisect_probes.no_good_end, "<= 2 x", "x"),
    )  # fmt: skip
    if asked.bisect:
        rows += (
            ("plain serial bisect : moediag bisect, warm", bisect_probes.warm_against_serial,
             ">= 5 x", "x"),
        )  # fmt: skip
    for name, measure, aim, unit in (row for row in rows if asked.only in row[0]):
        progress.print(f"measuring {name} …")
        value, detail = measure()
        progress.print(f"  {value:.3f} {unit} ({detail})")  # kept if a later one fails
        table.add_row(name, f"{value:.3f} {unit}", aim, detail)
    Console().print(table)


if __name__ == "__main__":
    main()
